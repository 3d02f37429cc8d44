# SPDX-License-Identifier: Apache-2.0
"""When faults may be seen, and what an ending of a request means in that light."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .client import Outcome
from .faults import Fault

_BEFORE_S, _AFTER_S = 0.5, 8.0
_POINT_S = {"drop": 60.0, "kill": 180.0, "stop": 240.0}
"""What a fault point did may take as long to be noticed and mended: a handshake has 5 s, a
heartbeat 3 s, a rank that hangs 15 s, and one that is lost is started again."""


@dataclass(frozen=True, slots=True)
class Window:
    """A time in which a fault may be seen."""

    began: float
    ended: float
    ends_http: bool
    ends_connections: bool
    is_of_cache_rank: bool


def _of_point(line: Mapping[str, Any]) -> Window:
    began, action, role = line["time"], line["action"], line["role"]
    is_process = action in ("kill", "stop")
    ends_http = is_process and (role == "http" or (role == "inference_rank" and action == "stop"))
    return Window(
        began=began - _BEFORE_S,
        ended=began + _POINT_S[action],
        ends_http=ends_http,
        ends_connections=ends_http or (is_process and role == "inference_rank"),
        is_of_cache_rank=not is_process or role == "cache_rank",
    )


class Windows:
    """All windows of a soak."""

    def __init__(self, windows: Sequence[Window]) -> None:
        self._windows = windows

    @classmethod
    def of(cls, faults: Iterable[Fault], points: Iterable[Mapping[str, Any]]) -> Windows:
        """Return the windows of signals that were sent, and of what fault points did."""
        found = [
            Window(
                fault.began - _BEFORE_S,
                fault.ended + _AFTER_S,
                fault.ends_http,
                fault.ends_connections,
                fault.is_of_cache_rank,
            )
            for fault in faults
        ]
        found += [_of_point(line) for line in points if line["action"] in _POINT_S]
        return cls(found)

    def overlaps(self, began: float, ended: float) -> bool:
        """Whether a fault may be seen in some part of the time."""
        return any(each.began <= ended and began <= each.ended for each in self._windows)

    def covers(self, time: float) -> bool:
        """Whether a fault may be seen then."""
        return self.overlaps(time, time)

    def touches(self, outcome: Outcome) -> bool:
        """Whether a fault may be seen by a request."""
        return self.overlaps(outcome.started, outcome.ended)

    def _touching(self, outcome: Outcome) -> list[Window]:
        return [
            each
            for each in self._windows
            if each.began <= outcome.ended and outcome.started <= each.ended
        ]

    def is_loss_of_cache_rank(self, outcome: Outcome) -> bool:
        """Whether a request was lost although nothing but the cache rank, or a message, was."""
        windows = self._touching(outcome)
        is_lost = self.ending_of(outcome) in ("ended with 503", "refused with 503")
        return is_lost and bool(windows) and all(each.is_of_cache_rank for each in windows)

    def ending_of(self, outcome: Outcome) -> str:
        """Return what the ending of a request counts as.

        ``answered``, ``refused`` (as it had to be) and ``hung up`` are well. ``refused with 503``
        before it began, ``ended with 503``, ``cut`` and ``unreachable`` are well beside a fault
        that explains them; ``busy`` is 429. ``lost``, ``wrong status`` and ``HTTP 5xx outside of
        faults`` never are.
        """
        windows, request = self._touching(outcome), outcome.request
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
