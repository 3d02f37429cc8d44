# SPDX-License-Identifier: Apache-2.0
"""The inference rank's own copies of the tokens that stand for what is not resident.

Which tokens these are follows from a request's length (`tandemkv.kernels.samples`), and their K/V
pass by here anyway, in the prompt and when they leave the ring: nothing has to be sent. How much
each of them counts the cache rank says with every selection.
"""

from __future__ import annotations

import torch

from tandemkv.cache_rank.protocol.engine import Allocate
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings
from tandemkv.kernels.samples import sample_offsets
from tandemkv.kernels.to_device import to_device

_MOST_LENGTHS = 256
"""Lengths of prompts whose samples are remembered; a prefill step has fewer prompts."""


def zeros_on(device: torch.device) -> Allocate:
    """Return what makes zeros in this process's own memory."""

    def allocate(_name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return allocate


def make_log_weights(
    model: ModelSpec, selection: SelectionSettings, max_rows: int, allocate: Allocate
) -> torch.Tensor:
    """Return weights of samples that do not count: ``[L, max_rows + 1, H, num_samples]``."""
    shape = (model.num_layers, max_rows + 1, model.num_kv_heads, selection.num_samples)
    return allocate("sample_log_weight", shape, torch.float32).fill_(float("-inf"))


class SampleSet:
    """Samples of all rows.

    Attributes
    ----------
    k, v : torch.Tensor
        ``[num_layers, max_rows + 1, num_samples, num_kv_heads, head_dim]``.
    log_weight : torch.Tensor
        ``[num_layers, max_rows + 1, num_kv_heads, num_samples]`` float32, ``-inf`` until something
        is selected for a row.
    """

    def __init__(
        self, model: ModelSpec, selection: SelectionSettings, max_rows: int, allocate: Allocate
    ) -> None:
        self.num_samples = selection.num_samples
        self._num_sink, self._num_recent = selection.num_sink_tokens, selection.num_recent_tokens
        shape = (
            model.num_layers,
            max_rows + 1,
            self.num_samples,
            model.num_kv_heads,
            model.head_dim,
        )
        dtype = getattr(torch, model.stored_dtype)
        self.k = allocate("sample_k", shape, dtype)
        self.v = allocate("sample_v", shape, dtype)
        self.log_weight = make_log_weights(model, selection, max_rows, allocate)
        self._positions: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all three."""
        return self.k.nbytes + self.v.nbytes + self.log_weight.nbytes

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

    def slots(self, rows: torch.Tensor) -> torch.Tensor:
        """Return where the samples of `rows` ``[B]`` are: ``[B, num_samples]`` int64."""
        index = torch.arange(self.num_samples, device=rows.device)
        return rows.long()[:, None] * self.num_samples + index
