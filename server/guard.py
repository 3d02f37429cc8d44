# SPDX-License-Identifier: Apache-2.0
"""Outlives the launcher by a moment: ends its children when it was killed outright.

PR_SET_PDEATHSIG reaches only the launcher's own children, and a process that SGLang is just
spawning sets its own only after its imports. So a second process, which uses nothing but the
standard library, holds the read end of a pipe: end of file without ``bye`` means that
the launcher is gone, and it kills the process groups it was told of and removes the run
directory. The launcher starts it as a script, isolated (``-I -S``).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path


class Guard:
    """The launcher's side: tells the guard process which groups to end."""

    def __init__(self, remove_dir: Path | None = None) -> None:
        argv = [sys.executable, "-I", "-S", __file__, *([str(remove_dir)] if remove_dir else [])]
        self._popen = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def watch(self, group: int) -> None:
        """End process group `group` if we die."""
        self._tell(f"+{group}")

    def forget(self, group: int) -> None:
        """Leave process group `group` alone; its number may be given to somebody else."""
        self._tell(f"-{group}")

    def close(self) -> None:
        """Dismiss the guard; it does nothing more."""
        self._tell("bye")
        try:
            self._popen.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()

    def _tell(self, line: str) -> None:
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(line + "\n")
            self._popen.stdin.flush()
        except OSError:  # the guard itself was killed; PR_SET_PDEATHSIG is left
            pass


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        word = line.strip()
        if word == "bye":
            return
        if word.startswith("+"):
            groups.add(int(word[1:]))
        elif word.startswith("-"):
            groups.discard(int(word[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    if len(sys.argv) > 1:
        shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    _main()
