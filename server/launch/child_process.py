# SPDX-License-Identifier: Apache-2.0
"""A child of the launcher: own process group, bounded log, and death together with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import log_writer
from .watchdog import Watchdog

_PR_SET_PDEATHSIG = 1
_TAIL_BYTES = 16384
_MAX_LOG_BYTES = 8 << 20
"""Run directories often lie in memory: ``/run/user``, or a volume of a pod that has a limit."""
_TICK_S = 0.1
_SETTLE_S = 1.0
"""Longest wait for the last lines of a child that has ended."""
_KILLED_S = 60.0
"""Longest wait for the end of a killed child. One that waits for a driver may never end."""
_HURRIED_S = 5.0
"""The same for somebody who is in a hurry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """What to run. `env` is the whole environment; output of both streams goes to `log_path`.

    `stop_signal` asks the process to end. `hang_signal`, if there is one, tells it that something
    below it hangs, so that it can answer who waits before all of it is killed.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log_path: Path
    stop_signal: signal.Signals = signal.SIGTERM
    hang_signal: signal.Signals | None = None


def die_with_parent() -> Callable[[], None]:
    """Return a function for the child, between fork and exec: SIGKILL it when we die.

    The kernel ties this to the *thread* that forks, so children are started by the main one.
    """
    libc, parent = ctypes.CDLL(None, use_errno=True), os.getpid()

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent died before prctl
            os._exit(1)

    return prepare


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel send us `number` when the thread that started us ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


class ChildProcess:
    """A running child; it may be started again after it ended."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self._popen: subprocess.Popen[bytes] | None = None
        self._is_reaped = False
        self._writer: subprocess.Popen[bytes] | None = None
        self._output = -1
        self._echoed = 0
        self._echoed_inode = 0
        self._unfinished = b""

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
        self._close_output()
        self._output, writing_end = os.pipe2(os.O_CLOEXEC)
        try:
            self._start_writer()
            self._popen = subprocess.Popen(
                self.spec.argv,
                env=dict(self.spec.env),
                stdin=subprocess.DEVNULL,
                stdout=writing_end,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
            self._is_reaped = False
        finally:
            os.close(writing_end)

    def _start_writer(self) -> None:
        # The reading end stays open here: should the writer be killed, the next one goes on.
        log = str(self.spec.log_path.absolute())
        self._writer = subprocess.Popen(
            [sys.executable, "-I", "-S", log_writer.__file__, log, str(_MAX_LOG_BYTES)],
            stdin=self._output,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    def tend_log(self) -> None:
        """Start the writer of the log again if somebody killed it. Call it often."""
        if self._writer is not None and self._writer.poll() not in (None, 0):
            with contextlib.suppress(OSError):  # there is no process just now
                self._start_writer()

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

    def await_ready(
        self, detail: Callable[[], str | None], timeout_s: float, *, setting: str = ""
    ) -> str | None:
        """Wait until `detail`, which says what is missing, returns None.

        Return why it never did: the child has ended, or `timeout_s`, by the name of the `setting`,
        are over.
        """
        deadline = time.monotonic() + timeout_s
        while (reason := detail()) is not None:
            status = self.exit_status()
            if status is not None:
                return f"{self.spec.name} ended: {status}"
            if time.monotonic() > deadline:
                named = f" ({setting})" if setting else ""
                return f"{self.spec.name} not ready after {timeout_s:g} s{named}: {reason}"
            time.sleep(_TICK_S)
        return None

    def stop(self, grace_s: float, hurry: Callable[[], bool]) -> None:
        """End it and its process group: the stop signal, wait at most `grace_s`, SIGKILL.

        The signal goes to the child alone: SGLang stops its own children in order; SIGKILL goes
        to the whole group. `hurry` is polled; when true the wait ends at once, and the one for the
        end of what was killed within seconds.
        """
        if self._popen is None:
            return
        if self._popen.poll() is None:
            self._popen.send_signal(self.spec.stop_signal)
            deadline = time.monotonic() + grace_s
            while self._popen.poll() is None and time.monotonic() < deadline and not hurry():
                time.sleep(0.02)
        self.kill_group(hurry)

    def tell_hang(self) -> bool:
        """Send the signal for a process below it that hangs; False if it has none."""
        if self._popen is None or self.spec.hang_signal is None:
            return False
        self._popen.send_signal(self.spec.hang_signal)
        return True

    def kill(self) -> None:
        """SIGKILL whatever is left of the process group, and wait for nothing."""
        if self._popen is None or self._is_reaped:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def kill_group(self, hurry: Callable[[], bool] = lambda: False) -> None:
        """`kill`, and reap the child; one that does not end in a minute is left to a later call.

        In seconds if `hurry` is true, which is polled.
        """
        if self._popen is None or self._is_reaped:
            return
        self.kill()
        begun = time.monotonic()
        while self._popen.poll() is None:
            if time.monotonic() - begun > (_HURRIED_S if hurry() else _KILLED_S):
                return
            time.sleep(0.01)
        self._is_reaped = True  # its number may be given to another group from now on
        self._await_writer()
        self._close_output()

    def _close_output(self) -> None:
        if self._output >= 0:
            os.close(self._output)
        self._output = -1

    def _await_writer(self) -> None:
        """Wait for the writer, which ends after the last process that could print."""
        if self._writer is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._writer.wait(_SETTLE_S)

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines of the log; of a child that has ended, its last ones."""
        if self.exit_status() is not None:
            self._await_writer()
        data = b""
        try:
            for path in (self._older_log, self.spec.log_path):
                with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                    file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
                    data += file.read()
        except OSError as error:
            return f"(log unreadable: {error.strerror})"
        text = data.decode("utf-8", errors="replace")
        return "\n".join(text.rstrip().splitlines()[-lines:]) or "(the log is empty)"

    def new_log_lines(self) -> list[str]:
        """Return the complete lines written since the last call."""
        try:
            with self.spec.log_path.open("rb") as current:
                inode = os.fstat(current.fileno()).st_ino
                rest = b""
                if inode != self._echoed_inode:  # the log was moved, or is the first
                    with contextlib.suppress(FileNotFoundError), self._older_log.open("rb") as old:
                        if os.fstat(old.fileno()).st_ino == self._echoed_inode:
                            old.seek(self._echoed)
                            rest = old.read()
                    self._echoed, self._echoed_inode = 0, inode
                current.seek(self._echoed)
                data = current.read()
        except OSError:
            return []
        self._echoed += len(data)
        data = self._unfinished + rest + data
        end = data.rfind(b"\n") + 1
        self._unfinished = data[end:]  # the line may go on in the next log
        return data[:end].decode("utf-8", errors="replace").splitlines()

    @property
    def _older_log(self) -> Path:
        return self.spec.log_path.with_name(f"{self.spec.log_path.name}.1")


@contextlib.contextmanager
def watched(spec: ChildSpec) -> Iterator[ChildProcess]:
    """Run a child during the body. Its process group ends with that, and however this one ends."""
    child = ChildProcess(spec)
    with contextlib.closing(Watchdog()) as watchdog:
        child.start()
        watchdog.watch(child.pid)
        try:
            yield child
        finally:
            child.kill_group()
            watchdog.forget(child.pid)
