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
    step begins when its graph has been launched, on a CPU when its own work starts. When the
    announcement has been read tells where the time goes.
    """

    def __init__(self) -> None:
        self._delays_ns: deque[tuple[int, int]] = deque(maxlen=_KEPT)

    def note(self, entry: StepEntry, *, read_ns: int) -> None:
        """Note that `entry` begins now; it was read at this time of the clock."""
        start = entry.announced_ns
        if start:
            now = time.monotonic_ns()
            self._delays_ns.append((read_ns - start, now - start))

    def values(self) -> dict[str, float]:
        """Return medians and a 99th percentile in us by name; nothing before the first step."""
        found = self._delays_ns.copy()
        if not found:
            return {}
        last = len(found) - 1
        read, begun = (sorted(column) for column in zip(*found, strict=True))
        return {
            "announcement_read_p50_us": read[last // 2] / 1000,
            "announcement_p50_us": begun[last // 2] / 1000,
            "announcement_p99_us": begun[last * 99 // 100] / 1000,
        }
