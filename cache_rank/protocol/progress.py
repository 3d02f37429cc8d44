# SPDX-License-Identifier: Apache-2.0
"""How long a rank has made no progress, and how long it has been busy with one message.

The status of a rank that has work says the first as ``stalled_s``. The thread that works calls
`ProgressClock.advance` whenever something moved (a message, a layer, a turn of a loop) and `idle`
when there is nothing to do; any thread may read. A rank that is busy for long and moves is not
stalled; one that waits for work is not either.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


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

    def begin(self) -> None:
        """Note that a message is being handled, until `end`."""
        self._waited, self._wait_started = 0.0, None
        self._started = time.monotonic()
        self.progress.advance()

    def end(self) -> None:
        """Note that no message is being handled."""
        self._started = None
        self.progress.idle()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark a wait for the peer between `begin` and `end`."""
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
