# SPDX-License-Identifier: Apache-2.0
"""Samples of the requests of a decode step, where the cache rank is in this process."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from tandemkv.kernels.append import SampleMoves
from tandemkv.kernels.samples import (
    attend_samples,
    load_sample_moves,
    load_sample_slots,
    make_sample_scratch,
)

from .sample_set import SampleSet

LOG2_UNIT = math.log(2.0)
"""FlashInfer's log-sum-exp is to the base of two."""


class StepSamples(ABC):
    """What stands for the rest of each request, as the attention of a decode step needs it.

    Who the requests of a step are is in buffers whose addresses never change.

    Attributes
    ----------
    log_weight : torch.Tensor
        ``[L, rows, H, num_samples]`` float32; the cache rank writes it.
    num_samples : int
        Samples of a request.

    Parameters
    ----------
    slots : torch.Tensor
        ``[max_batch, num_samples]`` integers: where the samples of a step's requests are.
    query : tuple of int
        Heads and dimension of a request's query, ``(Hq, D)``.
    """

    def __init__(
        self, log_weight: torch.Tensor, slots: torch.Tensor, query: tuple[int, int]
    ) -> None:
        self.log_weight, self.num_samples, self._slots = log_weight, slots.shape[1], slots
        self._rows = torch.zeros(len(slots), dtype=torch.int64, device=slots.device)
        self._is_sparse = torch.zeros(len(slots), dtype=torch.bool, device=slots.device)
        self._scratch = make_sample_scratch(
            len(slots), query[0], log_weight.shape[2], self.num_samples, query[1], slots.device
        )

    @abstractmethod
    def _stored(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V ``[n, H, D]`` that the slots count in."""

    def load(
        self, rows: torch.Tensor, lengths: torch.Tensor, req_to_token: torch.Tensor, num_dense: int
    ) -> None:
        """Take over the requests of a step; ``rows, lengths [B]`` on the device."""
        del req_to_token
        self._rows[: len(rows)] = rows
        torch.gt(lengths, num_dense, out=self._is_sparse[: len(rows)])

    def leave_out(self, whole: torch.Tensor) -> None:
        """Let requests of the step that was loaded last have none; ``whole [B]`` bool."""
        self._is_sparse[: len(whole)] &= ~whole.to(self._is_sparse.device)

    def attend(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *, scale: float,
        lse_unit: float,
    ) -> None:  # fmt: skip
        """Merge the samples into ``out [B, Hq, D]``; see `kernels.samples.attend_samples`."""
        size, (k, v) = len(q), self._stored(layer)
        attend_samples(
            q, k, v, self._slots[:size], self._rows[:size], self.log_weight[layer],
            self._is_sparse[:size], out, lse, scale=scale, lse_unit=lse_unit, scratch=self._scratch,
        )  # fmt: skip


class PoolSamples(StepSamples):
    """Samples where SGLang's pool has them: nothing is copied."""

    def __init__(
        self, pool: Any, log_weight: torch.Tensor, *, num_sink: int, num_recent: int,
        max_batch: int, query: tuple[int, int],
    ) -> None:  # fmt: skip
        shape = (max_batch, log_weight.shape[-1])
        slots = torch.zeros(shape, dtype=torch.int32, device=log_weight.device)
        super().__init__(log_weight, slots, query)
        self._pool, self._num_sink, self._num_recent = pool, num_sink, num_recent

    def _stored(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self._pool.get_kv_buffer(layer)
        return k, v

    def load(
        self, rows: torch.Tensor, lengths: torch.Tensor, req_to_token: torch.Tensor, num_dense: int
    ) -> None:
        """See `StepSamples.load`."""
        super().load(rows, lengths, req_to_token, num_dense)
        load_sample_slots(
            rows, lengths, req_to_token, self._slots, num_sink=self._num_sink,
            num_recent=self._num_recent,
        )  # fmt: skip


class OwnSamples(StepSamples):
    """Samples in tensors of their own, because the pool is another GPU's memory."""

    def __init__(
        self, samples: SampleSet, *, num_sink: int, num_resident: int, num_recent: int,
        num_dense: int, max_batch: int, query: tuple[int, int],
    ) -> None:  # fmt: skip
        self._set, device = samples, samples.k.device
        self._slots_of = samples.slots(torch.arange(samples.k.shape[1], device=device))
        super().__init__(samples.log_weight, self._slots_of[:1].repeat(max_batch, 1), query)
        self._sizes = {
            "num_samples": samples.num_samples,
            "num_sink": num_sink,
            "num_resident": num_resident,
            "num_recent": num_recent,
            "num_dense": num_dense,
        }
        self._moved = torch.full((max_batch,), -1, dtype=torch.int64, device=device)
        self._sources = torch.zeros(max_batch, dtype=torch.int64, device=device)

    def _stored(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._set.k[layer].flatten(0, 1), self._set.v[layer].flatten(0, 1)

    def load(
        self, rows: torch.Tensor, lengths: torch.Tensor, req_to_token: torch.Tensor, num_dense: int
    ) -> None:
        """See `StepSamples.load`; `req_to_token` is not needed."""
        super().load(rows, lengths, req_to_token, num_dense)
        size = len(rows)
        torch.index_select(self._slots_of, 0, self._rows[:size], out=self._slots[:size])
        load_sample_moves(lengths, self._moved, self._sources, **self._sizes)

    def moves(self, layer: int, size: int) -> SampleMoves:
        """Return which tokens become samples in `layer`, to be copied as one is appended."""
        return SampleMoves(
            k=self._set.k[layer], v=self._set.v[layer],
            samples=self._moved[:size], sources=self._sources[:size],
        )  # fmt: skip

    def fill(self, layer: int, row: int, slots: torch.Tensor, pool: Sequence[torch.Tensor]) -> None:
        """Take over the samples of a finished prompt, at `slots` ``[length]`` of K and V."""
        index, positions = self._set.positions(len(slots))
        chosen = slots[positions].long()
        for own, far in zip((self._set.k, self._set.v), pool, strict=True):
            own[layer, row][index] = far[chosen]
