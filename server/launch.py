# SPDX-License-Identifier: Apache-2.0
"""Start both ranks, watch them, and leave nothing behind.

Runs in the launcher process, on its main thread only: signals are handled there, and the
kernel ties the children's lives to the thread that started them.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.markup import escape

from tandemkv.cache_rank.protocol.errors import TandemKVError

from .child_process import ChildProcess, ChildSpec
from .guard import Guard
from .probes import ServerState
from .progress import StartProgress

_TICK_S = 0.05
_FIRST_BACKOFF_S = 0.5
_LONGEST_BACKOFF_S = 30.0
_HEALTHY_S = 60.0
"""A cache rank that lived this long starts over with the shortest backoff."""
_QUESTION_S = 5.0
"""Between two looks whether the cache rank works."""


class LaunchError(TandemKVError):
    """A rank did not start, or SGLang ended while serving."""


class _StopRequestedError(Exception):
    """Ctrl-C or SIGTERM arrived while starting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """What to start and how to tell that it is ready.

    `cache_rank` is None if the inference rank is its own. `cache_rank_detail` returns None once
    the cache rank answers, else why it does not. `cache_rank_works` is asked while serving; one
    that does not for `start_timeout_s` is ended, and started again.
    `start_report` is asked once the server is ready, and printed.
    `clean_up` gets whether the logs are to be kept, which they are after a failure;
    `guarded_dir` is removed if the launcher is killed outright.
    """

    cache_rank: ChildSpec | None
    sglang: ChildSpec
    cache_rank_detail: Callable[[], str | None]
    server_state: Callable[[], ServerState]
    banner: str
    start_timeout_s: float
    stop_timeout_s: float
    clean_up: Callable[[bool], None]
    guarded_dir: Path | None = None
    first_backoff_s: float = _FIRST_BACKOFF_S
    start_report: Callable[[], RenderableType | None] = lambda: None
    cache_rank_works: Callable[[], bool] = lambda: True


class StopSignals:
    """Counts SIGINT, SIGTERM and SIGHUP instead of dying of them. A context manager."""

    def __init__(self) -> None:
        self.count = 0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


