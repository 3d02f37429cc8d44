# SPDX-License-Identifier: Apache-2.0
"""What two pumps send each other in a step: derived by both, never sent.

A step's transfers are a plan, a list of messages for each direction. A message has the parts that
may be read once the flags that it waits for are raised; when it has come the same flags are raised
at the other end. Sizes follow from the announcement of the step, so nothing of a message tells what
is in it, and a GPU can be told of all of them before the first is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NamedTuple

from tandemkv.cache_rank.protocol.engine_program import DecodeKind, EngineProgram
from tandemkv.cache_rank.protocol.step_ring import EntryKind, StepEntry

DECODE_KINDS = tuple(DecodeKind)
_PACK_LAYERS = 4
"""Layers to a message at most, of a policy that selects for the next step; the last ones are alone,
for the next step waits until they have been selected for."""


class FlagKind(Enum):
    """See `GpuFlags`, which has one of each, and `FlagIndex`."""

    BEGIN = auto()
    INPUT = auto()
    QUERY = auto()
    END = auto()
    READY = auto()
    FINISHED = auto()


class Flag(NamedTuple):
    """A flag of a step; in GPU memory `size` words of it."""

    kind: FlagKind
    layer: int = 0
    size: int = 1

    @property
    def label(self) -> str:
        """Name it in a log."""
        has_layer = self.kind in (FlagKind.INPUT, FlagKind.QUERY, FlagKind.READY)
        return f"{self.kind.name} of layer {self.layer}" if has_layer else self.kind.name


class PartKind(Enum):
    """What a part holds; see `Contents` for shapes."""

    REQUESTS = auto()
    """Rows, lengths and newest slots of a decode step."""
    TABLE = auto()
    """The slots of `row`, `num` of them."""
    KV = auto()
    """K/V of `layer` at `num` of the step's slots, from number `first`."""
    STREAM = auto()
    """Residual streams of `layer`."""
    QUERY = auto()
    """Queries of `layer`."""
    WINDOWS = auto()
    """`num` prompt queries of `layer`, from number `first`."""
    CHANGES = auto()
    """Rows of the resident sets of `layer` that differ, of `num` requests from number `first`, and
    `most` of each KV head at most: those that no earlier part had."""
    SET = auto()
    """The resident set of `row` in `layer`, `num` slots of it from number `first`."""
    WEIGHTS = auto()
    """Weights of samples of `layer`, of `num` requests from number `first`."""
    OUTPUT = auto()
    """What was attended to in `layer` where the K/V are."""
    PARTIAL = auto()
    """What the policy attended to, with the logarithm of its weight."""
    IDENTITY = auto()
    """Nothing: the sets of the step's rows are their first tokens, which are there."""


_CUT = frozenset((PartKind.KV, PartKind.WINDOWS, PartKind.CHANGES, PartKind.SET, PartKind.WEIGHTS))
"""What may become too long for one message."""


class Part(NamedTuple):
    """A part of a message."""

    kind: PartKind
    layer: int = 0
    row: int = 0
    first: int = 0
    num: int = 0
    most: int = 0


@dataclass(frozen=True, slots=True)
class Message:
    """Parts that travel together, once all of `waits` are raised; `raises` are, when they came."""

    waits: tuple[Flag, ...]
    parts: tuple[Part, ...] = ()
    raises: tuple[Flag, ...] = ()

    @property
    def recurs(self) -> bool:
        """Whether another decode step of the same kind and size has the same message."""
        return not any(part.row for part in self.parts)

    @property
    def is_last(self) -> bool:
        """Whether the engine has done all of the step then."""
        return any(flag.kind is FlagKind.FINISHED for flag in self.raises)


