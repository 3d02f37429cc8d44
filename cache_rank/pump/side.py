# SPDX-License-Identifier: Apache-2.0
"""What the pumps of both hosts know of the memory that they map with their rank."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tandemkv.cache_rank.protocol.engine_program import EngineProgram
from tandemkv.cache_rank.protocol.errors import ProtocolError
from tandemkv.cache_rank.protocol.head_shard import HeadShard
from tandemkv.cache_rank.protocol.memory.mapped_tensors import MappedTensors
from tandemkv.cache_rank.protocol.memory.shared_region import FlagIndex
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings
from tandemkv.cache_rank.protocol.step_flags import StepFlags
from tandemkv.cache_rank.protocol.step_ring import StepEntry

from .records import PIECE_BYTES, Op, Outbox, Record

_LONGEST_WAIT_S = 3600.0


class Side:
    """Memory, flags and program of one epoch on one host.

    `tensors` are those of `shared_region.specs_by_life`, resident sets apart from the pool. The two
    hosts exchange the KV heads of `shard`, and staging is of these alone.

    Attributes
    ----------
    selection : SelectionSettings
        As given.
    kv : torch.Tensor
        ``[layers, 2, slots, H, D]``.
    resident : tuple
        K and V ``[layers, rows, R, H, D]`` of resident sets, which lie apart from the pool.
    log_weight : torch.Tensor
        ``[layers, rows, H, num_samples]``.
    requests : tuple or None
        Rows and lengths ``[max_batch]`` int64 of a decode step, on a GPU; else the announcement has
        them.
    on_gpu : bool
        Whether all this is memory of a GPU.
    most_changes : int
        Rows of a resident set that one selection changes per KV head, at most.
    """

    def __init__(
        self,
        tensors: MappedTensors,
        program: EngineProgram,
        selection: SelectionSettings,
        is_over: Callable[[], bool],
        shard: HeadShard | None = None,
    ) -> None:
        self.shard = shard = shard or HeadShard()
        self.tensors, self.program, self.is_over = tensors, program, is_over
        self.selection = selection
        self.at, self.flags = FlagIndex(program.num_layers), StepFlags(tensors["flags"])
        self.table, self.kv = tensors["req_to_token"], shard.of(tensors["kv"], 3)
        width = selection.num_resident
        self.resident = tuple(
            shard.of(tensors[name], 3)[:, :, :width] for name in ("resident_k", "resident_v")
        )
        self.log_weight = shard.of(tensors["sample_log_weight"], 2)
        self.has_samples = selection.num_samples > 0
        self.on_gpu = tensors.homes.are_on_gpu
        self.requests = (tensors["step_rows"], tensors["step_lengths"]) if self.on_gpu else None
        self.most_changes = selection.fetch_cap_tokens
        self._num_slots = int(self.kv.shape[2])

    def wait(self, flag: int, step: int) -> bool:
        """Wait for a flag of `step`; False: the step was given up, or the epoch is over."""
        return self.flags.wait(
            flag, step, timeout_s=_LONGEST_WAIT_S,
            is_over=lambda: self.is_over() or self.flags.value(self.at.ABORTED) - step >= 0,
        )  # fmt: skip

    def wait_always(self, flag: int, step: int) -> bool:
        """Wait for a flag of `step`, also of one that was given up; False: the epoch is over."""
        return self.flags.wait(flag, step, timeout_s=_LONGEST_WAIT_S, is_over=self.is_over)

    def settle(self) -> None:
        """Let what this thread has written to a GPU's memory be seen by others.

        Lanes are not waited for: they wait themselves, and it may be for what is told next.
        """
        if self.on_gpu:
            torch.cuda.current_stream(self.kv.device).synchronize()

    def raise_to(self, flag: int, step: int) -> None:
        """Raise a flag of the hosts, once what came before it is written."""
        if flag != self.at.CONFIRMED:  # which tells of nothing that is written here
            self.settle()
        self.flags.raise_to(flag, step)

    def slots_of(self, record: Record) -> torch.Tensor:
        """Return ``[n]`` int64, the slots in a record; raises `ProtocolError` beyond the pool."""
        slots = record.view(torch.int32, -1).long()
        self.check_slots(slots)
        return slots.to(self.kv.device)

    def check_slots(self, slots: torch.Tensor) -> None:
        """Refuse slots beyond the pool, with `ProtocolError`; a GPU is not asked for them."""
        _check_range("slot", slots, self._num_slots)

    def check_entry(self, entry: StepEntry) -> None:
        """Refuse an announcement that tables and pool have no place for, with `ProtocolError`.

        Before its plan is made, which is as long as the step has tokens.
        """
        (num_rows, width), rows = self.table.shape, entry.rows
        num_tokens = sum(row.length - row.prefix_len for row in rows if row.row)
        is_sound = len(rows) <= num_rows and num_tokens <= self._num_slots
        if not is_sound or any(
            row.row >= num_rows or row.length > width or row.window > row.length - row.prefix_len
            for row in rows
        ):
            raise ProtocolError(f"the requests of step {entry.step} have no place here")

    def check_requests(
        self, rows: torch.Tensor, lengths: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Refuse requests ``[B]`` that tables and pool have no place for, as `check_slots`."""
        _check_range("row", rows, self.table.shape[0])
        _check_range("length", lengths, self.table.shape[1] + 1)
        self.check_slots(slots)

    def put_kv(self, out: Outbox, layer: int, slots: torch.Tensor) -> None:
        """Send K/V of `layer` at ``slots [n]``, which were sent as `Op.SLOTS`, in pieces."""
        per_slot = self.kv[layer, :, :1].nbytes
        width = max(1, PIECE_BYTES // per_slot)
        for first in range(0, len(slots), width):
            out.put(
                Op.KV, layer, first, self.kv[layer].index_select(1, slots[first : first + width])
            )

    def write_kv(self, record: Record, slots: torch.Tensor) -> None:
        """Store what `put_kv` has sent."""
        found = record.view(self.kv.dtype, 2, -1, *self.kv.shape[3:])
        self.kv[record.a][:, slots[record.b : record.b + found.shape[1]]] = found

    def put_set(self, out: Outbox, layer: int, row: int) -> None:
        """Send the resident set of `row` in `layer`, in pieces."""
        sets = [each[layer, row] for each in self.resident]
        num_resident = len(sets[0])
        width = max(1, PIECE_BYTES // max(1, 2 * sets[0][:1].nbytes))
        for first in range(0, num_resident, width):
            piece = torch.stack([each[first : first + width] for each in sets])
            out.put(Op.SET, layer, row * num_resident + first, piece)

    def write_set(self, record: Record) -> None:
        """Store what `put_set` has sent."""
        found = record.view(self.kv.dtype, 2, -1, *self.kv.shape[3:])
        row, first = divmod(record.b, self.resident[0].shape[2])
        for sets, piece in zip(self.resident, found, strict=True):
            sets[record.a, row, first : first + len(piece)] = piece


def _check_range(name: str, values: torch.Tensor, end: int) -> None:
    if values.is_cuda or not len(values):
        return
    if not 0 <= int(values.min()) <= int(values.max()) < end:
        raise ProtocolError(f"a {name} is not below {end}")
