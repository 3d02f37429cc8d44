# SPDX-License-Identifier: Apache-2.0
"""How many completions may run or wait. Belongs to the event loop of the HTTP process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from .refusal import RequestRefusedError

QUEUE_RETRY_S, CLOSED_RETRY_S = 1, 5


class Admission:
    """A bounded number of places.

    `capacity` completions run or wait, together. `closed` returns why nothing is admitted now, e.g.
    that generation is paused, or None.
    """

    def __init__(self, capacity: int, closed: Callable[[], str | None]) -> None:
        self._capacity = capacity
        self._closed = closed
        self.taken = 0

    def enter(self) -> Place:
        """Take one place.

        Raises `RequestRefusedError`: 503 while closed, 429 while full; both say when to come again.
        """
        reason = self._closed()
        if reason is not None:
            raise RequestRefusedError(
                503, reason, code="not_ready", headers={"retry-after": str(CLOSED_RETRY_S)}
            )
        place = Place(self)
        self.take(1)
        return place

    def take(self, count: int) -> None:
        """Take `count` more places, all or none.

        Raises `RequestRefusedError`: 429 if there are not as many.
        """
        if self.taken + count > self._capacity:
            raise RequestRefusedError(
                429,
                f"{self.taken} completions run or wait, {count} more would be over the "
                f"{self._capacity} that may (--max-running-requests + --max-queued-requests); "
                "try again",
                code="queue_full",
                headers={"retry-after": str(QUEUE_RETRY_S)},
            )
        self.taken += count


class Place:
    """What one request has taken; given back on leaving the context."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._count = 1

    def grow(self, count: int) -> None:
        """Have `count` places in all; raises as `Admission.take` does."""
        self._admission.take(count - self._count)
        self._count = count

    def give_back(self) -> None:
        """Leave it to others, before the context is left."""
        self._admission.taken -= self._count
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()
