# SPDX-License-Identifier: Apache-2.0
"""The transfers of one direction of an NCCL pair, posted in the order of their issue.

Part of `nccl_transport`, which says why it is built this way.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from .errors import TransferAbortedError, TransferTimeoutError

_SPIN_S = 0.0005
_NAP_S = 0.00005


class PostedOperation(Protocol):
    """What torch hands out for an operation on the GPU."""

    def wait(self) -> bool:
        """Let the current stream wait for it; the host does not."""


class Mark(Protocol):
    """A point in a stream, as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the GPU has got there, without waiting."""


Post = Callable[[torch.Tensor], PostedOperation]


class NcclWork:
    """A transfer; keeps its tensor alive until the GPU has let go of it."""

    def __init__(self, lane: NcclLane, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.ready: torch.cuda.Event | None = None
        self.done: Mark | None = None
        """Behind the operation, once that is posted."""
        self.is_settled = False
        self._lane = lane

    def wait(self, timeout_s: float | None = None) -> bool:
        """See `transport.Work.wait`. The host polls: nothing on the GPU waits behind it."""
        return self._lane.wait(self, timeout_s)

    def is_done(self) -> bool:
        """See `transport.Work.is_done`. A failed transfer is done: `wait` raises."""
        return self._lane.is_done(self)


class NcclLane:
    """The transfers of one direction.

    Parameters
    ----------
    post : Callable
        Enqueues the operation for a tensor on the current stream.
    device : torch.device
        Of the tensors.
    timeout_s : float
        Longest wait for one transfer.
    on_error : Callable
        Called with the error that ends the pair.
    posts_at_once : bool
        True for sends. A receive is posted when somebody waits for it (or polls it), the
        earlier ones first: a kernel that spins for data which the peer can only send once we
        have gone on would block whatever else needs the whole GPU (loading a kernel, freeing
        memory), and holds multiprocessors meanwhile.
    """

    def __init__(
        self,
        post: Post,
        device: torch.device,
        timeout_s: float,
        on_error: Callable[[Exception], None],
        *,
        posts_at_once: bool,
    ) -> None:
        self.num_bytes = 0
        """Bytes of finished transfers."""
        self._post = post
        self._device = device
        self._timeout_s = timeout_s
        self._on_error = on_error
        self._posts_at_once = posts_at_once
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._unposted: deque[NcclWork] = deque()
        self._under_way: deque[NcclWork] = deque()
        self._guard = threading.Lock()
        self._error: Exception | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no transfer is under way."""
        with self._guard:
            self._reap()
            return not self._under_way and not self._unposted

    def issue(self, tensor: torch.Tensor) -> NcclWork:
        """Start a transfer behind what the current stream has queued so far.

        Raises
        ------
        ValueError
            If the tensor is on another device, or not contiguous.
        """
        if tensor.device.type != self._device.type or not tensor.is_contiguous():
            raise ValueError(
                f"tensor {tensor.dtype}{tuple(tensor.shape)} on {tensor.device}: this transport "
                f"moves contiguous tensors on {self._device} only"
            )
        work = NcclWork(self, tensor)
        if tensor.numel() == 0:
            work.is_settled = True
            return work
        with self._guard:
            if self._error is not None:
                return work
            if self._stream is not None:
                work.ready = torch.cuda.current_stream(self._device).record_event()
            self._unposted.append(work)
            self._reap()
        if self._posts_at_once:
            self._post_up_to(work)
        return work

    def wait(self, work: NcclWork, timeout_s: float | None) -> bool:
        """See `transport.Work.wait`."""
        start = time.monotonic()
        limit = self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
        while not self._is_complete(work):
            waited = time.monotonic() - start
            if waited >= self._timeout_s:
                late = TransferTimeoutError(
                    f"a transfer of {work.tensor.nbytes} bytes took longer than "
                    f"transfer_timeout_s={self._timeout_s:g}"
                )
                self._on_error(TransferAbortedError(f"the pair was broken: {late}"))
                raise late
            if waited >= limit:
                return False
            time.sleep(0 if waited < _SPIN_S else _NAP_S)
        return True

    def is_done(self, work: NcclWork) -> bool:
        """See `transport.Work.is_done`."""
        try:
            return self._is_complete(work)
        except TransferAbortedError:
            return True

    def fail(self, error: Exception) -> None:
        """Fail everything pending and everything to come; the first error counts."""
        self._error = self._error or error

    def _is_complete(self, work: NcclWork) -> bool:
        # An aborted kernel ends like a finished one, so the error is looked at before and after.
        self._raise_if_failed(work)
        if work.is_settled:
            return True
        if work.done is None:
            self._post_up_to(work)
        done = work.done
        try:
            is_complete = done is not None and done.query()
        except RuntimeError as error:
            self._break(error)
            is_complete = False
        self._raise_if_failed(work)
        if is_complete:
            with self._guard:
                self._reap()
        return is_complete

    def _raise_if_failed(self, work: NcclWork) -> None:
        error = self._error
        if error is not None and not work.is_settled:
            raise type(error)(*error.args) from error.__cause__

    def _post_up_to(self, work: NcclWork) -> None:
        with self._guard:
            while work.done is None and self._unposted and self._error is None:
                following = self._unposted.popleft()
                try:
                    following.done = self._post_one(following)
                except RuntimeError as error:
                    self._error = broken_pair(error)
                    break
                self._under_way.append(following)
        if self._error is not None:
            self._on_error(self._error)

    def _post_one(self, work: NcclWork) -> Mark:
        assert self._stream is not None
        assert work.ready is not None
        # Behind the point of issue only, not behind what that stream was given since. An event of
        # our own is polled: asking torch's takes a lock that an abort under way holds.
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(work.ready)
            self._post(work.tensor).wait()
            mark: Mark = self._stream.record_event()
            return mark

    def _break(self, error: RuntimeError) -> None:
        self._on_error(broken_pair(error))

    def _reap(self) -> None:
        while self._under_way and self._error is None:
            work = self._under_way[0]
            try:
                if work.done is None or not work.done.query():
                    return
            except RuntimeError:  # aborted meanwhile; whoever waits is told
                return
            work.is_settled = True
            self.num_bytes += work.tensor.nbytes
            self._under_way.popleft()


def broken_pair(error: Exception) -> TransferAbortedError:
    """Return the error of those whose communicator failed."""
    gone = TransferAbortedError(f"the other rank is gone or the pair was broken: {error}")
    gone.__cause__ = error
    return gone
