"""Stands in for a rank: ``fake_rank.py NAME DIRECTORY MODE``. Standard library only."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

name, directory, mode = sys.argv[1], Path(sys.argv[2]), sys.argv[3]


def note_pid(pid: int) -> None:
    with (directory / "pids").open("a") as file:
        file.write(f"{name} {pid}\n")


note_pid(os.getpid())
print(f"{name} begins", flush=True)
if mode == "die":
    print(f"{name}: no such tensor", flush=True)
    sys.exit(3)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode in ("stubborn", "parent"):
    # A grandchild that ignores SIGTERM and does not notice its parent's death.
    code = "import signal,time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    note_pid(subprocess.Popen([sys.executable, "-I", "-S", "-c", code]).pid)
if mode == "shared":
    handle, segment = tempfile.mkstemp(dir="/dev/shm", prefix="psm_")
    os.write(handle, bytes(4096))
    mapped = mmap.mmap(handle, 4096)
    checkpoint = []
    for path in (directory.parent / "user_files").read_text().splitlines():
        with Path(path).open("rb") as file:
            checkpoint.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    (directory / f"{name}.segment").write_text(segment)
if mode == "draining":

    def drain(*_: object) -> None:
        (directory / f"{name}.draining").touch()
        while not (directory / f"{name}.finish").exists():
            time.sleep(0.01)
        (directory / f"{name}.ended").touch()
        sys.exit(0)

    signal.signal(signal.SIGTERM, drain)
if mode == "answering":

    def answer(*_: object) -> None:
        (directory / f"{name}.answered").touch()
        sys.exit(0)

    signal.signal(signal.SIGQUIT, answer)
if mode != "never":
    (directory / f"{name}.up").touch()
time.sleep(600)
