# SPDX-License-Identifier: Apache-2.0
"""Start both ranks, watch them, and leave nothing behind.

Runs in the launcher process, on its main thread only: signals are handled there, and the
kernel ties the children's lives to the thread that started them.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

from rich.console import Console, RenderableType
from rich.markup import escape

from tandemkv.server.cli.start_view import StartProgress

from .child_process import ChildProcess, ChildSpec
from .liveness import Liveness, Pulse
from .probes import ServerState
from .supervision import LaunchError, RestartRules, SupervisedRank, tail
from .watchdog import Watchdog

_TICK_S = 0.05
_MEANWHILE = "requests wait for it, for --recovery-timeout-s at most"
"""What clients get while no cache rank serves, for messages."""


class _StopRequestedError(Exception):
    """Ctrl-C or SIGTERM arrived while starting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRankLaunch:
    """A cache rank: how it is started, and how it is asked.

    `spec` is None if another process starts it. `standby` takes its place when it is lost; either
    may be the one that serves. `detail` returns None once it answers, else why it does not.
    `pulse`, with the id of a process, is asked while serving, from a thread.
    """

    spec: ChildSpec | None
    standby: ChildSpec | None = None
    detail: Callable[[], str | None]
    pulse: Callable[[int], Pulse]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """What to start and how to tell that it is ready, and gets on.

    There are no `cache_ranks` if the inference rank is its own.
    `sglang_pulse` is asked while serving, from a thread; `rules` says what follows.
    `sglang` is None if another process starts it; then its fields are not used, and that process
    speaks for the launch, which is over once `is_over` returns true.
    `ends_with_sglang`: SGLang ends with 0 where another host has asked for it, and that is the end.
    `sglang_waits` tells whether it is started once the cache ranks answer, else while they load: it
    gives up half a minute after it has loaded, and another host may come later.
    `holder` makes what holds memory for the ranks while the launch lives.
    `exit_timeout_s` is for a rank to end once its requests are through, before it is killed.
    `before_sglang` is called before each start of SGLang.
    `start_report` is asked once the server is ready, and printed.
    `clean_up` gets whether the logs are to be kept, which they are after a failure; `lock` is the
    run directory's (`serve.lock_run_dir`), if it has one; `watched` are the patterns of paths that
    are removed if the launcher is killed outright.
    """

    cache_ranks: tuple[CacheRankLaunch, ...] = ()
    sglang: ChildSpec | None
    sglang_waits: bool = False
    ends_with_sglang: bool = False
    server_state: Callable[[], ServerState] = lambda: ServerState(False, False, "no server here")
    sglang_pulse: Callable[[], Pulse] = lambda: Pulse(is_ready=False, stalled_s=0.0)
    banner: str = ""
    is_over: Callable[[], bool] = lambda: False
    rules: RestartRules
    drain_timeout_s: float
    exit_timeout_s: float = 15.0
    clean_up: Callable[[bool], None]
    before_sglang: Callable[[], None] = lambda: None
    holder: Callable[[], AbstractContextManager[object]] = nullcontext
    watched: tuple[str, ...] = ()
    lock: int | None = None
    start_report: Callable[[], RenderableType | None] = lambda: None


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP instead of dying of them."""
    found: list[int] = []
    previous = {
        number: signal.signal(number, lambda received, _: found.append(received))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN  # nohup
    }
    try:
        yield found
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Launcher:
    """One launch, from start to shutdown. Use once.

    Its watchdog is started at once; raises `OSError` if it cannot be, once `plan` is cleaned up.
    """

    def __init__(self, plan: LaunchPlan, console: Console, *, verbose: bool = False) -> None:
        self._plan, self._held = plan, ExitStack()
        try:
            self._watchdog = Watchdog(plan.watched, lock=plan.lock)
        except BaseException:  # nothing would remove the token and the settings
            plan.clean_up(False)
            raise
        self._console = console
        self._verbose = verbose
        self._sglang = self._supervised(
            plan.sglang,
            lambda _: plan.sglang_pulse(),
            "the server is not ready, connections are refused",
            plan.before_sglang,
        )
        self._cache_ranks = [
            self._supervised(rank.spec, rank.pulse, _MEANWHILE) for rank in plan.cache_ranks
        ]
        alone = "no other cache rank is loaded, one that is lost is started anew"
        self._standbys = [
            self._supervised(rank.standby, rank.pulse, alone) for rank in plan.cache_ranks
        ]
        self._progress = StartProgress(console)

    def _supervised(
        self,
        spec: ChildSpec | None,
        ask: Callable[[int], Pulse],
        meanwhile: str,
        before_start: Callable[[], None] = lambda: None,
    ) -> SupervisedRank | None:
        if spec is None:
            return None
        child = ChildProcess(spec)
        return SupervisedRank(
            child, self._watchdog, Liveness(lambda: ask(child.pid)), self._plan.rules,
            self._console, meanwhile=meanwhile, before_start=before_start,
        )  # fmt: skip

    def run(self) -> None:
        """Start, serve until a signal asks to stop or the launch is over, shut down.

        Raises `LaunchError` if a rank did not become ready, or ended too often.
        """
        with _stop_signals() as self._signals:
            keep_logs = False
            try:
                self._held.enter_context(self._plan.holder())
                self._start()
                report = self._plan.start_report()
                if report is not None:
                    self._console.print(report)
                if self._plan.banner:
                    self._console.print(self._plan.banner, soft_wrap=True)
                self._serve()
            except _StopRequestedError:
                pass
            except BaseException:
                keep_logs = True
                raise
            finally:
                self._shut_down(keep_logs=keep_logs)

    def _start(self) -> None:
        deadline = time.monotonic() + self._plan.rules.start_timeout_s
        own = [rank for rank in self._cache_ranks if rank is not None]
        for rank in own:
            rank.start()
        are_ours = bool(own) and len(own) == len(self._cache_ranks)
        loads_meanwhile = are_ours and not self._plan.sglang_waits
        if loads_meanwhile and self._sglang is not None:
            self._sglang.start()
        title = "cache rank" if len(own) == 1 else "cache ranks"
        with self._progress.stage(title) if own else nullcontext():
            for found, plan in zip(self._cache_ranks, self._plan.cache_ranks, strict=True):
                self._await(plan.detail, deadline, found.child if found else None)
        for standby in self._standbys:
            if standby is not None:
                standby.start()
        if self._sglang is None:
            return
        if not loads_meanwhile:
            self._sglang.start()
        with self._progress.stage("SGLang loading"):
            loading = partial(self._server_detail, is_loading=True)
            self._await(loading, deadline, self._sglang.child)
        with self._progress.stage("handshake and warm-up"):
            shaking_hands = partial(self._server_detail, is_loading=False)
            self._await(shaking_hands, deadline, self._sglang.child)

    def _ranks(self) -> list[SupervisedRank]:
        ranks = (*self._standbys, *self._cache_ranks, self._sglang)
        return [rank for rank in ranks if rank is not None]

    def _children(self) -> list[ChildProcess]:
        return [rank.child for rank in self._ranks()]

    def _server_detail(self, *, is_loading: bool) -> str | None:
        state = self._plan.server_state()
        if state.is_other:  # SGLang stays alive without its port
            raise LaunchError(state.detail)
        return None if state.ready or (is_loading and state.reachable) else state.detail

    def _await(
        self, detail: Callable[[], str | None], deadline: float, waited_for: ChildProcess | None
    ) -> None:
        """Wait until `detail` returns None; fail as soon as a child ends or time is up."""
        pause = _TICK_S
        while True:
            reason = detail()
            if self._is_asked_to_stop():
                raise _StopRequestedError
            for child in self._children():
                status = child.exit_status()
                if status is not None:
                    raise LaunchError(f"{child.spec.name} ended: {status}\n{tail(child)}")
            if reason is None:
                return
            self._progress.note(reason)
            if time.monotonic() > deadline:
                last = "" if waited_for is None else f"\n{tail(waited_for)}"
                raise LaunchError(
                    f"not ready after {self._plan.rules.start_timeout_s:g} s (--start-timeout-s): "
                    f"{reason}{last}"
                )
            self._pause(pause)
            pause = min(0.5, pause * 1.5)

    def _serve(self) -> None:
        for rank in (*self._cache_ranks, self._sglang):
            if rank is not None:
                rank.liveness.note_ready()  # `_start` has waited for them
        for rank in self._ranks():
            rank.liveness.start()
        while not self._is_asked_to_stop():
            for rank in self._ranks():
                try:
                    rank.keep()
                except LaunchError as error:
                    self._go_on_without(rank, error)
            self._pause(_TICK_S)

    def _go_on_without(self, rank: SupervisedRank, error: LaunchError) -> None:
        """Keep a rank no longer, of which there is a second one that is up; else raise `error`."""
        for ranks, others in (
            (self._standbys, self._cache_ranks), (self._cache_ranks, self._standbys),
        ):  # fmt: skip
            other = others[ranks.index(rank)] if rank in ranks else None
            if other is not None and other.is_up:
                ranks[ranks.index(rank)] = None
                rank.liveness.stop()
                name = other.child.spec.name
                self._console.print(
                    f"[red]no more restarts[/]: {escape(str(error))}\n{name} goes on alone",
                    soft_wrap=True,
                )
                return
        raise error

    def _is_asked_to_stop(self) -> bool:
        return bool(self._signals) or self._plan.is_over() or self._has_ended_elsewhere()

    def _has_ended_elsewhere(self) -> bool:
        child = self._sglang.child if self._plan.ends_with_sglang and self._sglang else None
        return child is not None and child.exit_status() == "exit code 0"

    def _pause(self, seconds: float) -> None:
        """Sleep in short steps, so that a signal or a child's end is seen at once."""
        end = time.monotonic() + seconds
        while True:
            self._echo_logs()
            rest = end - time.monotonic()
            if rest <= 0 or self._signals:
                return
            time.sleep(min(_TICK_S, rest))

    def _echo_logs(self) -> None:
        for child in self._children():
            child.tend_log()
            if self._verbose:
                for line in child.new_log_lines():
                    text = f"[dim]{child.spec.name}:[/] {escape(line)}"
                    self._console.print(text, soft_wrap=True)

    def _kept_while_draining(self) -> list[SupervisedRank]:
        """Return what is looked after until SGLang's requests have finished: all but SGLang."""
        if self._sglang is None or not self._sglang.liveness.was_ready:  # it has no requests
            return []
        return [rank for rank in self._ranks() if rank is not self._sglang]

    def _shut_down(self, *, keep_logs: bool) -> None:
        asked = len(self._signals)
        speaks = self._plan.sglang is not None and (asked or self._has_ended_elsewhere())
        if speaks and not asked:
            self._console.print("another node has ended the server")
        elif speaks:
            self._console.print(
                f"draining for at most {self._plan.drain_timeout_s:g} s; once more ends it at once",
                soft_wrap=True,
            )

        kept = self._kept_while_draining() if asked else []

        def hurry() -> bool:
            self._echo_logs()
            for each in tuple(kept):
                try:
                    each.keep()
                except LaunchError as error:
                    kept.remove(each)
                    self._console.print(f"[red]no more restarts[/]: {escape(str(error))}")
            return len(self._signals) > max(1, asked)

        # SGLang first: its requests need the cache rank until they are finished.
        for rank in reversed(self._ranks()):
            if rank is not self._sglang:
                kept.clear()
            drain_s = self._plan.drain_timeout_s if asked else 0.0
            rank.stop(drain_s + self._plan.exit_timeout_s, hurry)
        self._echo_logs()
        self._held.close()
        self._watchdog.close()
        self._plan.clean_up(keep_logs)
        if speaks:
            self._console.print("stopped")
