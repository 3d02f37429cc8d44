# SPDX-License-Identifier: Apache-2.0
"""How long an engine whose process lives is waited for."""

from __future__ import annotations

import time

from tandemkv.cache_rank.protocol.settings.exchange_settings import ExchangeSettings
from tandemkv.cache_rank.protocol.step_flags import StepFlags
from tandemkv.cache_rank.protocol.step_ring import CONSUMED

LONGEST_PREPARING_S = 600.0
"""Ten times what compiling was seen to take; nothing tells of its progress."""
_MARGIN_S = 1.0


class Patience:
    """Ends once an engine moves no more. Begins when it is made.

    The engine has `read_s` to read the announcement with the number `announced`, 0 if that is not
    asked, and may then leave the flag `progress` as it is for `work_s`.
    """

    def __init__(
        self, flags: StepFlags, progress: int, *, announced: int, read_s: float, work_s: float
    ) -> None:
        self._flags, self._progress, self._announced = flags, progress, announced
        self._read_s, self._work_s = read_s, work_s
        self._last, self._since = (False, -1), time.monotonic()

    def is_over(self) -> bool:
        """Whether it has ended; to be asked more often than either limit."""
        has_read = self._flags.value(CONSUMED) - self._announced >= 0
        seen, now = (has_read, self._flags.value(self._progress)), time.monotonic()
        if seen != self._last:
            self._last, self._since = seen, now
        return now - self._since > (self._work_s if has_read else self._read_s)


def limit_s(exchange: ExchangeSettings) -> float:
    """Return how long a step waits for an engine that makes no progress."""
    return exchange.heartbeat_interval_s * exchange.heartbeat_misses + _MARGIN_S
