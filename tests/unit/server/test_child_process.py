# SPDX-License-Identifier: Apache-2.0
"""The log of a child that runs for months: bounded exactly, and complete."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tandemkv.server.launch import child_process
from tandemkv.server.launch.child_process import ChildProcess, ChildSpec
from tandemkv.server.launch.log_writer import BoundedLog

BOUND = 8192
TALKER = """
import time
for number in range(2000):
    print("line", number, flush=True)
    time.sleep(0.0005)
"""


@pytest.fixture
def talker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ChildProcess:
    monkeypatch.setattr(child_process, "_MAX_LOG_BYTES", BOUND)
    return ChildProcess(
        ChildSpec(
            name="talker",
            argv=(sys.executable, "-c", TALKER),
            env=dict(os.environ),
            log_path=tmp_path / "child.log",
        )
    )


def numbers(lines: list[str]) -> list[int]:
    return [int(line.split()[1]) for line in lines]


def wait_for_end(child: ChildProcess) -> None:
    deadline = time.monotonic() + 30
    while child.exit_status() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_the_log_never_exceeds_its_bound_and_loses_nothing(
    talker: ChildProcess, tmp_path: Path
) -> None:
    log = tmp_path / "child.log"
    talker.start()
    seen: list[str] = []
    largest = 0
    deadline = time.monotonic() + 30
    while talker.exit_status() is None:
        assert time.monotonic() < deadline
        for path in (log, tmp_path / "child.log.1"):
            with contextlib.suppress(FileNotFoundError):
                largest = max(largest, path.stat().st_size)
        seen += talker.new_log_lines()
        time.sleep(0.002)
    talker.kill_group()
    seen += talker.new_log_lines()
    assert 0 < largest <= BOUND
    assert {path.name for path in tmp_path.iterdir()} == {"child.log", "child.log.1"}
    assert talker.log_tail(1) == "line 1999"
    assert numbers(seen) == list(range(2000))
    kept = (tmp_path / "child.log.1").read_text() + log.read_text()
    last = numbers(kept.partition("\n")[2].splitlines())  # a log may begin within a line
    assert last == list(range(last[0], 2000))


def test_a_killed_writer_is_replaced_and_the_child_goes_on(
    talker: ChildProcess, tmp_path: Path
) -> None:
    talker.start()
    first = talker._writer
    assert first is not None
    while not talker.log_tail(1).startswith("line"):
        time.sleep(0.01)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    talker.tend_log()
    wait_for_end(talker)
    talker.kill_group()
    assert talker.exit_status() == "exit code 0"
    assert talker.log_tail(1) == "line 1999"


def test_a_stopped_launcher_does_not_stop_the_child(talker: ChildProcess, tmp_path: Path) -> None:
    """Nobody here reads: the writer is a process of its own."""
    talker.start()
    wait_for_end(talker)
    talker.kill_group()
    assert talker.log_tail(1) == "line 1999"


@pytest.mark.parametrize("hurries", [False, True])
def test_a_child_that_cannot_be_killed_is_left_to_a_later_call(
    talker: ChildProcess, monkeypatch: pytest.MonkeyPatch, *, hurries: bool
) -> None:
    """One that waits in a driver ends after that, or never; somebody in a hurry waits less."""
    talker.start()
    with monkeypatch.context() as patched:
        limits = {"_HURRIED_S": hurries, "_KILLED_S": not hurries}
        for name, counts in limits.items():
            patched.setattr(child_process, name, 0.1 if counts else math.inf)
        patched.setattr(os, "killpg", lambda *_: None)
        talker.kill_group(lambda: hurries)
    assert talker.exit_status() is None
    talker.kill_group()
    assert talker.exit_status() == "signal SIGKILL"


def test_a_line_longer_than_a_log_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "child.log"
    log = BoundedLog(str(path), 10)
    log.write(b"abc\n" + b"x" * 25)
    assert path.stat().st_size <= 10
    assert (tmp_path / "child.log.1").read_bytes() == b"x" * 10
    assert path.read_bytes() == b"x" * 5


def test_what_the_disk_does_not_take_is_counted(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    log = BoundedLog(str(folder / "child.log"), 1000)
    log.write(b"lost\n")
    folder.mkdir()
    log.write(b"kept\n")
    text = (folder / "child.log").read_text()
    assert text == "[5 bytes of this log were lost: the disk took none]\nkept\n"


def test_a_start_that_fails_touches_no_process_of_another(
    talker: ChildProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of the last one may be somebody else's by then."""
    talker.start()
    talker.kill_group()

    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", refuse)
        with pytest.raises(BlockingIOError):
            talker.start()
        patched.setattr(os, "pipe2", refuse)
        with pytest.raises(BlockingIOError):
            talker.start()
        patched.setattr(os, "killpg", lambda *_: pytest.fail("killed"))
        talker.kill_group()
    talker.start()
    assert talker.exit_status() is None
    talker.kill_group()
