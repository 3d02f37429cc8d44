# SPDX-License-Identifier: Apache-2.0
"""A child of the launcher: own process group, log file, and death together with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_TAIL_BYTES = 16384
_MAX_LOG_BYTES = 8 << 20
"""Run directories often lie in memory: ``/run/user``, or a volume of a pod that has a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """What to run. `env` is the whole environment; output of both streams goes to `log_path`."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log_path: Path


def die_with_parent() -> Callable[[], None]:
    """Return a function for the child, between fork and exec: SIGKILL it when we die.

    The kernel ties this to the *thread* that forks, so children are started by the main one.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent died before prctl
            os._exit(1)

    return prepare


class ChildProcess:
    """A running child; it may be started again after it ended."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self._popen: subprocess.Popen[bytes] | None = None
        self._echoed = 0

    @property
    def is_started(self) -> bool:
        """Whether it was started at all; it may have ended since."""
        return self._popen is not None

    @property
    def pid(self) -> int:
        """Process id, and process group id, of the latest start."""
        if self._popen is None:
            raise RuntimeError(f"{self.spec.name} was not started")
        return self._popen.pid

    def start(self) -> None:
        """Start it. The log is appended to, so a restart keeps what came before."""
        descriptor = os.open(
            self.spec.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        try:
            self._popen = subprocess.Popen(
                self.spec.argv,
                env=dict(self.spec.env),
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        finally:
            os.close(descriptor)

    def exit_status(self) -> str | None:
        """Return ``exit code 1`` or ``signal SIGKILL`` once it has ended, None while it runs."""
        code = None if self._popen is None else self._popen.poll()
        if code is None:
            return None
        if code < 0:
            try:
                return f"signal {signal.Signals(-code).name}"
            except ValueError:
                return f"signal {-code}"
        return f"exit code {code}"

    def stop(self, grace_s: float, hurry: Callable[[], bool]) -> None:
        """End it and its process group: SIGTERM, wait at most `grace_s`, SIGKILL.

        SIGTERM goes to the child alone: SGLang stops its own children in order; SIGKILL goes
        to the whole group. `hurry` is polled; when true the wait ends at once.
        """
        if self._popen is None:
            return
        if self._popen.poll() is None:
            self._popen.terminate()
            deadline = time.monotonic() + grace_s
            while self._popen.poll() is None and time.monotonic() < deadline and not hurry():
                time.sleep(0.02)
        self.kill_group()

    def kill_group(self) -> None:
        """SIGKILL whatever is left of the process group, and reap the child."""
        if self._popen is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines of the log."""
        try:
            with self.spec.log_path.open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - _TAIL_BYTES))
                text = file.read().decode("utf-8", errors="replace")
        except OSError as error:
            return f"(log unreadable: {error.strerror})"
        return "\n".join(text.rstrip().splitlines()[-lines:]) or "(the log is empty)"

    def bound_log(self) -> None:
        """Move a log that has become long to ``*.log.1``, in place of what is there.

        The child keeps its descriptor, so the log is copied and cut; what it writes in between is
        lost. Call `new_log_lines` before, if these are wanted.
        """
        path = self.spec.log_path
        with contextlib.suppress(OSError):
            if path.stat().st_size > _MAX_LOG_BYTES:
                shutil.copyfile(path, f"{path}.1")
                os.truncate(path, 0)
                self._echoed = 0

    def new_log_lines(self) -> list[str]:
        """Return the complete lines written since the last call."""
        try:
            with self.spec.log_path.open("rb") as file:
                file.seek(self._echoed)
                data = file.read()
        except OSError:
            return []
        end = data.rfind(b"\n") + 1
        self._echoed += end
        return data[:end].decode("utf-8", errors="replace").splitlines()
