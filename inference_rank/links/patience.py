# SPDX-License-Identifier: Apache-2.0
"""How long an engine whose process lives is waited for."""

from __future__ import annotations

from tandemkv.cache_rank.protocol import heartbeat
from tandemkv.cache_rank.protocol.settings.exchange_settings import ExchangeSettings
from tandemkv.cache_rank.protocol.step_flags import StepFlags
from tandemkv.cache_rank.protocol.step_ring import CONSUMED

LONGEST_PREPARING_S = 600.0
"""Ten times what compiling was seen to take; nothing tells of its progress."""
_MARGIN_S = 1.0


class Patience:
    """Ends once an engine moves no more. Begins when it is made.

    The engine has `read_s` to read the announcement with the number `announced`, 0 if that is not
    asked, and may then leave the flag `progress` as it is for `work_s`. As of
    `heartbeat.Patience`, a pause of our own is not the engine's: it may have been stopped as well.
    """

    def __init__(
        self, flags: StepFlags, progress: int, *, announced: int, read_s: float, work_s: float
    ) -> None:
        self._flags, self._progress, self._announced = flags, progress, announced
        self._limits = heartbeat.Patience(read_s), heartbeat.Patience(work_s)
        self._last = (False, -1)

    def is_over(self) -> bool:
        """Whether it has ended; to be asked twice as often at least as either limit passes."""
        has_read = self._flags.value(CONSUMED) - self._announced >= 0
        seen = (has_read, self._flags.value(self._progress))
        if seen != self._last:
            self._last = seen
            for limit in self._limits:
                limit.hear()
        # Each has to be asked regularly.
        before, after = [limit.is_over() for limit in self._limits]
        return after if has_read else before


def limit_s(exchange: ExchangeSettings) -> float:
    """Return how long a step waits for an engine that makes no progress."""
    return exchange.heartbeat_interval_s * exchange.heartbeat_misses + _MARGIN_S
