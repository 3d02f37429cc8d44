# SPDX-License-Identifier: Apache-2.0
"""The pump of the cache rank's host: one epoch.

It announces to the engine what the inference rank has announced, writes what comes with a step
where the engine reads it, and sends back what the engine has written for the forward pass: rows of
resident sets that the engine's books name anew, weights of samples, and outputs.
"""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue

import torch

from tandemkv.cache_rank.protocol.engine_program import DecodeKind
from tandemkv.cache_rank.protocol.errors import CacheRankLostError, ProtocolError
from tandemkv.cache_rank.protocol.message.data_plane import DataPlane
from tandemkv.cache_rank.protocol.shared_region import seed_buffer
from tandemkv.cache_rank.protocol.step_ring import RESIDENT, EntryKind, StepEntry, StepRing

from .records import Op, Outbox, Record, read_records
from .side import DECODE_KINDS, Side, entry_of

_POLL_S, _LONGEST_WAIT_S = 0.2, 3600.0
_NOT_SENT = -2


class Announced:
    """What the receiving thread of a pump tells its sending thread."""

    def __init__(self) -> None:
        self.steps: SimpleQueue[tuple[StepEntry, torch.Tensor]] = SimpleQueue()
        self._ended, self._changed = 0, threading.Condition()

    def end(self, step: int) -> None:
        """Note that all of `step` has come."""
        with self._changed:
            self._ended = step
            self._changed.notify_all()

    def await_end(self, step: int, side: Side) -> bool:
        """Wait until all of `step` has come; False: the epoch is over."""
        with self._changed:
            while self._ended - step < 0:
                if side.is_over():
                    return False
                self._changed.wait(_POLL_S)
        return True


class FarReceiver:
    """Writes what the inference rank has sent, and announces its steps. One thread's."""

    def __init__(self, side: Side, plane: DataPlane, announced: Announced) -> None:
        self._side, self._plane, self._announced = side, plane, announced
        self._ring = StepRing(
            side.tensors["ring"], side.flags, announced=side.at.ANNOUNCED, consumed=side.at.CONSUMED
        )
        self._slots = self._wanted = torch.empty(0, dtype=torch.int64)

    def run(self) -> None:
        """Apply messages until the data plane breaks."""
        while True:
            for record in read_records(self._plane.receive()):
                self._apply(record)

    def _apply(self, record: Record) -> None:
        side, tensors, op, a, b = self._side, self._side.tensors, record.op, record.a, record.b
        if op is Op.RAISE:
            side.flags.raise_to(a, b)
        elif op is Op.KV:
            side.write_kv(record, self._slots)
        elif op in (Op.STREAM, Op.QUERY):
            out = tensors["streams" if op is Op.STREAM else "queries"][a]
            found = record.view(out.dtype, -1, *out.shape[1:])
            out[: len(found)] = found
        elif op is Op.WINDOWS:
            out = seed_buffer(tensors, a)
            found = record.view(out.dtype, -1, *out.shape[1:])
            out[: len(found)] = found
        elif op is Op.TABLE:
            slots = side.slots_of(record)
            side.table[a, b : b + len(slots)] = slots.int()
        elif op is Op.SLOTS:
            self._slots = side.slots_of(record)
        elif op is Op.WANT:
            self._wanted = side.slots_of(record)
        elif op is Op.ENTRY:
            self._announce(entry_of(record))
        elif op is Op.END:
            self._announced.end(a)
        else:
            raise ProtocolError(f"{op.name} came from the inference rank's host")

    def _announce(self, entry: StepEntry) -> None:
        wanted, self._wanted = self._wanted, torch.empty(0, dtype=torch.int64)
        self._announced.steps.put((entry, wanted))
        self._ring.write(entry, timeout_s=_LONGEST_WAIT_S, is_over=self._side.is_over)