class StepPlan:
    """Plans of the steps of one epoch.

    A resident set has `num_resident` slots, of which a selection changes `most_changes` per KV head
    at most. `nbytes` returns the bytes of a part in a step, at most; what is longer than about
    `piece_bytes` is cut.
    """

    def __init__(
        self,
        program: EngineProgram,
        *,
        has_samples: bool,
        num_resident: int,
        most_changes: int,
        nbytes: Callable[[Part, StepEntry], int],
        piece_bytes: int,
    ) -> None:
        self._program, self._has_samples, self._nbytes = program, has_samples, nbytes
        self._piece_bytes = piece_bytes
        self._num_resident, self._most_changes = num_resident, most_changes
        self._decode: dict[tuple[bool, int, int], tuple[Message, ...]] = {}
        self._replaced: set[int] = set()

    def outward(self, entry: StepEntry) -> tuple[Message, ...]:
        """Return what goes to the cache rank's host; nothing for what records say alone.

        Of each step once, in their order: behind its prompt the radix tree may give a request other
        slots, with equal K/V, so the first decode step of each has its whole table.
        """
        rows = {row.row for row in entry.rows if row.row}
        replaced = self._replaced & rows
        if entry.kind is EntryKind.EXTEND:
            self._replaced |= rows
            return self._cut_all(self._extend_out(entry), entry)
        if entry.kind in (EntryKind.DECODE, EntryKind.RESUME):
            self._replaced -= rows
        if entry.kind is EntryKind.DECODE:
            first, *others = self._known(entry, is_back=False)
            if not replaced:
                return (first, *others)
            first = replace(first, parts=(*first.parts, *_tables(entry, replaced)))
            return (*self._cut(first, entry), *others)
        return (_message([Flag(FlagKind.BEGIN)]),) if entry.kind is EntryKind.GROW else ()

    def back(self, entry: StepEntry) -> tuple[Message, ...]:
        """Return what comes from there; its last message tells that the step is done."""
        if entry.kind is EntryKind.EXTEND:
            return self._cut_all(self._extend_back(entry), entry)
        if entry.kind is EntryKind.DECODE:
            return self._known(entry, is_back=True)
        if entry.kind is EntryKind.GROW:
            return tuple(self._cut(self._grow_back(len(entry.rows)), entry))
        return ()

    def recurring(self, entry: StepEntry, *, is_back: bool) -> tuple[Message, ...]:
        """Return what every decode step of the kind and size of `entry` has, its last messages.

        Outward that is all but the first, which may carry tables.
        """
        return self._known(entry, is_back=is_back)[0 if is_back else 1 :]

    def _known(self, entry: StepEntry, *, is_back: bool) -> tuple[Message, ...]:
        """Return the plan of a decode step, which depends on its kind and size alone."""
        key = is_back, entry.variant, len(entry.rows)
        if key not in self._decode:
            found = self._decode_back(entry) if is_back else self._decode_out(entry)
            self._decode[key] = self._cut_all(found, entry)
        return self._decode[key]

    def _extend_out(self, entry: StepEntry) -> Iterator[Message]:
        program = self._program
        yield _message([Flag(FlagKind.BEGIN)], _tables(entry, {row.row for row in entry.rows}))
        num_queries = sum(row.window for row in entry.rows)
        num_slots = sum(row.length - row.prefix_len for row in entry.rows if row.row)
        stored = _Stored(num_slots)
        for layer in range(program.num_layers):
            if program.extends(layer, seeds=num_queries > 0):
                parts = stored.before(layer + 1)
                if num_queries and program.is_sparse_layer(layer):
                    parts.append(Part(PartKind.WINDOWS, layer, num=num_queries))
                yield _message([Flag(FlagKind.INPUT, layer)], parts)
        yield _message([Flag(FlagKind.END)], stored.before(program.num_layers))

    def _decode_out(self, entry: StepEntry) -> Iterator[Message]:
        program, kind, size = self._program, DECODE_KINDS[entry.variant], len(entry.rows)
        yield _message([Flag(FlagKind.BEGIN)], [Part(PartKind.REQUESTS)])
        stored, flags, parts = _Stored(size), list[Flag](), list[Part]()
        num_later = sum(program.hands_over_later(kind, x) for x in range(program.num_layers))
        for layer in range(program.num_layers):
            is_urgent = False
            if kind is DecodeKind.SELECTING and program.reads_stream(layer):
                parts += (*stored.before(layer), Part(PartKind.STREAM, layer))
                yield _message([*flags, Flag(FlagKind.INPUT, layer, size)], parts)
                flags, parts = [], []
            is_later = program.hands_over_later(kind, layer)
            num_later -= is_later
            is_now = program.attends_in(layer) or program.hands_over_query(kind, layer)
            is_remote = program.attends_remotely(kind, layer)
            if is_later or is_now or is_remote:
                # Its own token is stored by then, unless it is still to attend here.
                parts += stored.before(layer if is_now and not is_remote else layer + 1)
                parts.append(Part(PartKind.QUERY, layer))
                flags.append(Flag(FlagKind.QUERY, layer, size))
                is_urgent = is_remote or not is_later
            if is_urgent or len(flags) >= max(1, min(_PACK_LAYERS, num_later // 2)):
                yield _message(flags, parts)
                flags, parts = [], []
        parts += stored.before(program.num_layers)
        yield _message([*flags, Flag(FlagKind.END)], parts)

    def _extend_back(self, entry: StepEntry) -> Iterator[Message]:
        rows = [row.row for row in entry.rows if row.window]
        for layer in range(self._program.num_layers if rows else 0):
            if self._program.is_sparse_layer(layer):
                sets = [Part(PartKind.SET, layer, row, num=self._num_resident) for row in rows]
                parts = (*sets, *self._weights(layer, len(rows)))
                yield _message([Flag(FlagKind.READY, layer)], parts)
        yield _message([Flag(FlagKind.FINISHED)])

    def _decode_back(self, entry: StepEntry) -> Iterator[Message]:
        program, kind, size = self._program, DECODE_KINDS[entry.variant], len(entry.rows)
        rest = list(program.selecting) if kind is DecodeKind.SELECTING else []
        for layer in range(program.num_layers):
            if program.awaits(kind, layer):
                rest.remove(layer)
                yield _message([Flag(FlagKind.READY, layer)], self._changes(layer, size))
            elif program.attends_in(layer):
                yield _message([Flag(FlagKind.READY, layer)], [Part(PartKind.PARTIAL, layer)])
            elif program.attends_remotely(kind, layer):
                flag = Flag(FlagKind.READY, layer, size)
                yield _message([flag], [Part(PartKind.OUTPUT, layer)])
        # What the next step attends to: behind all that this one waits for.
        told = [layer for layer in rest if program.tells_of_next(kind, layer)]
        for layer in told:
            yield _message([Flag(FlagKind.READY, layer)], self._changes(layer, size))
        changes = (self._changes(layer, size) for layer in rest if layer not in told)
        yield _message([Flag(FlagKind.FINISHED)], [x for parts in changes for x in parts])

    def _grow_back(self, size: int) -> Message:
        weights = [part for x in self._program.selecting for part in self._weights(x, size)]
        return _message([Flag(FlagKind.FINISHED)], [Part(PartKind.IDENTITY), *weights])

    def _changes(self, layer: int, size: int) -> list[Part]:
        changes = Part(PartKind.CHANGES, layer, num=size, most=self._most_changes)
        return [changes, *self._weights(layer, size)]

    def _weights(self, layer: int, size: int) -> list[Part]:
        return [Part(PartKind.WEIGHTS, layer, num=size)] if self._has_samples else []

    def _cut_all(self, messages: Iterator[Message], entry: StepEntry) -> tuple[Message, ...]:
        return tuple(piece for message in messages for piece in self._cut(message, entry))

    def _cut(self, message: Message, entry: StepEntry) -> list[Message]:
        """Return `message` in pieces of about `piece_bytes`: others wait behind each."""
        pieces, nbytes = [list[Part]()], 0
        for part in message.parts:
            for each in self._cut_part(part, entry):
                size = self._nbytes(each, entry)
                if pieces[-1] and nbytes + size > self._piece_bytes:
                    pieces.append([])
                    nbytes = 0
                pieces[-1].append(each)
                nbytes += size
        last = len(pieces) - 1
        return [
            Message(
                message.waits if number == 0 else (),
                tuple(parts),
                message.raises if number == last else (),
            )
            for number, parts in enumerate(pieces)
        ]

    def _cut_part(self, part: Part, entry: StepEntry) -> Iterator[Part]:
        if part.kind not in _CUT:
            yield part
            return
        one = part._replace(num=1)
        width, most, end = self._fitting(one, entry), part.most, part.first + part.num
        if self._nbytes(one, entry) > self._piece_bytes and most:  # what one request may change
            most = self._fitting(one._replace(most=1), entry)
        for first in range(part.first, end, width):
            piece = part._replace(first=first, num=min(width, end - first))
            for taken in range(0, part.most, most) if most else (0,):
                yield piece._replace(most=min(most, part.most - taken))

    def _fitting(self, part: Part, entry: StepEntry) -> int:
        """Return how many parts such as `part` are a piece, 1 at least."""
        return max(1, self._piece_bytes // max(1, self._nbytes(part, entry)))


class _Stored:
    """Which K/V of a step's `num_slots` tokens have gone."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots, self._num_layers = num_slots, 0

    def before(self, end: int) -> list[Part]:
        """Return those of layers before `end` that have not."""
        first, self._num_layers = self._num_layers, max(self._num_layers, end)
        return [Part(PartKind.KV, layer, num=self._num_slots) for layer in range(first, end)]


def _tables(entry: StepEntry, rows: AbstractSet[int]) -> list[Part]:
    """Return the tables of those of `rows` that a step has."""
    return [
        Part(PartKind.TABLE, row=row.row, num=row.length)
        for row in entry.rows
        if row.row and row.row in rows
    ]


def _message(flags: Iterable[Flag], parts: Iterable[Part] = ()) -> Message:
    return Message(tuple(flags), tuple(parts), tuple(flags))
