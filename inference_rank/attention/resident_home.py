# SPDX-License-Identifier: Apache-2.0
"""Where resident sets lie: behind the tokens in SGLang's pool, or in tensors of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tandemkv.cache_rank.protocol.engine import Allocate
from tandemkv.cache_rank.protocol.errors import ContractError
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings
from tandemkv.kernels.append import append_tokens
from tandemkv.kernels.slot_rules import latest_slots
from tandemkv.kernels.step_flags import StepWait

from .resident_attention import AttendTable, RingTable
from .samples import OwnSamples, StepSamples


class ResidentHome:
    """Resident sets of all rows, as the attention of a decode step needs them.

    These lie behind the tokens in SGLang's pool: nothing has to be copied for dense requests.

    `pool` has SGLang's interface on them: ``get_kv_buffer``, ``set_kv_buffer``. `table` is which
    slots a step attends to. `sets` are K and V of each layer, ``[rows, slots, H, D]``; the first R
    slots are the cache rank's. `samples` stand for the rest, if the settings ask for it.
    """

    holds_dense = False
    """Whether tokens of requests that need no selection are copied here too."""

    def __init__(
        self,
        pool: Any,
        table: AttendTable,
        sets: Sequence[tuple[torch.Tensor, torch.Tensor]],
        samples: StepSamples | None = None,
    ) -> None:
        self.pool, self.table, self.sets, self.samples = pool, table, sets, samples

    @property
    def nbytes(self) -> int:
        """Bytes of sets and samples that are nobody else's."""
        samples = 0 if self.samples is None else self.samples.nbytes
        return sum(k.nbytes + v.nbytes for k, v in self.sets) + samples

    def fill(self, layer: int, row: int, slots: torch.Tensor) -> None:
        """Take over the tokens of a finished prompt, at `slots` ``[length]`` of the pool."""

    def await_in_write(self, awaited: StepWait) -> None:
        """Let what follows the next write of a step's tokens wait; see `append_tokens`.

        Here SGLang writes, so that is a launch of its own.
        """
        awaited.now()

    def begin_step(self) -> None:
        """Forget what a step that failed has left to be waited for."""

    def end_step(self) -> None:
        """Raise `ContractError` if a write was left out that something waits in."""


class OwnSet(ResidentHome):
    """Tensors of their own, because the pool is another GPU's memory.

    Whatever decode attends to is copied here. Per layer and row there are ``R`` resident slots and
    a ring of ``num_recent_tokens``. While a request has at most ``R + ring`` tokens it is *dense*:
    token i sits in slot i, later ones in ring slot ``R + (i - R) mod ring``. Beyond that it is
    *sparse*: the ring holds the latest tokens, and the cache rank decides which token each KV head
    keeps in each resident slot. Keys carry RoPE already, so the order of slots is irrelevant to
    attention. With `keeps_sink` the first R tokens of every request are its resident ones, and no
    engine writes them.

    It has SGLang's pool interface itself: reads are of the resident sets, writes go to pool and
    ring. `allocate` makes its tensors, ``resident_*`` and ``sample_*``, of ``max_batch + 1`` rows
    of the table; row 0 is padding.
    """

    holds_dense = True

    def __init__(
        self, pool: Any, table: RingTable, model: ModelSpec, selection: SelectionSettings,
        allocate: Allocate, *, keeps_sink: bool = False,
    ) -> None:  # fmt: skip
        self._far, self._table = pool, table
        self._awaited: StepWait | None = None
        self._num_resident, self._ring = selection.num_resident, selection.num_recent_tokens
        self._dense_while_fits = selection.keeps_dense_while_fits
        self._num_sink = self._num_resident if keeps_sink else 0
        max_batch, num_slots = len(table.slots), self._num_resident + self._ring
        shape = (model.num_layers, max_batch + 1, num_slots, model.num_kv_heads, model.head_dim)
        dtype = getattr(torch, model.stored_dtype)
        # Zeros, not empty: masked slots still enter the weighted sum, as 0 * value.
        k = allocate("resident_k", shape, dtype)
        v = allocate("resident_v", shape, dtype)
        self._samples: OwnSamples | None = None
        if selection.num_samples:
            self._samples = OwnSamples(
                model, selection, max_batch, allocate, num_dense=table.num_dense
            )
        super().__init__(self, table, list(zip(k, v, strict=True)), self._samples)
        self._buffers = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in self.sets]

    def is_dense(self, length: int) -> bool:
        """Whether a request of `length` tokens is wholly resident without any selection."""
        return self._dense_while_fits and length <= self._num_resident + self._ring

    def fill(self, layer: int, row: int, slots: torch.Tensor) -> None:
        """See `ResidentHome.fill`: a dense prompt, or sink and latest tokens of a sparse one."""
        length = len(slots)
        is_dense = self.is_dense(length)
        start = 0 if is_dense else max(0, length - self._ring)
        positions, stored = torch.arange(start, length, device=slots.device), slots[start:]
        is_whole = torch.full_like(positions, is_dense, dtype=torch.bool)
        num_sink = min(self._num_sink, start)
        if num_sink:  # by launches of each layer that other policies are spared
            sink = torch.arange(num_sink, device=slots.device)
            positions, stored = torch.cat((sink, positions)), torch.cat((slots[:num_sink], stored))
            is_whole = torch.cat((torch.ones_like(sink, dtype=torch.bool), is_whole))
        targets = latest_slots(
            positions, is_whole, num_resident=self._num_resident, num_recent=self._ring
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
            self._table.rows[:size], self._table.write_slots[:size], own_k, own_v,
            moves=None if self._samples is None else self._samples.moves(index, size),
            awaited=awaited,
        )  # fmt: skip
