# SPDX-License-Identifier: Apache-2.0
"""The pump of the cache rank's host: one epoch.

It announces to the engine what the inference rank has announced, writes what comes with a step
where the engine reads it, and sends back what the engine has written for the forward pass: rows of
resident sets that the engine's books name anew, weights of samples, and outputs.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from queue import Empty, SimpleQueue

import torch

from tandemkv.cache_rank.protocol.errors import CacheRankLostError, ProtocolError
from tandemkv.cache_rank.protocol.message.data_plane import DataPlane
from tandemkv.cache_rank.protocol.step_ring import RESIDENT, EntryKind, StepEntry, StepRing

from .contents import Contents
from .gpu_link import ReceiveLane, SendLane
from .plan import FlagKind, StepPlan
from .records import Op, Outbox, Record, read_records
from .session import StepCount
from .side import Side

_POLL_S, _LONGEST_WAIT_S = 0.2, 3600.0


class Announced(StepCount):
    """What the receiving thread of a pump tells its sending thread: steps, and which have come."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: SimpleQueue[tuple[StepEntry, torch.Tensor]] = SimpleQueue()


class FarReceiver:
    """Writes what the inference rank has sent, and announces its steps. One thread's."""

    def __init__(
        self, side: Side, plan: StepPlan, plane: DataPlane, lane: ReceiveLane, announced: Announced
    ) -> None:
        self._side, self._plan, self._plane, self._lane = side, plan, plane, lane
        self._announced = announced
        self._ring = StepRing(side.tensors["ring"], side.flags)
        self._unannounced: tuple[StepEntry, int] | None = None
        self._wanted = torch.empty(0, dtype=torch.int64)

    def run(self) -> None:
        """Apply records until the data plane breaks."""
        while True:
            for record in read_records(self._plane.receive()):
                self._apply(record)

    def _apply(self, record: Record) -> None:
        side, op, a, b = self._side, record.op, record.a, record.b
        if op is Op.MESSAGE:
            self._lane.take(record)
            if self._unannounced is not None:
                self._count(*self._unannounced)
        elif op is Op.RAISE:
            side.raise_to(a, b)
        elif op is Op.TABLE:
            slots = side.slots_of(record)
            side.table[a, : len(slots)] = slots.int()
        elif op is Op.WANT:
            self._wanted = side.slots_of(record)
        elif op is Op.ENTRY:
            words = array("q", record.view(torch.int64, -1).tolist())
            entry = StepEntry.of(memoryview(words))
            side.check_entry(entry)
            self._begin(entry)
        elif op is Op.END:
            self._announced.note(a)
        else:
            raise ProtocolError(f"{op.name} came from the inference rank's host")

    def _begin(self, entry: StepEntry) -> None:
        """Announce a step: on a CPU once its requests are written, which come first."""
        messages = self._plan.outward(entry)
        if self._lane.is_queued or not messages:
            self._announce(entry)
        else:
            kinds = [[flag.kind for flag in message.raises] for message in messages]
            at = next(n for n, found in enumerate(kinds) if FlagKind.BEGIN in found)
            self._unannounced = entry, at + 1
        self._lane.begin(entry, messages)

    def _count(self, entry: StepEntry, num_due: int) -> None:
        """Note that one of the messages has come that `entry` is announced behind."""
        self._unannounced = entry, num_due - 1
        if num_due == 1:
            self._announce(entry)

    def _announce(self, entry: StepEntry) -> None:
        self._unannounced = None
        if entry.kind is EntryKind.RESUME:
            self._side.settle()  # its tables are written by this process
        wanted, self._wanted = self._wanted, torch.empty(0, dtype=torch.int64)
        self._announced.steps.put((entry, wanted))
        self._ring.write(entry, timeout_s=_LONGEST_WAIT_S, is_over=self._side.is_over)


class FarSender:
    """Sends what the engine has done. One thread's.

    What is no part of a plan goes by `out`, all else by `lane`, whose `contents` have the engine's
    books if anything is selected.
    """

    def __init__(
        self, side: Side, contents: Contents, out: Outbox, lane: SendLane, announced: Announced
    ) -> None:
        self._side, self._contents, self._out = side, contents, out
        self._lane, self._announced = lane, announced

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
        messages = self._contents.plan.back(entry)
        if kind is EntryKind.RESUME:
            self._tell_of_progress(entry)
        if not side.on_gpu and kind is not EntryKind.PREPARE and side.wait(at.LOADED, entry.step):
            self._raise(at.LOADED, entry.step)
        for message in self._lane.begin(entry, messages):
            if any(flag.kind is FlagKind.FINISHED for flag in message.waits):
                self._await_end(entry)
            self._lane.send(message)
        if messages:
            return
        self._await_end(entry)
        if kind is EntryKind.RESUME:
            self._put_sets(row.row for row in entry.rows if row.flags & RESIDENT)
            for flag in (at.RESTORED, at.RESEEDED):
                out.put(Op.RAISE, flag, side.flags.value(flag))
            out.put(Op.RAISE, at.LOADED, entry.step)
        self._raise(at.FINISHED, entry.step)

    def _tell_of_progress(self, entry: StepEntry) -> None:
        """Wait for the end of a step of which nothing goes there before, and tell that it moves."""
        side, at, last = self._side, self._side.at, 0
        while not side.is_over():
            if side.flags.wait(at.FINISHED, entry.step, timeout_s=_POLL_S, is_over=side.is_over):
                return
            progress = side.flags.value(at.PROGRESS)
            if progress != last:
                last = progress
                self._raise(at.PROGRESS, progress)

    def _await_end(self, entry: StepEntry) -> None:
        """Wait until both sides have done all of a step; sends the sets of one that was given up.

        Raises `CacheRankLostError` if the epoch is over.
        """
        side = self._side
        is_done = side.wait_always(side.at.FINISHED, entry.step)
        if not is_done or not self._announced.await_step(entry.step, side.is_over):
            raise CacheRankLostError("the epoch is over")
        if self._lane.is_lost and entry.kind is EntryKind.DECODE:
            self._put_sets(row.row for row in entry.rows if row.length > entry.num_cold)

    def _put_sets(self, rows: Iterable[int]) -> None:
        """Send the resident sets of `rows` as they are."""
        side, rows = self._side, list(rows)
        for layer in range(side.program.num_layers if rows else 0):
            if not side.program.is_sparse_layer(layer):
                continue
            for row in rows:
                side.put_set(self._out, layer, row)
                if side.has_samples:
                    self._out.put(Op.WEIGHTS, layer, row, side.log_weight[layer, row])
                self._contents.know_sets(layer, row)
        side.settle()

    def _raise(self, flag: int, step: int) -> None:
        self._out.put(Op.RAISE, flag, step)
        self._out.flush()
