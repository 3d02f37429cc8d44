# SPDX-License-Identifier: Apache-2.0
"""One direction of an epoch between two GPUs: a stream in which a step is queued ahead of time.

The host queues, as far ahead as `QueueDepth` lets it: flags are waited for and raised by kernels,
as captured graphs do it (`tandemkv.kernels.step_flags`), and messages travel by NCCL. What recurs
in decode steps was captured before (`captured_steps`), and takes one call. A wait has an end. When
it is reached nothing is raised any more, here and at the other end, whose messages then lack the
number of their step; but they go on, so that no transfer is left waiting for its other half.

CUDA may load a kernel, and give memory, only when all that runs has ended. Where a lane waits, that
may be for what the other lane cannot send before. So kernels are loaded before there are lanes
(`rehearse_flags`, `Contents.rehearse`; those of torch by ``CUDA_MODULE_LOADING=EAGER``), and each
lane has memory from the start.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from tandemkv.cache_rank.protocol.errors import ProtocolError
from tandemkv.cache_rank.protocol.gpu_flags import GpuFlags, SeldomRaised, word_of
from tandemkv.cache_rank.protocol.message.nccl_wire import NcclWire
from tandemkv.cache_rank.protocol.step_ring import EntryKind, StepEntry
from tandemkv.kernels.step_flags import raise_flags, wait_flags
from tandemkv.kernels.streams import LANE_PRIORITY, shared_stream

from .captured_steps import CapturedSteps
from .contents import Body, Contents
from .plan import Flag, FlagKind, Message
from .queue_depth import QueueDepth, calls_of
from .records import Record
from .side import Side

_MOST_WORDS = 256
"""Of a flag, for which kernels are loaded at start."""
_NUM_PIECES, _SMALL_BYTES, _NUM_SMALL = 2, 512 << 10, 32
"""What a lane's stream has of the GPU's memory from the start for what is made on the way, at
least; beside it the room of a message."""
REPLAY_CALLS = 200
"""What a graph counts as. How much of a stream's room one takes that has thousands of nodes nobody
says: two are queued at most, the one that runs and the next."""
_KEPT_STEPS = 16
"""Latest steps of which it is known what was queued."""


def rehearse_flags(device: torch.device, timeout_s: float) -> None:
    """Have the kernels of flags compiled and loaded, for waits of `timeout_s`; none on a CPU."""
    if device.type != "cuda":
        return
    with torch.cuda.device(device):
        words = torch.zeros(_MOST_WORDS, dtype=torch.int32, device=device)
        step, lost, stamp = (torch.zeros_like(words[:1]) for _ in range(3))
        size = 1
        while size <= _MOST_WORDS:  # a kernel for each power of two
            for each in (None, stamp):
                wait_flags(words[:size], step=step, lost=lost, timeout_s=timeout_s, stamp=each)
                raise_flags(words[:size], step=step, lost=lost, stamp=each)
            size *= 2
        torch.cuda.current_stream(device).synchronize()


def _room(device: torch.device, contents: Contents) -> torch.Tensor:
    """Return bytes for messages, and leave the present stream memory to make other tensors in."""
    if device.type != "cuda":
        return torch.empty(0, dtype=torch.uint8, device=device)
    beside = max(_NUM_PIECES * contents.piece_bytes, contents.beside_bytes)
    sizes = (beside, *(_SMALL_BYTES,) * _NUM_SMALL)
    kept = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]  # and freed
    room = torch.empty(contents.most_bytes, dtype=torch.uint8, device=device)
    del kept
    return room


class StreamLane(ABC):
    """A stream with the number of its step, and the word that tells whether it is lost.

    A rank of this host is waited for at most `timeout_s`. `number` is the stream's; a process has
    one of each. `is_back`: messages go to the inference rank's host.
    """

    def __init__(
        self,
        side: Side,
        contents: Contents,
        wire: NcclWire,
        *,
        timeout_s: float,
        number: int,
        is_back: bool,
    ) -> None:
        device = side.kv.device
        self._contents, self._wire, self._timeout_s = contents, wire, timeout_s
        self._flags = GpuFlags(side.tensors, side.program.num_layers, side.shard.index)
        self._stream = shared_stream(device, LANE_PRIORITY, number)
        self._beside = shared_stream(device, LANE_PRIORITY, number + 1)
        with self._on(self._stream):
            # One message is in it at a time: what comes next is behind that in the stream.
            self._room = _room(device, contents)
        self._bodies: dict[int, tuple[Message, Body]] = {}
        self._captured, self._is_back = CapturedSteps(self._stream), is_back
        self._words: dict[Flag, torch.Tensor] = {}
        self._step = torch.zeros(1, dtype=torch.int32, device=device)
        self._lost = torch.zeros(1, dtype=torch.int32, device=device)
        self._seldom = SeldomRaised(self._own_words())
        self._told = torch.zeros(1, dtype=torch.int32, pin_memory=self._stream is not None)
        self._depth = QueueDepth(self._record, side.is_over)
        self._queued: deque[tuple[int, list[Message]]] = deque(maxlen=_KEPT_STEPS)
        self._is_aborted = False
        contents.rehearse()
        side.settle()  # these, and what `contents` has made: the stream waits for no other

    def abort(self) -> None:
        """End the waits that are under way, and all later ones. Safe from any thread."""
        self._is_aborted = True
        with self._on(self._beside):
            self._lost.fill_(1)

    def lost_step(self) -> int:
        """Return the step whose wait has reached its end, 0: none. For one thread, not the lane's.

        It is asked for beside the lane, and waits for nothing that the lane has queued.
        """
        with self._on(self._beside):
            self._told.copy_(self._lost)
        word = 0 if self._is_aborted else int(self._told[0])
        # The word of a loss is never 0, which is none: see `step_flags`.
        steps = {word_of(step) or -1: step for step, _ in self._queued.copy()}
        return steps.get(word, word)

    def standing(self) -> str:
        """Return what of the latest step has not come to pass, if anything; as `lost_step`."""
        if not self._queued:
            return ""
        step, messages = self._queued[-1]
        flags = self._flags_of(messages)
        label = self._missing(step, flags)
        return label and f"step {step}: {label} is not raised, of {len(flags)} flags in the queue"

    def _missing(self, step: int, flags: list[Flag]) -> str:
        """Return the label of the first of `flags` that is not raised to `step`, if any."""
        with self._on(self._beside):
            for flag in flags:
                if any(word_of(word - step) < 0 for word in self._find_words(flag).tolist()):
                    return flag.label
            return ""

    @contextmanager
    def _on(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        if stream is None:  # on a CPU, in tests
            yield
            return
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            yield

    def _record(self) -> torch.cuda.Event | None:
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def close(self) -> None:
        """Let go of what was captured; nothing is queued any more."""
        self._captured.close()

    def _queue(self, entry: StepEntry, messages: tuple[Message, ...]) -> None:
        """Queue the messages of a step, or capture those of a step that is to be prepared."""
        with self._on(self._stream):
            if entry.kind is EntryKind.PREPARE:
                self._prepare(entry)
                return
            self._step.fill_(word_of(entry.step))
            self._seldom.keep_up(entry.step, lost=self._lost)
            self._contents.begin(entry)
            self._keeps = entry.kind is EntryKind.DECODE
            queued: list[Message] = []
            self._queued.append((entry.step, queued))
            key = entry.variant, len(entry.rows)
            captured = self._captured.part_of(key, messages) if self._keeps else ()
            for message in messages[: len(messages) - len(captured)]:
                if not self._depth.make_room(calls_of(message)):
                    return
                self._move(message)
                self._depth.note(calls_of(message))
                queued.append(message)
            if captured and self._depth.make_room(REPLAY_CALLS):
                with self._wire.held():
                    self._captured.replay(key)
                self._depth.note(REPLAY_CALLS)
                queued.extend(captured)

    def _prepare(self, entry: StepEntry) -> None:
        """Capture what recurs in decode steps such as `entry`."""
        if not entry.rows:
            return
        entry = replace(entry, kind=EntryKind.DECODE)
        messages = self._contents.plan.recurring(entry, is_back=self._is_back)
        self._contents.begin(entry, is_told=not self._is_back)
        self._keeps = True

        def move() -> None:
            for message in messages:
                self._move(message)

        self._captured.capture((entry.variant, len(entry.rows)), messages, move)

    def _own_words(self) -> tuple[torch.Tensor, ...]:
        """Return the flags that nobody but this lane raises."""
        return ()

    @abstractmethod
    def _move(self, message: Message) -> None:
        """Queue a message."""

    @abstractmethod
    def _flags_of(self, messages: list[Message]) -> list[Flag]:
        """Return the flags that messages wait for, or raise."""

    def _body(self, message: Message) -> Body:
        """Return where a message goes; of a decode step's that recurs always the same."""
        known = self._bodies.get(id(message))
        if known is not None:  # it is kept, so its number is no other's
            return known[1]
        body = self._contents.make(message, room=self._room)
        if self._keeps and message.recurs:
            self._bodies[id(message)] = message, body
        return body

    def _wait(self, flags: torch.Tensor, stamp: torch.Tensor | None = None) -> None:
        wait_flags(flags, step=self._step, lost=self._lost, timeout_s=self._timeout_s, stamp=stamp)

    def _raise(self, flags: torch.Tensor, stamp: torch.Tensor | None = None) -> None:
        raise_flags(flags, step=self._step, lost=self._lost, stamp=stamp)

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
    """See `HostSendLane`; nobody on the host learns what is lost."""

    is_lost = False

    def begin(self, entry: StepEntry, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """See `HostSendLane.begin`: all are queued, unless the epoch ends before."""
        self._queue(entry, messages)
        return ()

    def send(self, message: Message) -> None:
        """See `HostSendLane.send`: `begin` has sent them."""
        raise ProtocolError(f"{message} came beside its step")

    def _move(self, message: Message) -> None:
        body = self._body(message)
        words = [self._words_of(flag) for flag in message.waits]
        *earlier, last = words or [self._step]  # which is there
        for each in earlier:
            self._wait(each)
        self._wait(last, body.stamp)
        self._contents.fill(body)
        self._wire.send(body.whole)

    def _flags_of(self, messages: list[Message]) -> list[Flag]:
        return [flag for message in messages.copy() for flag in message.waits]

    def lost_reason(self) -> str:
        """Return what was waited for in vain; nothing while nothing was. As `lost_step`."""
        step = self.lost_step()
        if not step:
            return ""
        flags = self._flags_of(dict(self._queued.copy()).get(step, []))
        label = self._missing(step, flags) or "a flag, which came later,"
        return f"step {step}: {label} was not raised within {self._timeout_s:g} s"


class StreamReceiveLane(StreamLane):
    """See `HostReceiveLane`."""

    is_queued = is_done = True

    def _own_words(self) -> tuple[torch.Tensor, ...]:
        # On the inference rank's host the forward pass does it.
        return () if self._is_back else (self._flags.to_engine,)

    def begin(self, entry: StepEntry, messages: tuple[Message, ...]) -> None:
        """See `HostReceiveLane.begin`: all are queued, unless the epoch ends before."""
        self._queue(entry, messages)

    def _move(self, message: Message) -> None:
        body = self._body(message)
        self._wire.receive(body.whole)
        self._contents.scatter(body)
        words = [self._words_of(flag) for flag in message.raises]
        first, *others = words or [self._step]  # which stays as it is
        self._raise(first, body.stamp)
        for each in others:
            self._raise(each)

    def _flags_of(self, messages: list[Message]) -> list[Flag]:
        return [flag for message in messages.copy() for flag in message.raises]

    def lost_reason(self) -> str:
        """Return of which step a message came without its number; as `lost_step`."""
        step = self.lost_step()
        return f"step {step}: the other pump has waited in vain, see its log" if step else ""

    def take(self, record: Record) -> None:
        """See `HostReceiveLane.take`: nothing of a step is a record."""
        raise ProtocolError(f"step {record.a} came as a record, between GPUs")
