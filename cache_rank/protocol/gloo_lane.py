# SPDX-License-Identifier: Apache-2.0
"""The transfers of one direction of a gloo pair, finished in the order of their issue.

Part of `gloo_transport`, which says why it is built this way.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Protocol

import torch

from .errors import TransferAbortedError, TransferTimeoutError

_MAX_TAG = (1 << 31) - 1
_JOIN_S = 5.0


class PostedWork(Protocol):
    """What gloo hands out."""

    def wait(self, timeout: timedelta) -> bool:
        """Block until done; raises RuntimeError, and closes the pair if late."""


class GlooWork:
    """A transfer; keeps its tensor alive until gloo has let go of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.gloo: PostedWork | None = None
        self._error: Exception | None = None
        self._settled = threading.Event()

    def settle(self, error: Exception | None = None) -> None:
        """Let everybody who waits go on; the first call counts."""
        if not self._settled.is_set():
            self._error = error
            self._settled.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """See `transport.Work.wait`."""
        if not self._settled.wait(timeout_s):
            return False
        if self._error is not None:
            # A fresh exception each time: one object raised by several threads would
            # collect all their tracebacks.
            raise type(self._error)(*self._error.args) from self._error.__cause__
        return True

    def is_done(self) -> bool:
        """See `transport.Work.is_done`. A failed transfer is done: `wait` raises."""
        return self._settled.is_set()


class Lane:
    """The transfers of one direction: posted by the caller, finished in order by a thread.

    Only the thread waits in gloo. A caller who waits there himself saves a third of the round
    trip on an idle machine, and loses as much on average where cores are scarce.
    """

    def __init__(
        self,
        name: str,
        post: Callable[[list[torch.Tensor], int], PostedWork],
        timeout_s: float,
        on_error: Callable[[Exception], None],
    ) -> None:
        self.num_bytes = 0
        self._post = post
        self._timeout = timedelta(seconds=timeout_s)
        self._on_error = on_error
        self._pending: deque[GlooWork] = deque()
        self._queue: SimpleQueue[GlooWork | None] = SimpleQueue()
        self._guard = threading.Lock()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"gloo-{name}", daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether no transfer is under way."""
        return not self._pending

    def issue(self, tensor: torch.Tensor) -> GlooWork:
        """Start a transfer."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(
                f"tensor {tensor.dtype}{tuple(tensor.shape)} on {tensor.device}: gloo moves "
                "contiguous CPU tensors only"
            )
        work = GlooWork(tensor)
        if tensor.numel() == 0:
            work.settle(self._error)
            return work
        try:
            with self._guard:
                if self._error is not None:
                    work.settle(self._error)
                    return work
                work.gloo = self._post([tensor], tensor.nbytes & _MAX_TAG or 1)
                self._pending.append(work)
                self._queue.put(work)
        except RuntimeError as error:
            self._on_error(broken_pair(error))
            work.settle(self._error)
        return work

    def fail(self, error: Exception) -> None:
        """Fail everything pending and everything to come; the first error counts."""
        with self._guard:
            self._error = self._error or error
            pending = list(self._pending)
        for work in pending:
            work.settle(self._error)

    def close(self) -> None:
        """End the thread, which first finishes what is pending."""
        self._queue.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            self._finish_one(work)
            self._pending.popleft()

    def _finish_one(self, work: GlooWork) -> None:
        assert work.gloo is not None
        start = time.monotonic()
        try:
            work.gloo.wait(self._timeout)
        except RuntimeError as error:
            limit_s = self._timeout.total_seconds()
            if self._error is None and time.monotonic() - start >= 0.99 * limit_s:
                late = TransferTimeoutError(
                    f"a transfer of {work.tensor.nbytes} bytes took longer than "
                    f"transfer_timeout_s={limit_s:g}"
                )
                late.__cause__ = error
                work.settle(late)
            self._on_error(broken_pair(error))
            work.settle(self._error)
        else:
            self.num_bytes += work.tensor.nbytes
            work.settle(self._error)
        work.gloo = None


def broken_pair(error: Exception) -> TransferAbortedError:
    """Return the error of those whose pair gloo has closed."""
    gone = TransferAbortedError(f"the other rank is gone or the pair was broken: {error}")
    gone.__cause__ = error
    return gone
