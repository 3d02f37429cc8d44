# SPDX-License-Identifier: Apache-2.0
"""When faults may be seen, and what an ending of a request means in that light."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .client import Outcome
from .faults import Fault
from .processes import CACHE_RANK, HTTP, SCHEDULER

NOT_WELL = ("lost", "wrong status", "HTTP 5xx outside of faults")
"""What no ending of a request may count as."""
_BEFORE_S, _AFTER_S = 0.5, 8.0
_POINT_S = {"drop": 60.0, "kill": 180.0, "stop": 240.0}
"""What a fault point did may take as long to be noticed and mended: a handshake has 5 s, a
heartbeat 3 s, a rank that hangs 15 s, and one that is lost is started again."""


_ROLES = {"http": HTTP, "inference_rank": SCHEDULER, "cache_rank": CACHE_RANK}


class Window(NamedTuple):
    """A time in which a fault may be seen: what was done, and to which process."""

    began: float
    ended: float
    action: str
    target: str

    @property
    def ends_http(self) -> bool:
        """Whether connections may be cut: SGLang's HTTP process is killed with the fault."""
        return (self.action in ("kill", "stop") and self.target == HTTP) or (
            self.action == "stop" and self.target == SCHEDULER
        )

    @property
    def ends_connections(self) -> bool:
        """Whether SGLang's HTTP process ends, so that who comes just then gets no answer at all."""
        return self.ends_http or (self.action == "kill" and self.target == SCHEDULER)

    @property
    def is_of_cache_rank(self) -> bool:
        """Whether SGLang stays up, so that nothing need be lost."""
        return self.target == CACHE_RANK or self.action == "drop"


class Windows:
    """All windows of a soak: of signals that were sent, and of what fault points did."""

    def __init__(
        self, faults: Iterable[Fault] = (), points: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        self._windows = [
            Window(each.began - _BEFORE_S, each.ended + _AFTER_S, each.action, each.target)
            for each in faults
        ]
        for line in points:
            began, action, role = line["time"], line["action"], line["role"]
            if action in _POINT_S:
                times = began - _BEFORE_S, began + _POINT_S[action]
                self._windows.append(Window(*times, action, _ROLES.get(role, role)))

    def during(self, began: float, ended: float) -> list[Window]:
        """Return those in which a fault may be seen in some part of the time."""
        return [each for each in self._windows if each.began <= ended and began <= each.ended]

    def touching(self, outcome: Outcome) -> list[Window]:
        """Return those in which a request may see a fault."""
        return self.during(outcome.started, outcome.ended)

    def is_loss_of_cache_rank(self, outcome: Outcome) -> bool:
        """Whether a request was lost although nothing but the cache rank, or a message, was."""
        windows = self.touching(outcome)
        is_lost = self.ending_of(outcome) in ("ended with 503", "refused with 503")
        return is_lost and bool(windows) and all(each.is_of_cache_rank for each in windows)

    def ending_of(self, outcome: Outcome) -> str:
        """Return what the ending of a request counts as.

        ``answered``, ``refused`` (as it had to be) and ``hung up`` are well. ``refused with 503``
        before it began, ``ended with 503``, ``cut`` and ``unreachable`` are well beside a fault
        that explains them; ``busy`` is 429. ``lost``, ``wrong status`` and ``HTTP 5xx outside of
        faults`` never are.
        """
        windows, request = self.touching(outcome), outcome.request
        if outcome.ending == "timeout":
            return "lost"
        if outcome.ending == "unreachable":
            return "unreachable" if windows else "lost"
        if outcome.ending == "hung up":
            return "hung up"
        if outcome.status == 429:
            return "busy"
        if outcome.status == 503 and outcome.ending != "cut":
            if not windows:
                return "HTTP 5xx outside of faults"
            is_clear = outcome.ending == "error event" or outcome.retry_after
            how = "ended" if outcome.ending == "error event" else "refused"
            return f"{how} with 503" if is_clear else "wrong status"
        if outcome.ending == "cut":
            has_begun = outcome.status != 0
            is_explained = any(
                each.ends_http if has_begun else each.ends_connections for each in windows
            )
            return "cut" if is_explained else "lost"
        if request.refusals:
            return "refused" if outcome.status in request.refusals else "wrong status"
        is_answered = outcome.status == 200 and outcome.ending == "complete"
        if is_answered or (request.hang_up_after is not None and outcome.status == 200):
            return "answered"
        return "wrong status"
