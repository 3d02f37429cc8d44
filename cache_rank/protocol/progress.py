# SPDX-License-Identifier: Apache-2.0
"""How long a rank that has work has made no progress: what its status says, as ``stalled_s``.

The thread that works calls `ProgressClock.advance` whenever something moved (a message, a layer,
a turn of a loop) and `idle` when there is nothing to do; any thread may read. A rank that is busy
for long and moves is not stalled; one that waits for work is not either.
"""

from __future__ import annotations

import time


class ProgressClock:
    """Remembers when the work under way last moved."""

    __slots__ = ("_moved",)

    def __init__(self) -> None:
        self._moved: float | None = None

    def advance(self) -> None:
        """Note that there is work, and that it moved."""
        self._moved = time.monotonic()

    def idle(self) -> None:
        """Note that there is no work."""
        self._moved = None

    def stalled_s(self) -> float:
        """Seconds since the work under way moved; 0 without work. Safe from any thread."""
        moved = self._moved
        return 0.0 if moved is None else max(0.0, time.monotonic() - moved)
