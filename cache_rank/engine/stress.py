# SPDX-License-Identifier: Apache-2.0
"""Queries that jump every step, so that the largest possible number of rows moves."""

from __future__ import annotations

import torch

from tandemkv.cache_rank.protocol.head_shard import HeadShard
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec

_NUM_PATTERNS = 64


class StressSigns:
    """Flips the sign of half the channels, differently in each of 64 consecutive steps.

    For benchmarks with dummy weights, whose queries say nothing about locality: the selected
    sets of two steps have little in common, so every head fetches as many rows as it may. Signs of
    a head do not depend on how heads are divided: `model` has those of `shard`.
    """

    def __init__(self, model: ModelSpec, device: torch.device, shard: HeadShard) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (_NUM_PATTERNS, shard.whole(model.num_qo_heads), model.head_dim)
        signs = shard.of(torch.randint(0, 2, shape, generator=generator) * 2 - 1, 1)
        self._signs = signs.to(device=device, dtype=getattr(torch, model.dtype))

    def apply(self, query: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        """Return `query` ``[B, Hq, D]`` with the signs of `step` ``[]``."""
        index = torch.remainder(step, _NUM_PATTERNS).reshape(1).long()
        return query * self._signs.index_select(0, index).to(query.dtype)
