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
    Owner,
    PolicyCapabilities,
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
        scores = -torch.arange(request.hi, dtype=torch.float32)
        scores[: request.lo] = float("-inf")
        return scores.expand(self.context.model.num_kv_heads, -1)

    def select(self, request: SelectionInput) -> Selection:
        _note("select")
        newest = request.hi[:, None] - 1 - self.options.skip - torch.arange(request.budget)
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
