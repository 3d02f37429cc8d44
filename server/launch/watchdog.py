# SPDX-License-Identifier: Apache-2.0
"""Outlives the launcher by a moment: ends its children when it was killed outright.

PR_SET_PDEATHSIG reaches only the launcher's own children, and a process that SGLang is just
spawning sets its own only after its imports. So a second process, which uses nothing but the
standard library, holds the read end of a pipe: end of file without ``bye`` means that
the launcher is gone, and it kills the process groups it was told of and removes what the launch
made. The launcher starts it as a script, isolated (``-I -S``).
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

_SHARED_MEMORY = "/dev/shm/"
_DELETED = " (deleted)"
_OF_A_LIBRARY = re.compile(
    r"(cuda\.shm\.|multi_tokenizer_args_|nccl-\w{6}$|psm_\w{8}$|sem\.|sgl_shm_|sglang_loads_"
    r"|sglang_host_pool_|tandemkv-|torch_\d+_|__KMP_REGISTERED_LIB_)"
)
"""Names that CUDA, SGLang, NCCL, Python, torch, OpenMP and we give to segments."""
_END_S = 5.0
_FIRST_LOOK_S, _LONGEST_PAUSE_S = 0.5, 4.0
"""Between looks at shared memory; one takes some milliseconds."""


def shared_memory_of(groups: Iterable[int]) -> set[str]:
    """Return the segments in ``/dev/shm`` that processes of these process groups have mapped.

    Those that libraries name themselves (NCCL, ``multiprocessing``) have no other trace of whose
    they are, and outlive processes that are killed. Files of a user are none of them: people keep
    checkpoints there, which SGLang maps while it loads them.
    """
    wanted = set(groups)
    found: set[str] = set()
    for process in _processes():
        with contextlib.suppress(OSError):
            if os.getpgid(int(process.name)) in wanted:
                maps = (process / "maps").read_text(encoding="utf-8", errors="replace")
                found |= {line.partition(_SHARED_MEMORY)[2] for line in maps.splitlines()}
    return {
        _SHARED_MEMORY + name
        for name in found
        if _OF_A_LIBRARY.match(name) and "/" not in name and not name.endswith(_DELETED)
    }


def remove_segments(paths: Iterable[str]) -> None:
    """Remove files of `shared_memory_of` that are ours and that no process has mapped any more."""
    for path in map(Path, paths):
        with contextlib.suppress(OSError):
            if path.stat().st_uid == os.geteuid() and not _is_mapped(path):
                path.unlink()


def _is_mapped(path: Path) -> bool:
    for process in _processes():
        with contextlib.suppress(OSError):
            if os.fsencode(path) in (process / "maps").read_bytes():
                return True
    return False


def _processes() -> list[Path]:
    return [entry for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


class Watchdog:
    """The launcher's side: tells the watchdog process which groups to end.

    `patterns` are absolute paths, with wildcards, of what is removed if we die, as of
    `RunDir.made`; the descriptor `lock` is kept until that is done.
    """

    def __init__(self, patterns: Sequence[str] = (), *, lock: int | None = None) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *patterns],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
            pass_fds=() if lock is None else (lock,),
        )

    def watch(self, group: int) -> None:
        """End process group `group` if we die."""
        self._tell(f"+{group}")

    def forget(self, group: int) -> None:
        """Leave process group `group` alone; its number may be given to somebody else."""
        self._tell(f"-{group}")

    def close(self) -> None:
        """Dismiss the watchdog; it does nothing more."""
        self._tell("bye")
        try:
            self._popen.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()

    def _tell(self, line: str) -> None:
        assert self._popen.stdin is not None
        with contextlib.suppress(OSError):  # it was killed itself; PR_SET_PDEATHSIG is left
            self._popen.stdin.write(line + "\n")
            self._popen.stdin.flush()


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: dict[int, set[str]] = {}
    for line in _lines(groups):
        if line == "bye":
            return
        if line.startswith("+"):
            groups[int(line[1:])] = set()
        elif line.startswith("-"):
            remove_segments(groups.pop(int(line[1:]), ()))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    _await_end(set(groups))  # who still runs might make files anew
    for segments in groups.values():
        remove_segments(segments)
    for pattern in sys.argv[1:]:
        for name in glob.glob(pattern, include_hidden=True):  # noqa: PTH207 (absolute)
            if name.endswith("/"):  # as in `RunDir.made`
                with contextlib.suppress(OSError):
                    os.rmdir(name)  # noqa: PTH106 (of a link it is an error only with the slash)
                continue
            shutil.rmtree(name, ignore_errors=True)
            with contextlib.suppress(OSError):
                Path(name).unlink()


def _lines(groups: dict[int, set[str]]) -> Iterator[str]:
    """Yield what the launcher says; note in between what `groups` have mapped.

    The kernel may kill them together with the launcher: then it is too late to look.
    """
    pause, text = _FIRST_LOOK_S, ""
    while True:
        if not select.select([0], [], [], pause)[0]:
            for group, segments in groups.items():
                segments |= shared_memory_of([group])
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            continue
        data = os.read(0, 4096)
        if not data:
            return
        *lines, text = (text + data.decode()).split("\n")
        pause = _FIRST_LOOK_S
        yield from lines


def _await_end(groups: set[int]) -> None:
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline and any(_has_live(group) for group in groups):
        time.sleep(0.02)


def _has_live(group: int) -> bool:
    """Whether a process of `group` runs; one that nobody has reaped does not."""
    for process in _processes():
        with contextlib.suppress(OSError):
            stat = (process / "stat").read_text(encoding="utf-8", errors="replace")
            state, _, found = stat.rpartition(")")[2].split()[:3]
            if int(found) == group and state not in "ZX":
                return True
    return False


if __name__ == "__main__":
    _main()
