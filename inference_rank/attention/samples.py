# SPDX-License-Identifier: Apache-2.0
"""Tokens that stand for what is not resident, as a decode step attends to them.

Which tokens these are follows from a request's length (`tandemkv.kernels.samples`), and their K/V
pass by here anyway, in the prompt and when they leave the ring: nothing has to be sent. How much
each of them counts the cache rank says with every selection.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tandemkv.cache_rank.protocol.engine import Allocate
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings
from tandemkv.kernels.append import SampleMoves
from tandemkv.kernels.samples import (
    attend_samples,
    begin_samples,
    load_sample_moves,
    load_sample_slots,
    make_sample_scratch,
    sample_offsets,
)
from tandemkv.kernels.streams import FORWARD_PRIORITY, shared_stream
from tandemkv.kernels.to_device import to_device

LOG2_UNIT = math.log(2.0)
"""FlashInfer's log-sum-exp is to the base of two."""
_MOST_LENGTHS = 256
"""Lengths of prompts whose samples are remembered; a prefill step has fewer prompts."""


def zeros_on(device: torch.device) -> Allocate:
    """Return what makes zeros in this process's own memory."""

    def allocate(_name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return allocate


class StepSamples:
    """What stands for the rest of each request, as the attention of a decode step needs it.

    K and V of samples are those of `pool`, SGLang's: nothing is copied. Who the requests of a step
    are is in buffers whose addresses never change. A step has up to `max_batch` requests, one less
    than there are rows. `allocate` makes the tensors. The cache rank writes ``log_weight [L,
    max_batch + 1, H, num_samples]`` float32, ``-inf`` until something is selected for a row.
    """

    def __init__(
        self, pool: Any, model: ModelSpec, selection: SelectionSettings, max_batch: int,
        allocate: Allocate,
    ) -> None:  # fmt: skip
        self._pool = pool
        self.num_samples = selection.num_samples
        self._num_sink, self._num_recent = selection.num_sink_tokens, selection.num_recent_tokens
        shape = (model.num_layers, max_batch + 1, model.num_kv_heads, self.num_samples)
        self.log_weight = allocate("sample_log_weight", shape, torch.float32).fill_(float("-inf"))
        device = self.log_weight.device
        self._slots = torch.zeros((max_batch, self.num_samples), dtype=torch.int32, device=device)
        self._rows = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self._is_sparse = torch.zeros(max_batch, dtype=torch.bool, device=device)
        self._scratch = make_sample_scratch(
            max_batch, model.num_qo_heads, self.num_samples, model.head_dim, device
        )  # fmt: skip
        self._beside = shared_stream(device, FORWARD_PRIORITY, number=2)

    @property
    def nbytes(self) -> int:
        """Bytes of samples and weights that are nobody else's."""
        return self.log_weight.nbytes

    def load(
        self, rows: torch.Tensor, lengths: torch.Tensor, req_to_token: torch.Tensor, num_dense: int
    ) -> None:
        """Take over the requests of a step; ``rows, lengths [B]`` on the device."""
        self._note(rows, lengths, num_dense)
        load_sample_slots(
            rows, lengths, req_to_token, self._slots, num_sink=self._num_sink,
            num_recent=self._num_recent,
        )  # fmt: skip

    def _note(self, rows: torch.Tensor, lengths: torch.Tensor, num_dense: int) -> None:
        self._rows[: len(rows)] = rows
        torch.gt(lengths, num_dense, out=self._is_sparse[: len(rows)])

    def leave_out(self, whole: torch.Tensor) -> None:
        """Let requests of the step that was loaded last have none; ``whole [B]`` bool."""
        self._is_sparse[: len(whole)] &= ~whole.to(self._is_sparse.device)

    def begin(self, layer: int, q: torch.Tensor, *, scale: float) -> None:
        """Attend to the samples beside what is queued until `attend`; ``q [B, Hq, D]``.

        Neither needs the other (decision record 36).
        """
        if self._beside is None:
            return
        self._beside.wait_stream(torch.cuda.current_stream(q.device))
        with torch.cuda.stream(self._beside):
            begin_samples(q, **self._of(layer, len(q)), scale=scale, scratch=self._scratch)

    def attend(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *, scale: float,
        lse_unit: float,
    ) -> None:  # fmt: skip
        """Merge what was begun into ``out [B, Hq, D]``; see `kernels.samples.attend_samples`."""
        if self._beside is not None:
            torch.cuda.current_stream(q.device).wait_stream(self._beside)
        attend_samples(
            q, **self._of(layer, len(q)), out=out, lse=lse, scale=scale, lse_unit=lse_unit,
            scratch=self._scratch, has_begun=True,
        )  # fmt: skip

    def _of(self, layer: int, size: int) -> dict[str, torch.Tensor]:
        k, v = self._pool.get_kv_buffer(layer)
        return {
            "k_pool": k, "v_pool": v, "slots": self._slots[:size], "rows": self._rows[:size],
            "log_weight": self.log_weight[layer], "active": self._is_sparse[:size],
        }  # fmt: skip


class OwnSamples(StepSamples):
    """Samples in tensors of their own, because the pool is another GPU's memory.

    They are ``k, v [num_layers, max_batch + 1, num_samples, H, D]``. `num_dense` is the longest
    request that any step attends to as a whole.
    """

    def __init__(
        self, model: ModelSpec, selection: SelectionSettings, max_batch: int, allocate: Allocate,
        *, num_dense: int,
    ) -> None:  # fmt: skip
        num_samples, dtype = selection.num_samples, getattr(torch, model.stored_dtype)
        heads = (model.num_kv_heads, model.head_dim)
        shape = (model.num_layers, max_batch + 1, num_samples, *heads)
        self.k = allocate("sample_k", shape, dtype)
        self.v = allocate("sample_v", shape, dtype)
        super().__init__(self, model, selection, max_batch, allocate)
        device = self.k.device
        index = torch.arange(num_samples, device=device)
        rows = torch.arange(max_batch + 1, device=device)[:, None]
        self._slots_of = rows * num_samples + index
        self._slots = self._slots_of[:1].repeat(max_batch, 1)
        self._sizes = {
            "num_samples": num_samples,
            "num_sink": selection.num_sink_tokens,
            "num_resident": selection.num_resident,
            "num_recent": selection.num_recent_tokens,
            "num_dense": num_dense,
        }
        self._moved = torch.full((max_batch,), -1, dtype=torch.int64, device=device)
        self._sources = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self._positions: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """See `StepSamples.nbytes`."""
        return self.k.nbytes + self.v.nbytes + self.log_weight.nbytes

    def get_kv_buffer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of every row's samples, ``[rows * num_samples, H, D]``."""
        return self.k[layer].flatten(0, 1), self.v[layer].flatten(0, 1)

    def load(
        self, rows: torch.Tensor, lengths: torch.Tensor, req_to_token: torch.Tensor, num_dense: int
    ) -> None:
        """See `StepSamples.load`; `req_to_token` is not needed."""
        del req_to_token
        self._note(rows, lengths, num_dense)
        size = len(rows)
        torch.index_select(self._slots_of, 0, self._rows[:size], out=self._slots[:size])
        load_sample_moves(lengths, self._moved, self._sources, **self._sizes)

    def moves(self, layer: int, size: int) -> SampleMoves:
        """Return which tokens become samples in `layer`, to be copied as one is appended."""
        return SampleMoves(
            k=self.k[layer], v=self.v[layer],
            samples=self._moved[:size], sources=self._sources[:size],
        )  # fmt: skip

    def fill(self, layer: int, row: int, slots: torch.Tensor, pool: Sequence[torch.Tensor]) -> None:
        """Take over the samples of a finished prompt, at `slots` ``[length]`` of K and V."""
        index, positions = self.positions(len(slots))
        chosen = slots[positions].long()
        for own, far in zip((self.k, self.v), pool, strict=True):
            own[layer, row][index] = far[chosen]

    def positions(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return samples and positions, ``[n]`` int64 on the device, of a request of `length`.

        Fewer than `num_samples` where there are fewer candidates. Every layer of a prompt asks for
        the same: they are found once, and brought to the device without waiting for it.
        """
        found = self._positions.get(length)
        if found is None:
            candidates = max(0, length - self._num_recent - self._num_sink)
            offsets, _ = sample_offsets(torch.tensor(candidates), self.num_samples)
            (index,) = (offsets >= 0).nonzero(as_tuple=True)
            positions = (offsets[index] + self._num_sink).tolist()
            found = to_device(index.tolist(), self.k.device), to_device(positions, self.k.device)
            if len(self._positions) >= _MOST_LENGTHS:
                self._positions.clear()
            self._positions[length] = found
        return found
