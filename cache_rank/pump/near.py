# SPDX-License-Identifier: Apache-2.0
"""The pump of the inference rank's host: one epoch.

It follows the announcements of the inference rank and the flags that this raises, in the order of
the forward pass, and sends what comes with each. K/V of every step are sent, whether the step asks
for anything or not: the cache rank's host has all of them. Here they stay as long as prompts need
them; what a later prompt shares with an earlier one is fetched back before its pass begins.
"""

from __future__ import annotations

import mmap
from itertools import pairwise

import torch

from tandemkv.cache_rank.protocol.engine_program import DecodeKind
from tandemkv.cache_rank.protocol.errors import ProtocolError
from tandemkv.cache_rank.protocol.message.data_plane import DataPlane
from tandemkv.cache_rank.protocol.shared_region import seed_buffer
from tandemkv.cache_rank.protocol.step_ring import EntryKind, StepEntry, StepRing

from .records import Op, Outbox, Record, read_records
from .side import DECODE_KINDS, Side, words_of

_PACK_LAYERS = 4
"""Layers to a message, of a policy that selects for the next step."""
_POLL_S = 0.2


class NearSender:
    """Sends what the inference rank announces and raises. Used by one thread."""

    def __init__(self, side: Side, plane: DataPlane) -> None:
        self._side, self._out = side, Outbox(plane)
        self._ring = StepRing(
            side.tensors["ring"], side.flags, announced=side.at.ANNOUNCED, consumed=side.at.CONSUMED
        )
        self._staged = StagedSlots(side, gives_back=side.shard.index == 0)
        self._num_stored, self._slots = 0, torch.empty(0, dtype=torch.int64)
        self._told: dict[int, torch.Tensor] = {}

    def run(self) -> None:
        """Send steps until the epoch is over."""
        side = self._side
        while not side.is_over():
            entry = self._ring.read(timeout_s=_POLL_S, is_over=side.is_over)
            if entry is not None:
                self._send(entry)

    def _send(self, entry: StepEntry) -> None:
        side, out = self._side, self._out
        self._num_stored, self._slots = 0, self._put_slots(entry)
        out.put(Op.RAISE, side.at.CONFIRMED, side.flags.value(side.at.CONFIRMED))
        out.put(Op.ENTRY, content=words_of(entry))
        out.flush()
        is_whole = True
        if entry.kind is EntryKind.EXTEND:
            is_whole = self._send_extend(entry)
        elif entry.kind is EntryKind.DECODE:
            is_whole = self._send_decode(entry)
        if not is_whole:
            out.put(Op.RAISE, side.at.ABORTED, entry.step)
        out.put(Op.END, entry.step)
        out.flush()

    def _put_slots(self, entry: StepEntry) -> torch.Tensor:
        """Send the slots of a step's requests; returns those that the step writes, ``[n]``."""
        side, out = self._side, self._out
        is_prompt = entry.kind in (EntryKind.EXTEND, EntryKind.RESUME)
        if not is_prompt and entry.kind is not EntryKind.DECODE:
            return torch.empty(0, dtype=torch.int64)
        rows = [row for row in entry.rows if row.row]
        tables = {row.row: side.table[row.row, : row.length].clone() for row in rows}
        for number, table in tables.items():
            first = _common(self._told.get(number), table)
            if first < len(table):
                out.put(Op.TABLE, number, first, table[first:])
            self._told[number] = table
        slots = _joined([tables[row.row][row.prefix_len :] for row in rows])
        if is_prompt:
            before = _joined([tables[row.row][: row.prefix_len] for row in rows])
            out.put(Op.WANT, content=self._staged.begin_prompts(before, slots).int())
        out.put(Op.SLOTS, content=slots.int())
        self._staged.note(slots)
        return slots

    def _send_extend(self, entry: StepEntry) -> bool:
        side, out, program = self._side, self._out, self._side.program
        num_queries = sum(row.window for row in entry.rows)
        for layer in range(program.num_layers):
            if not program.extends(layer, seeds=num_queries > 0):
                continue
            if not side.wait(side.at.input(layer), entry.step):
                return False
            self._put_stored(layer + 1)
            if num_queries and program.is_sparse_layer(layer):
                queries = seed_buffer(side.tensors, layer)[:num_queries]
                out.put(Op.WINDOWS, layer, content=queries)
            self._raise(side.at.input(layer), entry.step)
        return self._send_end(entry)

    def _send_decode(self, entry: StepEntry) -> bool:
        side, program = self._side, self._side.program
        kind, size = DECODE_KINDS[entry.variant], len(entry.rows)
        num_waiting = 0
        for layer in range(program.num_layers):
            if kind is DecodeKind.SELECTING and program.reads_stream(layer):
                flag = side.at.input(layer)
                if not self._put_staged(Op.STREAM, "streams", flag, layer, layer, entry, size):
                    return False
                self._out.flush()
            is_later = program.hands_over_later(kind, layer)
            is_now = program.attends_in(layer) or program.hands_over_query(kind, layer)
            is_remote = program.attends_remotely(kind, layer)
            if is_later or is_now or is_remote:
                # Its own token is stored by then, unless it is still to attend here.
                stored = layer if is_now and not is_remote else layer + 1
                flag = side.at.query(layer)
                if not self._put_staged(Op.QUERY, "queries", flag, layer, stored, entry, size):
                    return False
                num_waiting += 1
                if is_remote or not is_later or num_waiting >= _PACK_LAYERS:
                    self._out.flush()
                    num_waiting = 0
        return self._send_end(entry)

    def _put_staged(
        self, op: Op, name: str, flag: int, layer: int, stored: int, entry: StepEntry, size: int
    ) -> bool:
        side = self._side
        if not side.wait(flag, entry.step):
            return False
        self._put_stored(stored)
        self._out.put(op, layer, content=side.tensors[name][layer, :size])
        self._out.put(Op.RAISE, flag, entry.step)
        return True

    def _send_end(self, entry: StepEntry) -> bool:
        side = self._side
        flag = side.at.input(side.at.end)
        if not side.wait(flag, entry.step):
            return False
        self._put_stored(side.program.num_layers)
        self._raise(flag, entry.step)
        return True

    def _put_stored(self, end: int) -> None:
        """Send K/V of the step in layers before `end` that were not sent yet."""
        for layer in range(self._num_stored, end):
            self._side.put_kv(self._out, layer, self._slots)
        self._num_stored = max(self._num_stored, end)

    def _raise(self, flag: int, step: int) -> None:
        self._out.put(Op.RAISE, flag, step)
        self._out.flush()


