# SPDX-License-Identifier: Apache-2.0
"""Gives freed memory back to the system while the scheduler has no request.

Requests of mixed lengths break glibc's heap into pieces. glibc keeps a freed piece that lies
between pieces in use, so the process holds more memory than it uses. ``M_MMAP_THRESHOLD`` at
256 KiB gave back less of it in a run of SmolLM2 on a CPU, and took many more page faults.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

INTERVAL_S = 10.0
"""Least time between two calls: a request that comes during one waits some milliseconds."""


def find_trim() -> Callable[[int], object] | None:
    """Return ``malloc_trim`` of the C library, or None if it has none: glibc has it, musl not."""
    found = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if found is not None:
        found.argtypes = (ctypes.c_size_t,)
    trim: Callable[[int], object] | None = found
    return trim


class HeapTrimmer:
    """Calls ``malloc_trim`` when a scheduler is idle, at most once in `interval_s`.

    `trim` is ``malloc_trim``; its argument, in bytes, is what may stay free at the end of the heap.
    With None nothing is given back. `clock` returns seconds, monotonic.
    """

    def __init__(
        self,
        trim: Callable[[int], object] | None,
        *,
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trim, self._interval_s, self._clock = trim, interval_s, clock
        self._next = clock() + interval_s

    def on_idle(self, scheduler: Any) -> None:
        """Trim if it is time, and `scheduler` has no request that runs or waits."""
        now = self._clock()
        if self._trim is None or now < self._next or not scheduler.is_fully_idle():
            return
        self._next = now + self._interval_s
        self._trim(0)


heap = HeapTrimmer(find_trim())
"""Of this process."""
