# SPDX-License-Identifier: Apache-2.0
"""How long it takes from the announcement of a decode step until the engine begins it."""

from __future__ import annotations

import time
from collections import deque

from tandemkv.cache_rank.protocol.step_ring import StepEntry

_KEPT = 4096


class AnnouncementDelays:
    """Delays of the latest decode steps. Noted by one thread, read by any.

    Both processes read the host's monotonic clock, so their times can be subtracted. On a GPU a
    step begins when its graph has been launched, on a CPU when its own work starts.
    """

    def __init__(self) -> None:
        self._delays_ns: deque[int] = deque(maxlen=_KEPT)

    def note(self, entry: StepEntry) -> None:
        """Note that `entry` begins now."""
        if entry.announced_ns:
            self._delays_ns.append(time.monotonic_ns() - entry.announced_ns)

    def values(self) -> dict[str, float]:
        """Return median and 99th percentile in us by name; nothing before the first step."""
        found = sorted(self._delays_ns.copy())
        if not found:
            return {}
        last = len(found) - 1
        return {
            "announcement_p50_us": found[last // 2] / 1000,
            "announcement_p99_us": found[last * 99 // 100] / 1000,
        }
