# SPDX-License-Identifier: Apache-2.0
"""The pump of the inference rank's host: one epoch.

It follows the announcements of the inference rank and the flags that this raises, in the order of
the forward pass, and sends what comes with each. K/V of every step are sent, whether the step asks
for anything or not: the cache rank's host has all of them. Here they stay as long as prompts need
them; what a later prompt shares with an earlier one is fetched back before its pass begins, and of
requests that are taken up what is read then. Between GPUs they stay for good.
"""

from __future__ import annotations

import mmap
import threading
from queue import Empty, SimpleQueue

import torch

from tandemkv.cache_rank.protocol.engine import DenseLengths
from tandemkv.cache_rank.protocol.errors import ProtocolError
from tandemkv.cache_rank.protocol.gpu_flags import GpuFlags, word_of
from tandemkv.cache_rank.protocol.message.data_plane import DataPlane
from tandemkv.cache_rank.protocol.step_ring import RESIDENT, EntryKind, StepEntry, StepRing, StepRow
from tandemkv.kernels.samples import sample_offsets

from .gpu_link import ReceiveLane, SendLane
from .plan import StepPlan
from .records import Op, Outbox, Record, read_records
from .session import StepCount
from .side import Side

_POLL_S = 0.2
_MOST_CALLS = 1 << 15
"""To give memory back when a prompt begins: each takes about 10 us, and the other rank waits."""


class Progress:
    """What the inference rank's patience goes by: it counts messages, either way. Any thread's.

    Those that go count as well: of a prompt without windows nothing comes back before its end, and
    its K/V may take longer than that patience. An engine that is stuck takes in no more than there
    is of a step.
    """

    def __init__(self, side: Side) -> None:
        self._flags, self._at = side.flags, side.at.PROGRESS
        self._count, self._lock = 0, threading.Lock()

    def note(self) -> None:
        """Count a message that the other end has, or that came from there."""
        with self._lock:  # else the lower of two counts might be raised last
            self._count += 1
            self._flags.raise_to(self._at, self._count)


class NearSender:
    """Sends what the inference rank announces and raises. Used by one thread.

    Announcements go by `out`, all else by `lane`; `receiver` is told of each step before its first
    answer can come.
    """

    def __init__(
        self, side: Side, plan: StepPlan, out: Outbox, lane: SendLane, receiver: NearReceiver
    ) -> None:
        self._side, self._plan, self._out = side, plan, out
        self._lane, self._receiver = lane, receiver
        self._ring = StepRing(side.tensors["ring"], side.flags)
        self._staged = None
        if not side.on_gpu:
            self._staged = StagedSlots(side, gives_back=side.shard.index == 0)

    def run(self) -> None:
        """Send steps until the epoch is over."""
        side = self._side
        while not side.is_over():
            entry = self._ring.read(timeout_s=_POLL_S, is_over=side.is_over)
            if entry is not None:
                self._send(entry)

    def _send(self, entry: StepEntry) -> None:
        side, out, lane = self._side, self._out, self._lane
        if self._staged is not None:
            self._stage(self._staged, entry)
        if entry.kind is EntryKind.RESUME:
            for row in entry.rows:
                out.put(Op.TABLE, row.row, content=side.table[row.row, : row.length])
        out.put(Op.RAISE, side.at.CONFIRMED, side.flags.value(side.at.CONFIRMED))
        out.put(Op.ENTRY, content=torch.tensor(entry.words()))
        self._receiver.expect(entry)
        out.flush()
        for message in lane.begin(entry, self._plan.outward(entry)):
            lane.send(message)
        if lane.is_lost:
            out.put(Op.RAISE, side.at.ABORTED, entry.step)
        out.put(Op.END, entry.step)
        out.flush()

    def _stage(self, staged: StagedSlots, entry: StepEntry) -> None:
        """Note which slots a step writes, and ask for those that its prompts lack."""
        is_prompt = entry.kind in (EntryKind.EXTEND, EntryKind.RESUME)
        if not is_prompt and entry.kind is not EntryKind.DECODE:
            return
        rows = [row for row in entry.rows if row.row]
        tables = [self._side.table[row.row, : row.length] for row in rows]
        cut = [row.prefix_len for row in rows]
        slots = _joined([table[n:] for table, n in zip(tables, cut, strict=True)])
        if is_prompt:
            if entry.kind is EntryKind.RESUME:
                read = [read_again(row, self._side) for row in rows]
            else:
                read = [torch.arange(n) for n in cut]
            before = _joined([table[at] for table, at in zip(tables, read, strict=True)])
            self._out.put(Op.WANT, content=staged.begin_prompts(before, slots).int())
        staged.note(slots)