class FarSender:
    """Sends what the engine has done. One thread's.

    Parameters
    ----------
    positions : torch.Tensor or None
        ``[books, rows, H, R]`` int32, the engine's books; None if nothing is selected.
    """

    def __init__(
        self, side: Side, plane: DataPlane, announced: Announced, positions: torch.Tensor | None
    ) -> None:
        self._side, self._out, self._announced = side, Outbox(plane), announced
        self._positions = positions
        self._sent = None if positions is None else torch.full_like(positions, _NOT_SENT)

    def run(self) -> None:
        """Send until the epoch is over."""
        while not self._side.is_over():
            try:
                entry, wanted = self._announced.steps.get(timeout=_POLL_S)
            except Empty:
                continue
            self._send(entry, wanted)

    def _send(self, entry: StepEntry, wanted: torch.Tensor) -> None:
        side, at, out, kind = self._side, self._side.at, self._out, entry.kind
        if len(wanted):
            out.put(Op.SLOTS, content=wanted.int())
            for layer in range(side.program.num_layers):
                side.put_kv(out, layer, wanted)
        if kind is not EntryKind.PREPARE and side.wait(at.LOADED, entry.step):
            self._raise(at.LOADED, entry.step)
        changed: set[int] = set()
        if kind is EntryKind.EXTEND:
            self._send_seeds(entry)
        elif kind is EntryKind.DECODE:
            changed = self._send_answers(entry)
        if not side.wait_always(at.FINISHED, entry.step):
            raise CacheRankLostError("the epoch is over")
        if not self._announced.await_end(entry.step, side):
            raise CacheRankLostError("the epoch is over")
        rows = [row.row for row in entry.rows if row.row]
        if kind is EntryKind.DECODE and DECODE_KINDS[entry.variant] is DecodeKind.SELECTING:
            for layer in side.program.selecting:
                if layer not in changed:
                    self._put_changes(layer, rows)
        elif kind is EntryKind.GROW and self._sent is not None and self._positions is not None:
            self._sent[:, rows] = self._positions[:, rows]  # the tokens are there
            self._put_weights(side.program.selecting, rows)
        elif kind is EntryKind.RESUME:
            resumed = [row.row for row in entry.rows if row.flags & RESIDENT]
            for layer in range(side.program.num_layers):
                if side.program.is_sparse_layer(layer):
                    self._put_sets(layer, resumed)
            for flag in (at.RESTORED, at.RESEEDED):
                out.put(Op.RAISE, flag, side.flags.value(flag))
        self._raise(at.FINISHED, entry.step)

    def _send_seeds(self, entry: StepEntry) -> None:
        side, program = self._side, self._side.program
        rows = [row.row for row in entry.rows if row.window]
        for layer in range(program.num_layers if rows else 0):
            if program.is_sparse_layer(layer):
                if not side.wait(side.at.ready(layer), entry.step):
                    return
                self._put_sets(layer, rows)
                self._raise(side.at.ready(layer), entry.step)

    def _send_answers(self, entry: StepEntry) -> set[int]:
        """Send what layers wait for in a decode step; returns those whose sets were sent."""
        side, program, changed = self._side, self._side.program, set[int]()
        kind, size = DECODE_KINDS[entry.variant], len(entry.rows)
        rows = [row.row for row in entry.rows if row.row]
        for layer in range(program.num_layers):
            is_awaited, attends = program.awaits(kind, layer), program.attends_in(layer)
            if not (is_awaited or attends or program.attends_remotely(kind, layer)):
                continue
            if not side.wait(side.at.ready(layer), entry.step):
                break
            if is_awaited:
                self._put_changes(layer, rows)
                changed.add(layer)
            else:
                out = side.tensors["outputs" if attends else "remote_outputs"]
                self._out.put(Op.OUTPUT, int(attends), content=out[:size])
            self._raise(side.at.ready(layer), entry.step)
        return changed

    def _put_sets(self, layer: int, rows: list[int]) -> None:
        side, book = self._side, self._side.program.book_of(layer)
        for row in rows:
            parts = [part[layer, row] for part in side.resident]
            self._out.put(Op.SET, layer, row, torch.stack(parts))
            if book is not None and self._sent is not None and self._positions is not None:
                self._sent[book, row] = self._positions[book, row]
        self._put_weights([layer], rows)

    def _put_changes(self, layer: int, rows: list[int]) -> None:
        side, book = self._side, self._side.program.book_of(layer)
        if book is None or self._sent is None or self._positions is None or not rows:
            return
        index = torch.tensor(rows)
        now = self._positions[book, index]
        places = (now != self._sent[book, index]).nonzero()
        self._sent[book, index] = now
        if len(places):
            row, head, slot = index[places[:, 0]], places[:, 1], places[:, 2]
            self._out.put(Op.PLACES, layer, content=torch.stack([row, head, slot], 1).int())
            parts = [part[layer][row, slot, head] for part in side.resident]
            self._out.put(Op.ROWS, layer, content=torch.stack(parts))
        self._put_weights([layer], rows)

    def _put_weights(self, layers: list[int], rows: list[int]) -> None:
        if self._side.has_samples:
            for layer in layers:
                for row in rows:
                    self._out.put(Op.WEIGHTS, layer, row, self._side.log_weight[layer, row])

    def _raise(self, flag: int, step: int) -> None:
        self._out.put(Op.RAISE, flag, step)
        self._out.flush()
