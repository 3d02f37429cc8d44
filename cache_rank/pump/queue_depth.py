# SPDX-License-Identifier: Apache-2.0
"""How far ahead of a GPU a thread queues."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch

from .plan import Message

_MOST_QUEUED, _BATCHES, _POLL_S = 512, 8, 100e-6
_PER_MESSAGE, _PER_PART = 5, 4
"""Calls that a lane queues, about: a message's stamp, what NCCL's stream waits for and the lane
behind that; what a part is read and written with."""


def calls_of(message: Message) -> int:
    """Return how many calls a lane queues for a message, about."""
    num_flags = len(message.waits) + len(message.raises)
    return _PER_MESSAGE + num_flags + _PER_PART * len(message.parts)


class QueueDepth:
    """How much of a stream's work is queued and not done.

    A stream takes about a thousand calls. A thread that queues more waits in CUDA, and meanwhile
    no other thread of the process can queue anything, not even what the stream waits for.

    `record` returns an event of what the stream has now, None if that is done, and is asked once in
    an eighth of `most` calls; `is_over` tells whether to wait no longer.
    """

    def __init__(
        self,
        record: Callable[[], torch.cuda.Event | None],
        is_over: Callable[[], bool],
        most: int = _MOST_QUEUED,
    ) -> None:
        self._record, self._is_over, self._most = record, is_over, most
        self._queued: deque[tuple[int, torch.cuda.Event | None]] = deque()
        self._total = self._latest = 0

    def make_room(self, num_calls: int) -> bool:
        """Wait until so many more fit, or no event is ahead of them; False: it is over."""
        while self._queued and self._total + num_calls > self._most:
            event = self._queued[0][1]
            if event is None or event.query():
                self._total -= self._queued.popleft()[0]
            elif self._is_over():
                return False
            else:
                time.sleep(_POLL_S)
        return True

    def note(self, num_calls: int) -> None:
        """Note that so many were queued."""
        self._total += num_calls
        self._latest += num_calls
        if self._latest * _BATCHES >= self._most:
            self._queued.append((self._latest, self._record()))
            self._latest = 0
