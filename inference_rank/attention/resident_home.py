# SPDX-License-Identifier: Apache-2.0
"""Where resident sets lie: behind the tokens in SGLang's pool, or in tensors of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from tandemkv.cache_rank.protocol.errors import ContractError
from tandemkv.kernels.append import append_tokens
from tandemkv.kernels.slot_rules import latest_slots
from tandemkv.kernels.step_flags import StepWait

from .resident_attention import AttendTable, RingTable
from .resident_set import ResidentSet
from .samples import OwnSamples, StepSamples


class ResidentHome(Protocol):
    """Resident sets of all rows, as the attention of a decode step needs them."""

    @property
    def table(self) -> AttendTable:
        """Which slots a step attends to."""

    @property
    def pool(self) -> Any:
        """SGLang's pool interface on them: ``get_kv_buffer``, ``set_kv_buffer``."""

    @property
    def sets(self) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """Per layer K and V ``[rows, slots, H, D]``; the first R slots are the cache rank's."""

    @property
    def samples(self) -> StepSamples | None:
        """What stands for the rest, if the settings ask for it."""

    @property
    def nbytes(self) -> int:
        """Bytes of sets and samples that are nobody else's."""

    @property
    def holds_dense(self) -> bool:
        """Whether tokens of requests that need no selection are copied here too."""

    def fill(self, layer: int, row: int, slots: torch.Tensor) -> None:
        """Take over the tokens of a finished prompt, at `slots` ``[length]`` of the pool."""

    def await_in_write(self, awaited: StepWait) -> None:
        """Let what follows the next write of a step's tokens wait; see `append_tokens`."""

    def begin_step(self) -> None:
        """Forget what a step that failed has left to be waited for."""

    def end_step(self) -> None:
        """Raise `ContractError` if a write was left out that something waits in."""


class PoolTail:
    """Behind the tokens in SGLang's pool: nothing has to be copied for dense requests."""

    holds_dense = False

    def __init__(
        self,
        pool: Any,
        table: AttendTable,
        sets: Sequence[tuple[torch.Tensor, torch.Tensor]],
        samples: StepSamples | None = None,
    ) -> None:
        self.pool, self.table, self.sets = pool, table, sets
        self.samples: StepSamples | None = samples

    @property
    def nbytes(self) -> int:
        """See `ResidentHome`."""
        weights = 0 if self.samples is None else self.samples.log_weight.nbytes
        return sum(k.nbytes + v.nbytes for k, v in self.sets) + weights

    def fill(self, layer: int, row: int, slots: torch.Tensor) -> None:
        """Nothing to copy."""

    def await_in_write(self, awaited: StepWait) -> None:
        """See `ResidentHome.await_in_write`: SGLang writes, so here that is a launch of its own."""
        awaited.now()

    def begin_step(self) -> None:
        """Nothing is left."""

    def end_step(self) -> None:
        """Nothing is left."""


class OwnSet:
    """Tensors of their own, because the pool is another GPU's memory.

    Whatever decode attends to is copied here: the latest tokens in a ring, and requests that
    fit, as a whole. Slots are those of `ResidentSet`. It has SGLang's pool interface itself: reads
    are of the resident sets, writes go to pool and ring. With `keeps_sink` the first R tokens of
    every request are its resident ones, and no engine writes them.
    """

    holds_dense = True

    def __init__(
        self, pool: Any, table: RingTable, resident: ResidentSet, samples: OwnSamples | None = None,
        *, keeps_sink: bool = False,
    ) -> None:  # fmt: skip
        self._far, self._resident, self._samples = pool, resident, samples
        self._num_sink = resident.num_resident if keeps_sink else 0
        self.table: RingTable = table
        self.samples: StepSamples | None = samples
        self.sets = list(zip(resident.k, resident.v, strict=True))
        self._buffers = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in self.sets]
        self._awaited: StepWait | None = None

    @property
    def pool(self) -> OwnSet:
        """See `ResidentHome`."""
        return self

    @property
    def nbytes(self) -> int:
        """See `ResidentHome`."""
        return self._resident.nbytes

    def fill(self, layer: int, row: int, slots: torch.Tensor) -> None:
        """See `ResidentHome.fill`: a dense prompt, or sink and latest tokens of a sparse one."""
        resident, length = self._resident, len(slots)
        is_dense = resident.is_dense(length)
        start = 0 if is_dense else max(0, length - resident.ring)
        positions, stored = torch.arange(start, length, device=slots.device), slots[start:]
        is_whole = torch.full_like(positions, is_dense, dtype=torch.bool)
        num_sink = min(self._num_sink, start)
        if num_sink:  # by launches of each layer that other policies are spared
            sink = torch.arange(num_sink, device=slots.device)
            positions, stored = torch.cat((sink, positions)), torch.cat((slots[:num_sink], stored))
            is_whole = torch.cat((torch.ones_like(sink, dtype=torch.bool), is_whole))
        targets = latest_slots(
            positions, is_whole, num_resident=resident.num_resident, num_recent=resident.ring
        )
        index, far = stored.long(), self._far.get_kv_buffer(layer)
        for own, theirs in zip(self.sets[layer], far, strict=True):
            own[row][targets] = theirs[index]
        if self._samples is not None:
            self._samples.fill(layer, row, slots, far)

    def await_in_write(self, awaited: StepWait) -> None:
        """See `ResidentHome.await_in_write`."""
        self.end_step()
        self._awaited = awaited

    def begin_step(self) -> None:
        """See `ResidentHome.begin_step`."""
        self._awaited = None

    def end_step(self) -> None:
        """See `ResidentHome.end_step`."""
        if self._awaited is not None:
            raise ContractError("SGLang left out the write of a layer's tokens; report it")

    def get_kv_buffer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of every row's set, ``[rows * slots, H, D]``."""
        return self._buffers[layer]

    def set_kv_buffer(
        self, layer: Any, location: Any, k: torch.Tensor, v: torch.Tensor, *scales: Any
    ) -> None:
        """Write the newest token of each request."""
        self._far.set_kv_buffer(layer, location, k, v, *scales)
        size, index = len(k), layer.layer_id
        own_k, own_v = self.sets[index]
        shape = (size, *own_k.shape[-2:])
        awaited, self._awaited = self._awaited, None
        append_tokens(
            k.view(shape).to(own_k.dtype), v.view(shape).to(own_k.dtype),
            self.table.rows[:size], self.table.write_slots[:size], own_k, own_v,
            moves=None if self._samples is None else self._samples.moves(index, size),
            awaited=awaited,
        )  # fmt: skip
