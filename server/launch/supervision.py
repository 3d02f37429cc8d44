# SPDX-License-Identifier: Apache-2.0
"""One rank that is kept running: ended when it hangs, started again when it ended.

Used by the launcher, on its main thread. The pause before a start doubles from one failure to
the next, and there is a bound on starts, after which the launch fails: whoever started it (a
container's restart policy, a person) has to look.
"""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape

from tandemkv.cache_rank.protocol.errors import TandemKVError
from tandemkv.cache_rank.protocol.fault_points import reach

from .child_process import ChildProcess
from .liveness import Liveness
from .watchdog import Watchdog, remove_segments, shared_memory_of

_LONGEST_BACKOFF_S = 30.0
_LAST_ANSWERS_S = 3.0
"""For a process that was told of a hang below it."""
WINDOW_S = 600.0
_REFUSED = re.compile(
    r"^[^\n:]+: error: (unrecognized arguments: .+|argument .+|ambiguous option: .+)\Z",
    re.MULTILINE,
)
"""What Python's parser of arguments says last."""
_OF_ARGUMENTS = "exit code 2"
_CORRECT = "correct it there (`python -m sglang.launch_server --help` lists SGLang's arguments)"


class LaunchError(TandemKVError):
    """A rank did not start, or ended too often while serving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRules:
    """When a rank is ended, and how often it is started again.

    `max_restarts` is for `WINDOW_S`. A rank that is not ready `start_timeout_s` after a restart
    counts as hung. Each restart of one that never was ready, or that only waited for another to
    end, comes after twice the pause of the one before.
    """

    hang_timeout_s: float
    start_timeout_s: float
    max_restarts: int
    first_backoff_s: float = 0.5


class SupervisedRank:
    """A child, and what is known about its life.

    `meanwhile` is what clients get while it is away, for messages; `before_start` is called before
    each start.
    """

    def __init__(
        self,
        child: ChildProcess,
        watchdog: Watchdog,
        liveness: Liveness,
        rules: RestartRules,
        console: Console,
        *,
        meanwhile: str,
        before_start: Callable[[], None] = lambda: None,
    ) -> None:
        self.child = child
        self._watchdog = watchdog
        self.liveness = liveness
        self._rules = rules
        self._console = console
        self._meanwhile = meanwhile
        self._before_start = before_start
        self._started = 0.0
        self._backoff_s = rules.first_backoff_s
        self._restart_at: float | None = None
        self._restarts: deque[float] = deque()
        self._is_coming_back = False
        self._kill_at: float | None = None
        self._segments: set[str] = set()

    def start(self) -> None:
        """Start it for the first time, or again."""
        reach("launcher.start")
        self.liveness.expect_start()
        self._before_start()
        self.child.start()
        self._started = time.monotonic()
        self._watchdog.watch(self.child.pid)

    @property
    def is_up(self) -> bool:
        """Whether it runs, and is ready or may take the place of another."""
        is_kept = self._restart_at is None and self._kill_at is None
        return is_kept and self.child.exit_status() is None and self.liveness.was_ready

    def end_group(self) -> None:
        """End what is left of it, and remove its shared memory."""
        self._end(self.child.kill_group)

    def stop(self, grace_s: float, hurry: Callable[[], bool]) -> None:
        """Ask it to end, and end it after `grace_s`; see `ChildProcess.stop`."""
        self.liveness.stop()
        if self.child.is_started:
            if self._kill_at == math.inf:
                grace_s = 0.0  # it was killed, and would not obey
            self._end(lambda: self.child.stop(grace_s, hurry))
            if self.child.exit_status() is None:
                name, pid = self.child.spec.name, self.child.pid
                self._say(
                    f"[red]{name} was killed and does not end[/], pid {pid}: it waits for a driver "
                    "or a disk, and keeps its memory until then"
                )

    def _kill(self) -> None:
        """SIGKILL it; `keep` sees its end, which with much memory, or in a driver, takes long."""
        self._kill_at = math.inf
        self._segments = shared_memory_of([self.child.pid])  # afterwards nobody knows
        self.child.kill()

    def _end(self, end: Callable[[], None]) -> None:
        segments = self._segments | shared_memory_of([self.child.pid])
        end()
        remove_segments(segments)
        self._segments = set()
        self._watchdog.forget(self.child.pid)

    def keep(self) -> None:
        """Do what is due: called every moment while serving. Never waits.

        Raises `LaunchError` if it ended more often than the rules allow.
        """
        reach("launcher.turn")
        now = time.monotonic()
        if self._restart_at is not None:
            if now >= self._restart_at:
                self._start_again(now)
            return
        status = self.child.exit_status()
        if status is not None:
            self._plan_restart(f"ended: {status}", now)
        elif self._is_coming_back and self.liveness.was_ready:
            self._is_coming_back = False
            self._say(f"{self.child.spec.name} ready again after {now - self._started:.0f} s")
        else:
            self._end_if_hung(now)

    def _start_again(self, now: float) -> None:
        self._restart_at = None
        try:
            self.start()
        except OSError as error:  # there is no process, or no room on the disk, just now
            self._plan_restart(f"could not be started: {error}", now)
            return
        self._is_coming_back = True
        self._say(f"{self.child.spec.name} restarted, pid {self.child.pid}")

    def _end_if_hung(self, now: float) -> None:
        if self._kill_at is not None:
            if now >= self._kill_at:
                self._kill()
            return
        reason = self.liveness.hangs(self._rules.hang_timeout_s)
        limit = f"{self._rules.hang_timeout_s:g} s (--hang-timeout-s)"
        if self.liveness.is_late(self._rules.start_timeout_s):
            reason = "it does not become ready"
            limit = f"{self._rules.start_timeout_s:g} s (--start-timeout-s)"
        if reason is not None:
            self._say(
                f"[red]{self.child.spec.name} hangs[/]: {escape(reason)}, allowed are {limit}; "
                "ending it"
            )
            if self.child.tell_hang():
                self._kill_at = now + _LAST_ANSWERS_S
            else:
                self._kill()

    def _plan_restart(self, what: str, now: float) -> None:
        name, self._kill_at = self.child.spec.name, None
        self.end_group()
        while self._restarts and now - self._restarts[0] > WINDOW_S:
            self._restarts.popleft()
        allowed = self._rules.max_restarts
        if len(self._restarts) >= allowed:
            raise LaunchError(
                f"{name} {what}; it was started again {len(self._restarts)} times in "
                f"{WINDOW_S / 60:g} minutes, allowed are {allowed} (--max-restarts)\n"
                f"{tail(self.child)}"
            )
        # Where requests wait for it `max_restarts` alone bounds how often.
        has_served = self.liveness.was_ready and not self.liveness.waits
        lived_s = now - self._started
        if has_served or (self.liveness.was_ready and lived_s > _LONGEST_BACKOFF_S):
            self._backoff_s = self._rules.first_backoff_s
        self._restarts.append(now)
        self._say(
            f"[red]{name} {escape(what)}[/]; restart {len(self._restarts)} of {allowed} in "
            f"{self._backoff_s:g} s, {self._meanwhile}\n"
            f"[dim]{escape(self.child.log_tail(5))}[/]"
        )
        self._restart_at = now + self._backoff_s
        self._backoff_s = min(_LONGEST_BACKOFF_S, self._backoff_s * 2)

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)


def tail(child: ChildProcess) -> str:
    """Return the end of a child's log, for an error; of a refused argument what to do."""
    text = child.log_tail()
    refused = _REFUSED.search(text)
    if refused is not None and child.exit_status() == _OF_ARGUMENTS:
        # Before it stands the usage of hundreds of arguments.
        return f"SGLang refuses what follows --: {refused[1]}; {_CORRECT}"
    return f"last lines of {child.spec.log_path}:\n{text}"
