# SPDX-License-Identifier: Apache-2.0
"""Samples of the requests of a decode step, where the cache rank is in this process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from tandemkv.kernels.append import SampleMoves
from tandemkv.kernels.samples import attend_samples, load_sample_moves, load_sample_slots

from .sample_set import SampleSet

LOG2_UNIT = math.log(2.0)
"""FlashInfer's log-sum-exp is to the base of two."""


class StepSamples(Protocol):
    """What stands for the rest of each request, as the attention of a decode step needs it.

    Attributes
    ----------
    log_weight : torch.Tensor
        ``[L, rows, H, num_samples]`` float32; the cache rank writes it.
    """

    @property
    def log_weight(self) -> torch.Tensor:
        """See above."""

    @property
    def num_samples(self) -> int:
        """Samples of a request."""

    def load(
        self, rows: torch.Tensor, lengths: torch.Tensor, req_to_token: torch.Tensor, num_dense: int
    ) -> None:
        """Take over the requests of a step; ``rows, lengths [B]`` on the device."""

    def leave_out(self, whole: torch.Tensor) -> None:
        """Let requests of the step that was loaded last have none; ``whole [B]`` bool."""

    def attend(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *, scale: float,
        lse_unit: float,
    ) -> None:  # fmt: skip
        """Merge the samples into ``out [B, Hq, D]``; see `kernels.samples.attend_samples`."""


class _StepRows:
    """Who the requests of a step are, in buffers whose addresses never change.

    `rows` and `active`, ``[max_batch]`` int64 and bool: their rows, and whether they are sparse.
    """

    def __init__(self, max_batch: int, device: torch.device) -> None:
        self.rows = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self.active = torch.zeros(max_batch, dtype=torch.bool, device=device)

    def load(self, rows: torch.Tensor, lengths: torch.Tensor, num_dense: int) -> None:
        """Take over the requests of a step."""
        self.rows[: len(rows)] = rows
        torch.gt(lengths, num_dense, out=self.active[: len(rows)])

    def leave_out(self, whole: torch.Tensor) -> None:
        """See `StepSamples.leave_out`."""
        self.active[: len(whole)] &= ~whole.to(self.active.device)


class PoolSamples:
    """Samples where SGLang's pool has them: nothing is copied."""

    def __init__(
        self, pool: Any, log_weight: torch.Tensor, *, num_sink: int, num_recent: int,
        max_batch: int,
    ) -> None:  # fmt: skip
        self._pool, self.log_weight = pool, log_weight
        self._num_sink, self._num_recent = num_sink, num_recent
        shape = (max_batch, log_weight.shape[-1])
        self._slots = torch.zeros(shape, dtype=torch.int32, device=log_weight.device)
        self._step = _StepRows(max_batch, log_weight.device)

    @property
    def num_samples(self) -> int:
        """See `StepSamples`."""
        return self._slots.shape[1]

    def load(
        self, rows: torch.Tensor, lengths: torch.Tensor, req_to_token: torch.Tensor, num_dense: int
    ) -> None:
        """See `StepSamples.load`."""
        self._step.load(rows, lengths, num_dense)
        load_sample_slots(
            rows, lengths, req_to_token, self._slots, num_sink=self._num_sink,
            num_recent=self._num_recent,
        )  # fmt: skip

    def leave_out(self, whole: torch.Tensor) -> None:
        """See `StepSamples.leave_out`."""
        self._step.leave_out(whole)

    def attend(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *, scale: float,
        lse_unit: float,
    ) -> None:  # fmt: skip
        """See `StepSamples.attend`."""
        size, (k, v) = len(q), self._pool.get_kv_buffer(layer)
        attend_samples(
            q, k, v, self._slots[:size], self._step.rows[:size], self.log_weight[layer],
            self._step.active[:size], out, lse, scale=scale, lse_unit=lse_unit,
        )  # fmt: skip


class OwnSamples:
    """Samples in tensors of their own, because the pool is another GPU's memory."""

    def __init__(
        self, samples: SampleSet, *, num_sink: int, num_resident: int, num_recent: int,
        num_dense: int, max_batch: int,
    ) -> None:  # fmt: skip
        self._set, device = samples, samples.k.device
        self._sizes = {
            "num_samples": samples.num_samples,
            "num_sink": num_sink,
            "num_resident": num_resident,
            "num_recent": num_recent,
            "num_dense": num_dense,
        }
        self._step = _StepRows(max_batch, device)
        self._slots_of = samples.slots(torch.arange(samples.k.shape[1], device=device))
        self._slots = samples.slots(self._step.rows)
        self._moved = torch.full((max_batch,), -1, dtype=torch.int64, device=device)
        self._sources = torch.zeros(max_batch, dtype=torch.int64, device=device)

    @property
    def log_weight(self) -> torch.Tensor:
        """See `StepSamples`."""
        return self._set.log_weight

    @property
    def num_samples(self) -> int:
        """See `StepSamples`."""
        return self._set.num_samples

    def load(
        self, rows: torch.Tensor, lengths: torch.Tensor, req_to_token: torch.Tensor, num_dense: int
    ) -> None:
        """See `StepSamples.load`; `req_to_token` is not needed."""
        size = len(rows)
        self._step.load(rows, lengths, num_dense)
        torch.index_select(self._slots_of, 0, self._step.rows[:size], out=self._slots[:size])
        load_sample_moves(lengths, self._moved, self._sources, **self._sizes)

    def moves(self, layer: int, size: int) -> SampleMoves:
        """Return which tokens become samples in `layer`, to be copied as one is appended."""
        return self._set.moves(layer, self._moved[:size], self._sources[:size])

    def fill(self, layer: int, row: int, slots: torch.Tensor, pool: Sequence[torch.Tensor]) -> None:
        """Take over the samples of a finished prompt, at `slots` ``[length]`` of K and V."""
        index, positions = self._set.positions(len(slots))
        chosen = slots[positions].long()
        for own, far in zip((self._set.k, self._set.v), pool, strict=True):
            own[layer, row][index] = far[chosen]

    def leave_out(self, whole: torch.Tensor) -> None:
        """See `StepSamples.leave_out`."""
        self._step.leave_out(whole)

    def attend(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *, scale: float,
        lse_unit: float,
    ) -> None:  # fmt: skip
        """See `StepSamples.attend`."""
        size = len(q)
        self._set.attend(
            layer, q, self._slots[:size], self._step.rows[:size], self._step.active[:size], out,
            lse, scale=scale, lse_unit=lse_unit,
        )  # fmt: skip
