# SPDX-License-Identifier: Apache-2.0
"""What the parts of a step's messages are read from at one end, and written to at the other.

Both ends and both devices run this code. On a GPU it only queues work: what it reads of a step's
requests is memory that kernels have written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from tandemkv.cache_rank.protocol.memory.shared_region import seed_buffer
from tandemkv.cache_rank.protocol.step_ring import EntryKind, StepEntry, StepRow
from tandemkv.kernels.changed_rows import put_changed_rows, take_changed_rows
from tandemkv.kernels.to_device import to_device

from .plan import Message, Part, PartKind, StepPlan
from .records import PIECE_BYTES
from .side import Side

HEAD_BYTES = _ALIGN = 16
"""A message begins with a word that its receiver finds the step's number in, and each part at a
multiple of so many bytes."""
_GPU_PIECE_BYTES = 2 * PIECE_BYTES
"""Between GPUs: 8 MiB take 42 us and 16 MiB 68 (docs/benchmarks/wires.json), and each message has a
dozen kernels beside it."""
_Shape = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Body:
    """A message as bytes: ``whole [n]`` uint8, and its parts as views of it.

    `stamp`: ``[1]`` int32 of it, the step's number if what the message waited for was raised.
    """

    whole: torch.Tensor
    parts: tuple[tuple[Part, tuple[torch.Tensor, ...]], ...]
    stamp: torch.Tensor


class Contents:
    """The parts of steps, for one direction of one host. Used by one thread.

    Shapes, with B requests of a step, n of its tokens, and `width` rows that change per KV head:

    =========================  ===================================================
    requests                   ``[3, B]`` int64: rows, lengths, newest slots
    table                      ``[num]`` int32
    K/V                        ``[2, num, H, D]``
    stream, query, windows     ``[B, hidden_size]``, ``[B, Hq, D]``, ``[num, Hq, D]``
    changes                    ``[num, H, width]`` int32, twice ``[num, H, width, D]``
    set                        ``[2, num, H, D]``
    weights                    ``[num, H, num_samples]``
    output, partial            ``[B, Hq, D]``, ``[B, Hq, D + 1]``
    =========================  ===================================================

    Changes are read in the engine's books, ``positions [books, rows, H, R]`` int32, if given.
    """

    def __init__(self, side: Side, positions: torch.Tensor | None = None) -> None:
        self._side, self._positions = side, positions
        self._sent = None if positions is None else positions.clone()
        self._slots: torch.Tensor | None = None
        self._is_active: torch.Tensor | None = None
        self._weighed_rows: torch.Tensor | None = None
        words, device = torch.int64, side.kv.device
        self._kept: torch.Tensor | None = None
        if side.requests is not None:
            self._kept = torch.zeros(3, len(side.requests[0]), dtype=words, device=device)
        self._num_cold = torch.zeros(1, dtype=words, device=device)
        self.piece_bytes = _GPU_PIECE_BYTES if side.on_gpu else PIECE_BYTES
        self.plan = StepPlan(
            side.program, has_samples=side.has_samples, num_resident=side.resident[0].shape[2],
            most_changes=side.most_changes, nbytes=self._nbytes, piece_bytes=self.piece_bytes,
        )  # fmt: skip

    def begin(self, entry: StepEntry, *, is_told: bool = False) -> None:
        """Let what follows be about `entry`; `is_told`: behind the message of its requests.

        What is read of a decode step on a GPU lies where it was in the steps before.
        """
        self._entry, self._slots, self._is_active, self._weighed_rows = entry, None, None, None
        device, rows = self._side.kv.device, entry.rows
        if entry.kind is EntryKind.DECODE and not is_told:
            self._num_cold.fill_(entry.num_cold)
        if is_told and self._kept is not None:
            self._rows, self._lengths, self._slots = self._kept[:, : len(rows)]
            return
        if entry.kind is EntryKind.EXTEND:
            rows = tuple(row for row in rows if row.window)
        elif entry.kind is EntryKind.DECODE and self._side.requests is not None:
            self._rows, self._lengths = (x[: len(rows)] for x in self._side.requests)
            return
        self._rows = to_device([row.row for row in rows], device)
        self._lengths = to_device([row.length for row in rows], device)

    def rehearse(self) -> None:
        """Have the kernels of changes compiled and loaded: see `stream_lanes`. Changes nothing."""
        layers, width = self._side.program.selecting, self._side.most_changes
        if not layers or not width:
            return
        entry, layer = StepEntry(kind=EntryKind.DECODE, step=0), next(iter(layers))
        part, device = Part(PartKind.CHANGES, layer, num=1, most=width), self._side.kv.device
        rows = torch.zeros(1, dtype=torch.int64, device=device)
        slots, k, v = (
            torch.empty(shape, dtype=dtype, device=device)
            for dtype, shape in self._shapes(part, entry, width)
        )
        slots.fill_(-1)
        k_res, v_res = (sets[layer] for sets in self._side.resident)
        if self._positions is None or self._sent is None:
            put_changed_rows(slots, k, v, rows, k_res, v_res)
            return
        nobody = torch.zeros(1, dtype=torch.bool, device=device)
        books = zip(self._positions, self._sent, strict=True)
        # Books that begin at a multiple of 16 bytes have another kernel than those that do not.
        for now, sent in {x.data_ptr() % 16: (x, y) for x, y in books}.values():
            take_changed_rows(now, sent, k_res, v_res, rows, nobody, slots, k, v)

    def know_sets(self, layer: int, rows: int | torch.Tensor) -> None:
        """Note that the other end has the sets of a row, or of ``rows [n]``, as they are."""
        book = self._side.program.book_of(layer)
        if book is not None and self._sent is not None and self._positions is not None:
            self._sent[book, rows] = self._positions[book, rows]

    @property
    def most_bytes(self) -> int:
        """Bytes of the longest message that a step may have: that of the longest part uncut."""
        num_rows, width = self._side.table.shape
        rows = (StepRow(row=1, generation=0, window=1),) * num_rows
        entry = StepEntry(kind=EntryKind.EXTEND, step=0, rows=rows)
        lengths = {PartKind.TABLE: width}
        parts = (Part(kind, num=lengths.get(kind, 1), most=1) for kind in PartKind)
        return HEAD_BYTES + max(self.piece_bytes, *(self._nbytes(part, entry) for part in parts))

    @property
    def beside_bytes(self) -> int:
        """Bytes beside a message that its reading and writing take, at most.

        The numbers of all slots, twice; or weights of samples three times, to keep some of them.
        """
        side = self._side
        return max(16 * int(side.kv.shape[2]), 3 * side.log_weight[0].nbytes)

    def gather(self, message: Message) -> tuple[Body, int]:
        """Return a message of the present step with no more changes than there are, and `width`."""
        taken = [
            self._taken(part) if part.kind is PartKind.CHANGES else () for part in message.parts
        ]
        width = max((int((found[0] >= 0).sum(-1).max()) for found in taken if found), default=0)
        body = self.make(message, width)
        for (part, views), found in zip(body.parts, taken, strict=True):
            for view, tensor in zip(views, found, strict=False):
                view.copy_(tensor[:, :, :width])
            if not found:
                self._read(part, views)
        return body, width

    def fill(self, body: Body) -> None:
        """Write a message of the present step into `body`, which has room for all changes.

        How many there are a GPU would have to be asked.
        """
        for part, views in body.parts:
            self._read(part, views)

    def make(
        self, message: Message, width: int | None = None, room: torch.Tensor | None = None
    ) -> Body:
        """Return an empty body of a message of the present step, in ``room [n]`` if that is enough.

        Without `width` there is room for all changes.
        """
        shapes, nbytes = self._layout(message, self._side.most_changes if width is None else width)
        if room is not None and len(room) >= nbytes:
            whole = room[:nbytes]
        else:
            whole = torch.empty(nbytes, dtype=torch.uint8, device=self._side.kv.device)
        return _body(whole, shapes)

    def view(self, message: Message, whole: torch.Tensor, width: int) -> Body | None:
        """Return what came as ``whole [n]`` uint8; None if it is not of a message's size."""
        shapes, nbytes = self._layout(message, width)
        is_whole = len(whole) == nbytes and 0 <= width <= self._side.most_changes
        return _body(whole, shapes) if is_whole else None

    def scatter(self, body: Body) -> None:
        """Write a message of the present step to where it is read here."""
        for part, views in body.parts:
            self._write(part, views)

    # -- inside --------------------------------------------------------------------------

    def _layout(
        self, message: Message, width: int
    ) -> tuple[list[tuple[Part, tuple[_Shape, ...]]], int]:
        """Return the shapes of a message's parts, and the bytes of all of it."""
        shapes = [(part, self._shapes(part, self._entry, width)) for part in message.parts]
        return shapes, HEAD_BYTES + sum(_aligned(*x) for _, found in shapes for x in found)

    def _nbytes(self, part: Part, entry: StepEntry) -> int:
        return sum(_aligned(*x) for x in self._shapes(part, entry, self._side.most_changes))

    def _shapes(self, part: Part, entry: StepEntry, width: int) -> tuple[_Shape, ...]:
        side, kind, size = self._side, part.kind, len(entry.rows)
        (heads, dim), stored = side.kv.shape[3:], side.kv.dtype
        if kind is PartKind.REQUESTS:
            return ((torch.int64, (3, size)),)
        if kind is PartKind.TABLE:
            return ((torch.int32, (part.num,)),)
        if kind is PartKind.KV:
            return ((stored, (2, part.num, heads, dim)),)
        if kind is PartKind.CHANGES:
            width = min(width, part.most)
            rows = (stored, (part.num, heads, width, dim))
            return ((torch.int32, (part.num, heads, width)), rows, rows)
        if kind is PartKind.SET:
            return ((stored, (2, part.num, heads, dim)),)
        if kind is PartKind.WEIGHTS:
            return ((torch.float32, (part.num, *side.log_weight.shape[2:])),)
        if kind is PartKind.IDENTITY:
            return ()
        staging = self._staging(part)
        num = part.num if kind is PartKind.WINDOWS else size
        return ((staging.dtype, (num, *staging.shape[1:])),)

    def _staging(self, part: Part) -> torch.Tensor:
        """Return the staging tensor ``[most, ...]`` of a part that has one."""
        tensors, layer = self._side.tensors, part.layer
        if part.kind is PartKind.WINDOWS:
            return seed_buffer(tensors, layer)
        if part.kind in (PartKind.STREAM, PartKind.QUERY):
            return tensors["streams" if part.kind is PartKind.STREAM else "queries"][layer]
        return tensors["outputs" if part.kind is PartKind.PARTIAL else "remote_outputs"]

    def _step_slots(self) -> torch.Tensor:
        """Return ``[n]`` int64, the slots that the step writes."""
        if self._slots is None:
            table, entry = self._side.table, self._entry
            if entry.kind is EntryKind.DECODE:
                self._slots = table[self._rows, self._lengths - 1].long()
            else:
                rows = [row for row in entry.rows if row.row]
                parts = [table[row.row, row.prefix_len : row.length] for row in rows]
                self._slots = torch.cat(parts).long()
        return self._slots

    def _keep(self, requests: torch.Tensor) -> None:
        """Let the step be about ``requests [3, B]`` of a message: rows, lengths, newest slots."""
        if self._kept is None:
            kept = requests.clone()
        else:
            kept = self._kept[:, : requests.shape[1]].copy_(requests)
        self._rows, self._lengths, self._slots = kept

    def _active(self) -> torch.Tensor:
        """Return ``[B]`` bool: requests of the step that have a resident set."""
        if self._is_active is None:
            is_decode = self._entry.kind is EntryKind.DECODE
            self._is_active = self._lengths > (self._num_cold if is_decode else -1)
        return self._is_active

    def _weighed(self) -> torch.Tensor:
        """Return ``[B]`` int64, the rows of `_active`, and for others 0, that of padding.

        Nobody reads the weights of that one.
        """
        if self._weighed_rows is None:
            self._weighed_rows = self._rows * self._active()
        return self._weighed_rows

    def _taken(self, part: Part) -> tuple[torch.Tensor, ...]:
        shapes = self._shapes(part, self._entry, self._side.most_changes)
        device = self._side.kv.device
        found = tuple(torch.empty(shape, dtype=dtype, device=device) for dtype, shape in shapes)
        self._take(part, found)
        return found

    def _take(self, part: Part, out: tuple[torch.Tensor, ...]) -> None:
        book = self._side.program.book_of(part.layer)
        assert book is not None
        assert self._positions is not None
        assert self._sent is not None
        requests = slice(part.first, part.first + part.num)
        k_res, v_res = (sets[part.layer] for sets in self._side.resident)
        take_changed_rows(
            self._positions[book], self._sent[book], k_res, v_res,
            self._rows[requests], self._active()[requests], *out,
        )  # fmt: skip

    def _read(self, part: Part, out: tuple[torch.Tensor, ...]) -> None:
        side, kind, layer = self._side, part.kind, part.layer
        if kind is PartKind.REQUESTS:
            torch.stack((self._rows, self._lengths, self._step_slots()), out=out[0])
            # Of a later step they may be others, by the time that the last message is made.
            self._keep(out[0])
        elif kind is PartKind.TABLE:
            out[0].copy_(side.table[part.row, : part.num])
        elif kind is PartKind.KV:
            slots = self._step_slots()[part.first : part.first + part.num]
            torch.index_select(_bits(side.kv[layer]), 1, slots, out=_bits(out[0]))
        elif kind is PartKind.CHANGES:
            self._take(part, out)
        elif kind is PartKind.SET:
            first, end = part.first, part.first + part.num
            torch.stack([sets[layer, part.row, first:end] for sets in side.resident], out=out[0])
            self.know_sets(layer, part.row)
        elif kind is PartKind.WEIGHTS:
            rows = self._rows[part.first : part.first + part.num]
            torch.index_select(side.log_weight[layer], 0, rows, out=out[0])
        elif kind is PartKind.IDENTITY:
            for each in side.program.selecting:
                self.know_sets(each, self._rows)
        else:
            out[0].copy_(self._staging(part)[part.first :][: len(out[0])])

    def _write(self, part: Part, found: tuple[torch.Tensor, ...]) -> None:
        side, kind, layer = self._side, part.kind, part.layer
        if kind is PartKind.REQUESTS:
            self._keep(found[0])
            slots = self._step_slots()
            side.check_requests(self._rows, self._lengths, slots)
            if side.requests is not None:
                for out, values in zip(side.requests, found[0], strict=False):
                    out[: len(values)] = values
            side.table[self._rows, self._lengths - 1] = slots.int()
        elif kind is PartKind.TABLE:
            side.check_slots(found[0])
            side.table[part.row, : part.num] = found[0]
        elif kind is PartKind.KV:
            slots = self._step_slots()[part.first : part.first + part.num]
            _bits(side.kv[layer])[:, slots] = _bits(found[0])
        elif kind is PartKind.CHANGES:
            rows = self._rows[part.first : part.first + part.num]
            (places, k, v), (k_res, v_res) = found, (sets[layer] for sets in side.resident)
            put_changed_rows(places, k, v, rows, k_res, v_res)
        elif kind is PartKind.SET:
            for sets, rows in zip(side.resident, found[0], strict=True):
                sets[layer, part.row, part.first : part.first + part.num] = rows
        elif kind is PartKind.WEIGHTS:
            rows = self._weighed()[part.first : part.first + part.num]
            side.log_weight[layer][rows] = found[0]
        elif kind is not PartKind.IDENTITY:
            self._staging(part)[part.first :][: len(found[0])] = found[0]


def _bits(kv: torch.Tensor) -> torch.Tensor:
    """Return K/V as a dtype that every operation takes: not all know those of 8 bits."""
    return kv.view(torch.uint8) if kv.element_size() == 1 else kv


def _aligned(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return -(-prod(shape) * dtype.itemsize // _ALIGN) * _ALIGN


def _body(whole: torch.Tensor, shapes: list[tuple[Part, tuple[_Shape, ...]]]) -> Body:
    """Return `whole` with views of its parts."""
    first = HEAD_BYTES

    def cut(found: tuple[_Shape, ...]) -> Iterator[torch.Tensor]:
        nonlocal first
        for dtype, shape in found:
            nbytes = prod(shape) * dtype.itemsize
            yield whole[first : first + nbytes].view(dtype).view(shape)
            first += _aligned(dtype, shape)

    parts = tuple((part, tuple(cut(found))) for part, found in shapes)
    return Body(whole, parts, whole[:4].view(torch.int32))
