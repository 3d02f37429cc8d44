# SPDX-License-Identifier: Apache-2.0
"""One direction of an epoch between two GPUs: a stream in which a step is queued ahead of time.

The host queues, as far ahead as `QueueDepth` lets it: flags are waited for and raised by kernels,
as captured graphs do it (`tandemkv.kernels.step_flags`), and messages travel by NCCL. A wait has an
end. When it is reached nothing is raised any more, here and at the other end, whose messages then
lack the number of their step; but they go on, so that no transfer is left waiting for its other
half.

CUDA may load a kernel, and give memory, only when all that runs has ended. Where a lane waits, that
may be for what the other lane cannot send before. So kernels are loaded before there are lanes
(`rehearse_flags`, `Contents.rehearse`; those of torch by ``CUDA_MODULE_LOADING=EAGER``), and each
lane has memory from the start.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from tandemkv.cache_rank.protocol.errors import ProtocolError
from tandemkv.cache_rank.protocol.gpu_flags import GpuFlags
from tandemkv.cache_rank.protocol.step_ring import EntryKind, StepEntry
from tandemkv.kernels.step_flags import raise_flags, wait_flags
from tandemkv.kernels.streams import LANE_PRIORITY, shared_stream

from .contents import Body, Contents
from .plan import Flag, FlagKind, Message
from .records import PIECE_BYTES, Record
from .side import Side

_AT_ONCE_S = 1e-6
_MOST_PARTS, _POLL_S = 64, 20e-6
_MOST_WORDS = 256
"""Of a flag, for which kernels are loaded at start."""
_ROOM_BYTES, _SMALL_BYTES, _NUM_SMALL = 2 * PIECE_BYTES, 512 << 10, 32
"""What a lane's stream has of the GPU's memory from the start: for a message, and for what is made
on the way."""


def rehearse_flags(device: torch.device, timeout_s: float) -> None:
    """Have the kernels of flags compiled and loaded, for waits of `timeout_s`; none on a CPU."""
    if device.type != "cuda":
        return
    with torch.cuda.device(device):
        words = torch.zeros(_MOST_WORDS, dtype=torch.int32, device=device)
        step, lost = torch.zeros_like(words[:1]), torch.zeros_like(words[:1])
        wait_flags(words[:1], step=step, lost=lost, timeout_s=_AT_ONCE_S)
        size = 1
        while size <= _MOST_WORDS:  # a kernel for each power of two
            wait_flags(words[:size], step=step, lost=lost, timeout_s=timeout_s)
            raise_flags(words[:size], step=step, lost=lost)
            size *= 2
        torch.cuda.current_stream(device).synchronize()


def _room(device: torch.device) -> torch.Tensor:
    """Return bytes for messages, and leave the present stream memory to make other tensors in."""
    if device.type != "cuda":
        return torch.empty(0, dtype=torch.uint8, device=device)
    sizes = (_ROOM_BYTES, _ROOM_BYTES, *(_SMALL_BYTES,) * _NUM_SMALL)
    kept = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]  # and freed
    del kept
    return torch.empty(_ROOM_BYTES, dtype=torch.uint8, device=device)


class _Done:
    """The event of a CPU, which has no queue."""

    def query(self) -> bool:
        return True


class Wire(Protocol):
    """Carries messages in one direction, in order, as work of the current stream."""

    def send(self, body: torch.Tensor) -> None:
        """Send ``body [n]`` uint8."""

    def receive(self, out: torch.Tensor) -> None:
        """Receive ``out [n]`` uint8, of exactly the bytes that are sent."""


class Event(Protocol):
    """What `torch.cuda.Event` has."""

    def query(self) -> bool:
        """Whether all that was queued before it is done."""


class QueueDepth:
    """How much of a stream's work is queued and not done.

    A stream takes about a thousand kernels. A thread that queues more waits in CUDA, and meanwhile
    no other thread of the process can queue anything, not even what the stream waits for.

    Parameters
    ----------
    record : Callable
        Return an event of what the stream has now.
    is_over : Callable
        Whether to wait no longer.
    most : int
        Parts of messages.
    """

    def __init__(
        self, record: Callable[[], Event], is_over: Callable[[], bool], most: int = _MOST_PARTS
    ) -> None:
        self._record, self._is_over, self._most = record, is_over, most
        self._queued: deque[tuple[int, Event]] = deque()
        self._total = 0

    def make_room(self, num_parts: int) -> bool:
        """Wait until so many more fit, or nothing else is queued; False: it is over."""
        while self._queued and self._total + num_parts > self._most:
            if self._queued[0][1].query():
                self._total -= self._queued.popleft()[0]
            elif self._is_over():
                return False
            else:
                time.sleep(_POLL_S)
        return True

    def note(self, num_parts: int) -> None:
        """Note that so many were queued."""
        self._queued.append((num_parts, self._record()))
        self._total += num_parts


class StreamLane:
    """A stream with the number of its step, and the word that tells whether it is lost.

    A rank of this host is waited for at most `timeout_s`. `number` is the stream's; a process has
    one of each.
    """

    def __init__(
        self, side: Side, contents: Contents, wire: Wire, *, timeout_s: float, number: int
    ) -> None:
        device = side.kv.device
        self._contents, self._wire, self._timeout_s = contents, wire, timeout_s
        self._flags = GpuFlags(side.tensors, side.program.num_layers)
        self._stream = shared_stream(device, LANE_PRIORITY, number)
        self._beside = shared_stream(device, LANE_PRIORITY, number + 1)
        with self._on(self._stream):
            # One message is in it at a time: what comes next is behind that in the stream.
            self._room = _room(device)
        self._bodies: dict[int, tuple[Message, Body]] = {}
        self._words: dict[Flag, torch.Tensor] = {}
        self._step = torch.zeros(1, dtype=torch.int32, device=device)
        self._lost = torch.zeros(1, dtype=torch.int32, device=device)
        self._depth = QueueDepth(self._record, side.is_over)
        contents.rehearse()
        side.settle()  # these, and what `contents` has made: the stream waits for no other

    def abort(self) -> None:
        """End the waits that are under way, and all later ones. Safe from any thread."""
        with self._on(self._beside):
            self._lost.fill_(1)

    @contextmanager
    def _on(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        if stream is None:  # on a CPU, in tests
            yield
            return
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            yield

    def _record(self) -> Event:
        if self._stream is None:
            return _Done()
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    @contextmanager
    def _queued(self, message: Message) -> Iterator[bool]:
        """Queue what the body does behind as little as `QueueDepth` allows; False: it is over."""
        num_parts = 1 + len(message.parts)
        has_room = self._depth.make_room(num_parts)
        yield has_room
        if has_room:
            self._depth.note(num_parts)

    def _begin(self, entry: StepEntry) -> None:
        self._step.fill_(entry.step)
        self._contents.begin(entry)
        self._keeps = entry.kind is EntryKind.DECODE

    def _body(self, message: Message) -> Body:
        """Return where a message goes; of a decode step's that recurs always the same."""
        known = self._bodies.get(id(message))
        if known is not None:  # it is kept, so its number is no other's
            return known[1]
        body = self._contents.make(message, room=self._room)
        if len(body.whole) > len(self._room):
            self._room = body.whole
            self._bodies.clear()
        if self._keeps and message.recurs:
            self._bodies[id(message)] = message, body
        return body

    def _wait(self, flags: torch.Tensor, timeout_s: float) -> None:
        wait_flags(flags, step=self._step, lost=self._lost, timeout_s=timeout_s)

    def _raise(self, flags: torch.Tensor) -> None:
        raise_flags(flags, step=self._step, lost=self._lost)

    def _words_of(self, flag: Flag) -> torch.Tensor:
        """Return the words ``[n]`` int32 of a flag."""
        if flag not in self._words:
            self._words[flag] = self._find_words(flag)
        return self._words[flag]

    def _find_words(self, flag: Flag) -> torch.Tensor:
        flags, kind = self._flags, flag.kind
        if kind is FlagKind.INPUT:
            return flags.input(flag.layer, flag.size)
        if kind is FlagKind.QUERY:
            return flags.query(flag.layer, flag.size)
        if kind is FlagKind.READY:
            return flags.ready(flag.layer, flag.size)
        if kind is FlagKind.FINISHED:
            return flags.finished
        return flags.begin if kind is FlagKind.BEGIN else flags.end


