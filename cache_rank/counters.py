# SPDX-License-Identifier: Apache-2.0
"""Counters of the cache rank, and the clock that says how long it has been busy.

Written by the service thread, read by the heartbeat thread; every value is one attribute, so
a reader sees an old or a new one, never half of one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from .protocol.progress import ProgressClock


@dataclass(slots=True)
class Counters:
    """Totals since the process started, and gauges of the moment."""

    protocol_errors_total: int = 0
    refused_total: int = 0
    epochs_total: int = 0

    def values(self) -> dict[str, float]:
        """Return every value by its name, as floats."""
        return {name: float(value) for name, value in asdict(self).items()}


class BusyClock:
    """Measures how long the current message has been worked on, waits for the peer excluded.

    Attributes
    ----------
    progress : ProgressClock
        Moves with each message and with each transfer of one, that is several times a layer. A
        wait for the peer has a bound of its own (``exchange.transfer_timeout_s``).
    """

    def __init__(self) -> None:
        self.progress = ProgressClock()
        self._started: float | None = None
        self._waited = 0.0
        self._wait_started: float | None = None

    @contextmanager
    def working(self) -> Iterator[None]:
        """Mark the time in which one message is handled."""
        self._waited, self._wait_started = 0.0, None
        self._started = time.monotonic()
        self.progress.advance()
        try:
            yield
        finally:
            self._started = None
            self.progress.idle()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark a wait for the peer inside `working`."""
        self._wait_started = time.monotonic()
        self.progress.idle()
        try:
            yield
        finally:
            self._waited += time.monotonic() - self._wait_started
            self._wait_started = None
            if self._started is not None:
                self.progress.advance()

    def busy_s(self) -> float:
        """Seconds of own work on the current message; 0 when idle. Safe from any thread."""
        started, wait_started, now = self._started, self._wait_started, time.monotonic()
        if started is None:
            return 0.0
        waited = self._waited + (now - wait_started if wait_started is not None else 0.0)
        return max(0.0, now - started - waited)