class Launcher:
    """One launch, from start to shutdown. Use once."""

    def __init__(self, plan: LaunchPlan, console: Console, *, verbose: bool = False) -> None:
        self._plan = plan
        self._console = console
        self._verbose = verbose
        self._cache_rank = ChildProcess(plan.cache_rank) if plan.cache_rank else None
        self._sglang = ChildProcess(plan.sglang)
        self._progress = StartProgress(console)
        self._backoff_s = plan.first_backoff_s
        self._cache_rank_started = 0.0
        self._last_worked = 0.0
        self._next_question = 0.0
        self._restart_at: float | None = None

    def run(self) -> None:
        """Start, serve until a signal asks to stop, shut down.

        Raises
        ------
        LaunchError
            If a rank did not become ready, or SGLang ended by itself.
        """
        with StopSignals() as self._signals:
            self._guard = Guard(self._plan.guarded_dir)
            keep_logs = False
            try:
                self._start()
                report = self._plan.start_report()
                if report is not None:
                    self._console.print(report)
                self._console.print(self._plan.banner, soft_wrap=True)
                self._serve()
            except _StopRequestedError:
                pass
            except LaunchError:
                keep_logs = True
                raise
            finally:
                self._shut_down(keep_logs=keep_logs)

    def _start(self) -> None:
        deadline = time.monotonic() + self._plan.start_timeout_s
        if self._cache_rank is not None:
            with self._progress.stage("cache rank"):
                self._start_cache_rank(self._cache_rank)
                self._await(self._plan.cache_rank_detail, deadline, self._cache_rank)
        self._sglang.start()
        self._guard.watch(self._sglang.pid)
        with self._progress.stage("SGLang loading"):
            self._await(self._loading_detail, deadline, self._sglang)
        with self._progress.stage("handshake and warm-up"):
            self._await(self._handshake_detail, deadline, self._sglang)

    def _children(self) -> list[ChildProcess]:
        return [self._sglang] if self._cache_rank is None else [self._cache_rank, self._sglang]

    def _loading_detail(self) -> str | None:
        state = self._own_state()
        return None if state.reachable else state.detail

    def _handshake_detail(self) -> str | None:
        state = self._own_state()
        return None if state.ready else state.detail

    def _own_state(self) -> ServerState:
        state = self._plan.server_state()
        if state.is_other:  # SGLang stays alive without its port
            raise LaunchError(state.detail)
        return state

    def _await(
        self, detail: Callable[[], str | None], deadline: float, waited_for: ChildProcess
    ) -> None:
        """Wait until `detail` returns None; fail as soon as a child ends or time is up."""
        pause = _TICK_S
        while True:
            reason = detail()
            self._raise_if_stopped_or_ended()
            if reason is None:
                return
            self._progress.note(escape(reason))
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"not ready after {self._plan.start_timeout_s:g} s (--start-timeout-s): "
                    f"{reason}\n{_tail(waited_for)}"
                )
            self._pause(pause)
            pause = min(0.5, pause * 1.5)

    def _raise_if_stopped_or_ended(self) -> None:
        if self._signals.count:
            raise _StopRequestedError
        for child in self._children():
            status = child.exit_status()
            if status is not None:
                raise LaunchError(f"{child.spec.name} ended: {status}\n{_tail(child)}")

    def _serve(self) -> None:
        self._last_worked = time.monotonic()
        while not self._signals.count:
            status = self._sglang.exit_status()
            if status is not None:
                raise LaunchError(f"SGLang ended: {status}\n{_tail(self._sglang)}")
            if self._cache_rank is not None:
                self._keep_cache_rank(self._cache_rank)
            self._pause(_TICK_S)
            for child in self._children():
                child.tend_log()

    def _keep_cache_rank(self, child: ChildProcess) -> None:
        """Restart the cache rank when it ended; SGLang reconnects by itself."""
        now = time.monotonic()
        if self._restart_at is not None:
            if now >= self._restart_at:
                self._restart_at = None
                self._start_cache_rank(child)
                self._console.print(f"cache rank restarted, pid {child.pid}")
            return
        status = child.exit_status()
        if status is None:
            self._end_if_hung(child, now)
            return
        self._end_group(child)
        if now - self._cache_rank_started > _HEALTHY_S:
            self._backoff_s = self._plan.first_backoff_s
        self._console.print(
            f"[red]cache rank ended: {status}[/]; restart in {self._backoff_s:g} s, the server "
            f"stays up\n[dim]{escape(child.log_tail(5))}[/]",
            soft_wrap=True,
        )
        self._restart_at = now + self._backoff_s
        self._backoff_s = min(_LONGEST_BACKOFF_S, self._backoff_s * 2)

    def _end_if_hung(self, child: ChildProcess, now: float) -> None:
        """End a cache rank that lives and does nothing: nobody else would, and all wait for it."""
        if now < self._next_question:
            return
        self._next_question = now + min(_QUESTION_S, self._plan.start_timeout_s / 4)
        if self._plan.cache_rank_works():
            self._last_worked = now
        elif now - self._last_worked > self._plan.start_timeout_s:
            self._console.print(
                f"[red]cache rank hangs[/]: no answer, or busy with one message, for more than "
                f"{self._plan.start_timeout_s:g} s (--start-timeout-s)",
                soft_wrap=True,
            )
            child.kill_group()

    def _start_cache_rank(self, child: ChildProcess) -> None:
        child.start()
        self._cache_rank_started = self._last_worked = time.monotonic()
        self._guard.watch(child.pid)

    def _pause(self, seconds: float) -> None:
        """Sleep in short steps, so that a signal or a child's end is seen at once."""
        end = time.monotonic() + seconds
        while True:
            self._echo_logs()
            rest = end - time.monotonic()
            if rest <= 0 or self._signals.count:
                return
            time.sleep(min(_TICK_S, rest))

    def _echo_logs(self) -> None:
        if self._verbose:
            for child in self._children():
                for line in child.new_log_lines():
                    text = f"[dim]{child.spec.name}:[/] {escape(line)}"
                    self._console.print(text, soft_wrap=True)

    def _end_group(self, child: ChildProcess) -> None:
        pid = child.pid
        child.kill_group()
        self._guard.forget(pid)

    def _shut_down(self, *, keep_logs: bool) -> None:
        asked = self._signals.count
        if asked:
            self._console.print("stopping; once more ends it at once")
        for child in reversed(self._children()):
            if child.is_started:
                grace_s = self._plan.stop_timeout_s
                child.stop(grace_s, hurry=lambda: self._signals.count > max(1, asked))
                self._guard.forget(child.pid)
        self._echo_logs()
        self._guard.close()
        self._plan.clean_up(keep_logs)
        if asked:
            self._console.print("stopped")


def _tail(child: ChildProcess) -> str:
    return f"last lines of {child.spec.log_path}:\n{child.log_tail()}"