class StreamSendLane(StreamLane):
    """See `SendLane`; nobody on the host learns what is lost."""

    is_lost = False

    def begin(self, entry: StepEntry) -> None:
        """See `SendLane.begin`."""
        with self._on(self._stream):
            self._begin(entry)

    def send(self, message: Message) -> None:
        """See `SendLane.send`: it is queued."""
        with self._on(self._stream), self._queued(message) as has_room:
            if not has_room:
                return
            for flag in message.waits:
                self._wait(self._words_of(flag), self._timeout_s)
            body = self._body(message)
            self._contents.fill(body)
            body.stamp.zero_()
            self._raise(body.stamp)
            self._wire.send(body.whole)


class StreamReceiveLane(StreamLane):
    """See `ReceiveLane`."""

    is_queued = is_done = True

    def begin(self, entry: StepEntry, messages: tuple[Message, ...]) -> None:
        """See `ReceiveLane.begin`: all of `messages` are queued, unless the epoch ends before."""
        with self._on(self._stream):
            self._begin(entry)
            for message in messages:
                with self._queued(message) as has_room:
                    if not has_room:
                        return
                    self._receive(message)

    def _receive(self, message: Message) -> None:
        body = self._body(message)
        self._wire.receive(body.whole)
        self._wait(body.stamp, _AT_ONCE_S)
        self._contents.scatter(body)
        for flag in message.raises:
            self._raise(self._words_of(flag))

    def take(self, record: Record) -> None:
        """See `ReceiveLane.take`: nothing of a step is a record."""
        raise ProtocolError(f"step {record.a} came as a record, between GPUs")
