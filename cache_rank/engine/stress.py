# SPDX-License-Identifier: Apache-2.0
"""Queries that jump every step, so that the largest possible number of rows moves."""

from __future__ import annotations

import torch

from tandemkv.cache_rank.protocol.head_shard import HeadShard
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec

_NUM_PATTERNS = 64
_JUMP = 7919
"""Tokens; a prime, so that few steps come back to a place."""


class Stress:
    """Makes the queries of two consecutive steps have little in common.

    For benchmarks with dummy weights, whose queries say nothing about locality: every head then
    fetches as many rows as it may. A predicted query is turned to another place of the request, and
    layers take no kernel more than when they serve. Of a layer's own query the sign of half the
    channels is flipped, differently in each of 64 steps. Signs of a head do not depend on how heads
    are divided: `model` has those of `shard`.
    """

    def __init__(
        self, model: ModelSpec, device: torch.device, shard: HeadShard, *, max_batch: int
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (_NUM_PATTERNS, shard.whole(model.num_qo_heads), model.head_dim)
        signs = shard.of(torch.randint(0, 2, shape, generator=generator) * 2 - 1, 1)
        self._signs = signs.to(device=device, dtype=getattr(torch, model.dtype))
        self._now = self._signs[:1].clone()
        self._positions = torch.zeros(max_batch, dtype=torch.int64, device=device)

    def begin_step(self, step: torch.Tensor, positions: torch.Tensor) -> None:
        """Make what `step` ``[]`` has instead of `positions` ``[B]``, once for all layers."""
        index = torch.remainder(step, _NUM_PATTERNS).reshape(1).long()
        torch.index_select(self._signs, 0, index, out=self._now)
        self._positions[: len(positions)] = (positions + step * _JUMP) % (positions + 1)

    def positions(self, size: int) -> torch.Tensor:
        """Return the positions ``[size]`` that queries are predicted for."""
        return self._positions[:size]

    def flipped(self, query: torch.Tensor) -> torch.Tensor:
        """Return a layer's own `query` ``[B, Hq, D]`` with the signs of the step."""
        return query * self._now.to(query.dtype)
