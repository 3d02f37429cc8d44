# SPDX-License-Identifier: Apache-2.0
"""A data plane in memory for tests: two ends in one process, with faults on demand."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from .errors import CacheRankError, ProtocolError, TransferAbortedError, TransferTimeoutError


def fake_pair(
    *, delay: Callable[[int], float] | float | None = None, timeout_s: float = 60.0
) -> tuple[FakeTransport, FakeTransport]:
    """Return two connected ends.

    Parameters
    ----------
    delay : Callable or float, optional
        Seconds that each transfer takes, or a function of its number (counted from 0 per
        direction).
    timeout_s : float
        The transport's own timeout, as of a real one.
    """
    pair = _Pair(delay, timeout_s)
    channels = (_Channel(pair), _Channel(pair))
    pair.channels = channels
    return (
        FakeTransport(pair, outgoing=channels[0], incoming=channels[1]),
        FakeTransport(pair, outgoing=channels[1], incoming=channels[0]),
    )


class _Pair:
    """What both ends share. `changed` guards every field of pair, channels and works."""

    def __init__(self, delay: Callable[[int], float] | float | None, timeout_s: float) -> None:
        self.changed = threading.Condition()
        self.timeout_s = timeout_s
        self.error: CacheRankError | None = None
        self.channels: tuple[_Channel, ...] = ()
        self._delay = delay

    def delay_of(self, number: int) -> float:
        return self._delay(number) if callable(self._delay) else self._delay or 0.0

    def fail(self, error: CacheRankError) -> None:
        """Fail everything under way and to come."""
        with self.changed:
            self.error = self.error or error
            for channel in self.channels:
                for work in channel.take_all():
                    work.error = self.error
            self.changed.notify_all()


class _Channel:
    """One direction: sends and receives meet in order."""

    def __init__(self, pair: _Pair) -> None:
        self.sends: deque[FakeWork] = deque()
        self.recvs: deque[FakeWork] = deque()
        self.moving: deque[tuple[float, FakeWork, FakeWork]] = deque()
        self.credit: int | None = None
        """Transfers that may start before the channel holds; None if it does not hold."""
        self._pair = pair
        self._number = 0

    def take_all(self) -> list[FakeWork]:
        works = [*self.sends, *self.recvs, *(w for _, *both in self.moving for w in both)]
        self.sends.clear()
        self.recvs.clear()
        self.moving.clear()
        return works

    def advance(self) -> float | None:
        """Move what is due. Returns when the next transfer is due, None if there is none."""
        while self.sends and self.recvs and self.credit != 0:
            send, recv = self.sends.popleft(), self.recvs.popleft()
            if self.credit is not None:
                self.credit -= 1
            due = time.monotonic() + self._pair.delay_of(self._number)
            self._number += 1
            self.moving.append((due, send, recv))
            if send.kind != recv.kind:
                self._pair.fail(ProtocolError(f"sent {send.kind}, received into {recv.kind}"))
        while self.moving and self.moving[0][0] <= time.monotonic():
            _, send, recv = self.moving.popleft()
            with torch.inference_mode():  # either side may hold inference tensors
                recv.tensor.view(-1).copy_(send.tensor.view(-1))
            if recv.tensor.is_cuda:  # in place when the work is done, for every stream
                torch.cuda.current_stream(recv.tensor.device).synchronize()
            recv.owner.count_received(recv.tensor.nbytes)
            send.is_complete = recv.is_complete = True
            self._pair.changed.notify_all()
        return self.moving[0][0] if self.moving else None


class FakeWork:
    """See `transport.Work`."""

    def __init__(self, owner: FakeTransport, channel: _Channel, tensor: torch.Tensor) -> None:
        self.owner = owner
        self.tensor = tensor
        self.is_complete = tensor.numel() == 0
        self.error: CacheRankError | None = None
        self._channel = channel

    @property
    def kind(self) -> tuple[torch.dtype, int]:
        """What both ends must agree on."""
        return self.tensor.dtype, self.tensor.numel()

    def wait(self, timeout_s: float | None = None) -> bool:
        """See `transport.Work.wait`; `ProtocolError` if the ends disagree on the size."""
        pair = self.owner.pair
        limit_s = pair.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        with pair.changed:
            while not self._poll():
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    break
                due = self._channel.moving[0][0] if self._channel.moving else None
                until_due_s = left_s if due is None else max(1e-4, due - time.monotonic())
                pair.changed.wait(min(left_s, until_due_s))
            if self.error is not None:
                raise type(self.error)(*self.error.args)
            if not self.is_complete and timeout_s is None:
                pair.fail(TransferAbortedError("an earlier transfer timed out"))
                raise TransferTimeoutError(f"no match within {limit_s:g} s")
            return self.is_complete

    def is_done(self) -> bool:
        """See `transport.Work.is_done`."""
        with self.owner.pair.changed:
            return self._poll()

    def _poll(self) -> bool:
        self._channel.advance()
        return self.is_complete or self.error is not None


class FakeTransport:
    """One end; see `transport.Transport`. Made by `fake_pair`."""

    def __init__(self, pair: _Pair, *, outgoing: _Channel, incoming: _Channel) -> None:
        self.pair = pair
        self._outgoing = outgoing
        self._incoming = incoming
        self._sent = 0
        self._received = 0

    def issue_send(self, tensor: torch.Tensor) -> FakeWork:
        """See `transport.Transport.issue_send`."""
        self._sent += tensor.nbytes
        return self._issue(self._outgoing, self._outgoing.sends, tensor)

    def issue_recv(self, out: torch.Tensor) -> FakeWork:
        """See `transport.Transport.issue_recv`."""
        return self._issue(self._incoming, self._incoming.recvs, out)

    def hold(self) -> None:
        """Keep back what this end sends from now on."""
        with self.pair.changed:
            self._outgoing.credit = 0

    def release(self, count: int | None = None) -> None:
        """Let `count` transfers of this end go, or all and no longer hold."""
        with self.pair.changed:
            held = self._outgoing.credit or 0
            self._outgoing.credit = None if count is None else held + count
            self._outgoing.advance()
            self.pair.changed.notify_all()

    def kill(self) -> None:
        """Fail both ends, as if this end's process had died."""
        self.pair.fail(TransferAbortedError("the other rank is gone"))

    def abort(self) -> None:
        """Fail both ends: the pair is unusable, as with a real transport."""
        self.pair.fail(TransferAbortedError("the transport was aborted"))

    def close(self) -> None:
        """Abort what is under way. Idempotent."""
        self.pair.fail(TransferAbortedError("the transport is closed"))

    @property
    def bytes_sent(self) -> int:
        """Bytes issued for sending since the start."""
        return self._sent

    @property
    def bytes_received(self) -> int:
        """Bytes received since the start."""
        return self._received

    def count_received(self, num_bytes: int) -> None:
        """Add to `bytes_received` (called by the channel)."""
        self._received += num_bytes

    def _issue(self, channel: _Channel, queue: deque[FakeWork], tensor: torch.Tensor) -> FakeWork:
        if not tensor.is_contiguous():
            raise ValueError(f"tensor {tuple(tensor.shape)} must be contiguous")
        work = FakeWork(self, channel, tensor)
        with self.pair.changed:
            if self.pair.error is not None:
                work.error = self.pair.error
            elif not work.is_complete:
                queue.append(work)
                channel.advance()
            self.pair.changed.notify_all()
        return work