class StagedSlots:
    """Which slots of the pool hold K/V on this host; the memory of others is given back.

    Only when prompts begin: the inference rank waits then, so nobody writes. Of several cache ranks
    one pump gives it back (`gives_back`): all follow the same prompts, and each fetches its own
    heads, to slots that are not given back.
    """

    def __init__(self, side: Side, *, gives_back: bool = True) -> None:
        self._kv, self._gives_back = side.tensors["kv"], gives_back
        self._is_here = torch.zeros(self._kv.shape[2], dtype=torch.bool)
        number = [spec.name for spec in side.tensors.specs].index("kv")
        self._file = mmap.mmap(side.tensors.descriptors[number], side.tensors.specs[number].nbytes)

    @property
    def num_slots(self) -> int:
        """Slots whose K/V are here."""
        return int(self._is_here.sum())

    def note(self, slots: torch.Tensor) -> None:
        """Note that ``slots [n]`` are written."""
        self._is_here[slots] = True

    def begin_prompts(self, before: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
        """Let K/V of prompts alone be here, at slots that were, and are, written for them.

        Returns those of ``before [n]`` that are to be fetched back.
        """
        is_kept = torch.zeros_like(self._is_here)
        is_kept[before] = True
        missing = (is_kept & ~self._is_here).nonzero()[:, 0]
        is_kept[written] = True
        if self._gives_back:
            self._give_back(is_kept)
        self._is_here = is_kept
        return missing

    def _give_back(self, is_kept: torch.Tensor) -> None:
        per_slot = self._kv[0, 0, 0].nbytes
        edges = [-1, *is_kept.nonzero()[:, 0].tolist(), len(is_kept)]
        for layer in range(self._kv.shape[0] * 2):
            base = layer * len(is_kept) * per_slot
            for before, after in pairwise(edges):
                first = -(-(base + (before + 1) * per_slot) // mmap.PAGESIZE) * mmap.PAGESIZE
                end = (base + after * per_slot) // mmap.PAGESIZE * mmap.PAGESIZE
                if end > first:
                    self._file.madvise(mmap.MADV_REMOVE, first, end - first)


class NearReceiver:
    """Writes what the engine has done where the inference rank attends to it. One thread's."""

    def __init__(self, side: Side, plane: DataPlane) -> None:
        self._side, self._plane = side, plane
        self._slots = torch.empty(0, dtype=torch.int64)
        self._places = torch.empty((0, 3), dtype=torch.int64)
        self._progress = 0

    def run(self) -> None:
        """Apply messages until the data plane breaks."""
        while True:
            for record in read_records(self._plane.receive()):
                self._apply(record)
            self._progress += 1
            self._side.flags.raise_to(self._side.at.PROGRESS, self._progress)

    def _apply(self, record: Record) -> None:
        side, tensors, op, a, b = self._side, self._side.tensors, record.op, record.a, record.b
        if op is Op.RAISE:
            side.flags.raise_to(a, b)
        elif op is Op.SLOTS:
            self._slots = side.slots_of(record)
        elif op is Op.KV:
            side.write_kv(record, self._slots)
        elif op is Op.SET:
            shape, dtype = side.resident[0].shape[2:], side.resident[0].dtype
            for out, rows in zip(side.resident, record.view(dtype, 2, *shape), strict=True):
                out[a, b] = rows
        elif op is Op.PLACES:
            self._places = record.view(torch.int32, -1, 3).long()
        elif op is Op.ROWS:
            row, head, slot = self._places.unbind(1)
            shape, dtype = side.resident[0].shape[4:], side.resident[0].dtype
            for out, rows in zip(side.resident, record.view(dtype, 2, -1, *shape), strict=True):
                out[a][row, slot, head] = rows
        elif op is Op.WEIGHTS:
            side.log_weight[a, b] = record.view(torch.float32, *side.log_weight.shape[2:])
        elif op is Op.OUTPUT:
            out = tensors["outputs" if a else "remote_outputs"]
            found = record.view(out.dtype, -1, *out.shape[1:])
            out[: len(found)] = found
        else:
            raise ProtocolError(f"{op.name} came from the cache rank's host")


def _common(before: torch.Tensor | None, now: torch.Tensor) -> int:
    """Return how many slots of a row are as they were told; the radix tree may replace any."""
    if before is None:
        return 0
    count = min(len(before), len(now))
    differs = (before[:count] != now[:count]).nonzero()
    return int(differs[0]) if len(differs) else count


def _joined(slots: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(slots).long() if slots else torch.empty(0, dtype=torch.int64)