class StagedSlots:
    """Which slots of the pool hold K/V on this host; the memory of others is given back.

    Only when prompts begin: the inference rank waits then, so nobody writes. Between slots that are
    kept lies a gap for each that was decoded beside other requests; those with the most to give are
    given back, as many as take a fraction of a second, and the rest with a later prompt. Of several
    cache ranks one pump gives it back (`gives_back`): all follow the same prompts, and each fetches
    its own heads, to slots that are not given back.
    """

    def __init__(self, side: Side, *, gives_back: bool = True) -> None:
        self._kv, self._gives_back = side.tensors["kv"], gives_back
        self._is_here = torch.zeros(self._kv.shape[2], dtype=torch.bool)
        # Slots that may have memory, of an earlier epoch as well.
        self._has_memory = torch.ones_like(self._is_here)
        number = [spec.name for spec in side.tensors.specs].index("kv")
        self._file = mmap.mmap(side.tensors.descriptors[number], side.tensors.specs[number].nbytes)

    def note(self, slots: torch.Tensor) -> None:
        """Note that ``slots [n]`` are written."""
        self._is_here[slots] = True
        self._has_memory[slots] = True

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
        self._has_memory |= is_kept
        return missing

    def _give_back(self, is_kept: torch.Tensor) -> None:
        num_slots, per_slot = len(is_kept), self._kv[0, 0, 0].nbytes
        num_parts = self._kv.shape[0] * 2
        gaps = self._gaps(is_kept, least=-(-2 * mmap.PAGESIZE // per_slot))
        for first_slot, end_slot in gaps[: max(1, _MOST_CALLS // num_parts)]:
            self._has_memory[first_slot:end_slot] = False
            for part in range(num_parts):
                base = part * num_slots * per_slot
                first = -(-(base + first_slot * per_slot) // mmap.PAGESIZE) * mmap.PAGESIZE
                end = (base + end_slot * per_slot) // mmap.PAGESIZE * mmap.PAGESIZE
                self._file.madvise(mmap.MADV_REMOVE, first, end - first)

    def _gaps(self, is_kept: torch.Tensor, *, least: int) -> list[list[int]]:
        """Return where runs of at least so many slots that are not kept begin and end.

        Those that have memory, most of it first.
        """
        ends = torch.tensor([-1, len(is_kept)])
        edges = torch.cat([ends[:1], is_kept.nonzero()[:, 0], ends[1:]])
        found = torch.stack([edges[:-1] + 1, edges[1:]], dim=1)
        used = torch.cat([torch.zeros(1, dtype=torch.int64), self._has_memory.cumsum(0)])
        held = used[found[:, 1]] - used[found[:, 0]]
        is_worth = (held > 0) & (found[:, 1] - found[:, 0] >= least)
        found, held = found[is_worth], held[is_worth]
        gaps: list[list[int]] = found[held.argsort(descending=True)].tolist()
        return gaps


class NearReceiver:
    """Writes what the engine has done where the inference rank attends to it."""

    def __init__(
        self, side: Side, plan: StepPlan, plane: DataPlane, lane: ReceiveLane, progress: Progress
    ) -> None:
        self._side, self._plan, self._plane, self._lane = side, plan, plane, lane
        self._steps: SimpleQueue[StepEntry] = SimpleQueue()
        self._queued, self._expected = StepCount(), 0
        self._slots = torch.empty(0, dtype=torch.int64)
        if side.on_gpu:
            flags = GpuFlags(side.tensors, side.program.num_layers, side.shard.index)
            self._finished = flags.finished
        self._progress = progress

    def expect(self, entry: StepEntry) -> None:
        """Note that `entry` is announced. Another thread's."""
        is_prepared = self._lane.is_queued and entry.kind is EntryKind.PREPARE
        if is_prepared or entry.kind in (EntryKind.EXTEND, EntryKind.DECODE, EntryKind.GROW):
            self._expected = entry.step
            self._steps.put(entry)

    def run(self) -> None:
        """Apply records until the data plane breaks."""
        while True:
            for record in read_records(self._plane.receive()):
                self._apply(record)
            self._progress.note()

    def run_queued(self) -> None:
        """Queue the messages of steps until the epoch is over, where a GPU waits for them."""
        while not self._side.is_over():
            try:
                entry = self._steps.get(timeout=_POLL_S)
            except Empty:
                continue
            self._lane.begin(entry, self._plan.back(entry))
            self._queued.note(entry.step)

    def _apply(self, record: Record) -> None:
        side, op, a, b = self._side, record.op, record.a, record.b
        if op is Op.MESSAGE:
            self._take(record)
        elif op is Op.RAISE:
            if a == side.at.PROGRESS:
                return  # noted as that of every message is
            if side.on_gpu and a == side.at.FINISHED:
                # No lane tells of such a step, and the next one's forward pass waits for its end.
                # It may be one to be prepared, for the lane too.
                if not self._queued.await_step(min(b, self._expected), side.is_over):
                    return
                self._finished.fill_(word_of(b))
            side.raise_to(a, b)
        elif op is Op.SLOTS:
            self._slots = side.slots_of(record)
        elif op is Op.KV:
            side.write_kv(record, self._slots)
        elif op is Op.SET:
            side.write_set(record)
        elif op is Op.WEIGHTS:
            side.log_weight[a, b] = record.view(torch.float32, *side.log_weight.shape[2:])
        else:
            raise ProtocolError(f"{op.name} came from the cache rank's host")

    def _take(self, record: Record) -> None:
        if self._lane.is_done:
            try:
                entry = self._steps.get_nowait()
            except Empty:
                raise ProtocolError("a message came, and no step was announced") from None
            self._lane.begin(entry, self._plan.back(entry))
        self._lane.take(record)


def read_again(row: StepRow, side: Side) -> torch.Tensor:
    """Return the positions ``[n]`` int64 of a request that are read here once it is taken up.

    The inference rank brings its own part of a set to what it was; the cache rank's part is sent.
    The next prompt step of a request that is not whole yet fetches what it needs.
    """
    length, program, selection = row.length, side.program, side.selection
    if not any(program.is_sparse_layer(layer) for layer in range(program.num_layers)):
        return torch.arange(0)
    if not row.flags & RESIDENT:
        is_dense = length <= DenseLengths.of(selection, selection.num_resident).num_cold
        return torch.arange(length if is_dense else 0)
    num_sink, first = selection.num_sink_tokens, max(0, length - selection.num_recent_tokens)
    is_read = torch.zeros(length, dtype=torch.bool)
    is_read[:num_sink] = is_read[first:] = True
    if selection.num_samples:
        candidates = torch.tensor(max(0, first - num_sink))
        offsets, _ = sample_offsets(candidates, selection.num_samples)
        is_read[offsets[offsets >= 0] + num_sink] = True
    return is_read.nonzero()[:, 0]


def _joined(slots: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(slots).long() if slots else torch.empty(0, dtype=torch.int64)
