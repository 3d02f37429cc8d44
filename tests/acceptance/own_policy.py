# SPDX-License-Identifier: Apache-2.0
"""Policies as a user may write them, outside of the package: ``own_policy:NewestFirst``.

What is called is noted in `CALLS`, and a line for each in the file that ``OWN_POLICY_LOG`` names.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import Field

from tandemkv.cache_rank.policies.base import (
    Checkpoint,
    Owner,
    PolicyCapabilities,
    PolicyContext,
    PolicyOptions,
    ScoringPolicy,
    SeedInput,
    Selection,
    SelectionInput,
)
from tandemkv.cache_rank.protocol.messages import Timing

CALLS: Counter[str] = Counter()


def _note(name: str) -> None:
    CALLS[name] += 1
    if path := os.environ.get("OWN_POLICY_LOG"):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{name}\n")


class NewestOptions(PolicyOptions):
    """Which candidates count as the newest."""

    skip: int = Field(default=0, ge=0, le=64, description="Newest candidates that are left out.")


class NewestFirst(ScoringPolicy):
    """Begin with a prompt's first tokens, then take the newest candidates, whatever they score."""

    options_model: ClassVar[type[PolicyOptions]] = NewestOptions
    options: NewestOptions

    capabilities = PolicyCapabilities(timing=Timing.SAME_STEP_QUERY)

    def seed_scores(self, request: SeedInput) -> torch.Tensor:
        _note("seed_scores")
        scores = -torch.arange(request.hi, dtype=torch.float32, device=request.queries.device)
        scores[: request.lo] = float("-inf")
        return scores.expand(self.context.model.num_kv_heads, -1)

    def select(self, request: SelectionInput) -> Selection:
        _note("select")
        ranks = torch.arange(request.budget, device=request.hi.device)
        newest = request.hi[:, None] - 1 - self.options.skip - ranks
        newest = newest.where(newest >= request.lo[:, None], -1).int()
        heads = self.context.model.num_kv_heads
        return Selection(newest[:, None].expand(-1, heads, -1).contiguous())

    def release(self, owner: Owner) -> None:
        _note(f"release {owner}")


class WorstFirst(ScoringPolicy):
    """Rank by the least score."""

    capabilities = PolicyCapabilities(timing=Timing.SAME_STEP_QUERY)

    def pooled(self, scores: torch.Tensor) -> torch.Tensor:
        _note("pooled")
        return torch.where(scores.isneginf(), scores, -scores)


class IndexerOptions(PolicyOptions):
    """Where the weights are."""

    weights: str = Field(default="", description="Folder with them; default: the model's own.")


class LearnedIndexer(ScoringPolicy):
    """Rank by ``(A q) k``: a matrix A for each layer and query head, that a checkpoint brings.

    The query is the predicted one of ``look_ahead``; scores, pooling and fetch are the engine's.
    """

    options_model: ClassVar[type[PolicyOptions]] = IndexerOptions
    options: IndexerOptions

    capabilities = PolicyCapabilities(timing=Timing.SAME_STEP_HIDDEN, graph_safe=True)

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        model, folder = context.model, self.options.weights
        checkpoint = Checkpoint(Path(folder)) if folder else context.checkpoint
        assert checkpoint is not None, "the engine knows the model's folder"
        exact = context.selection.exact_layer_ids
        self._matrices = checkpoint.layers(
            "model.layers.{layer}.self_attn.indexer.weight",
            (layer for layer in range(model.num_layers) if layer not in exact),
            shape=(model.num_qo_heads, model.head_dim, model.head_dim),
            dtype=getattr(torch, model.dtype),
            device=context.device,
        )

    def query_for(self, request: SelectionInput) -> torch.Tensor:
        return self._turned(request.layer, request.query)

    def seed_scores(self, request: SeedInput) -> torch.Tensor:
        queries = self._turned(request.layer, request.queries)
        return self.pooled(request.score(queries, request.positions))

    def _turned(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        return torch.einsum("hij,shj->shi", self._matrices[layer], queries)
