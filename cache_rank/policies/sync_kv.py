# SPDX-License-Identifier: Apache-2.0
"""SyncKV: representative heads look at everything now and then, the others follow them."""

from __future__ import annotations

from fractions import Fraction
from functools import cached_property
from typing import ClassVar

import torch
from pydantic import Field

from tandemkv.cache_rank.protocol.engine import Allocate
from tandemkv.cache_rank.protocol.messages import PolicyTraits, RefreshRule, Timing
from tandemkv.cache_rank.protocol.settings.declared import DeclaredPolicy
from tandemkv.kernels.topk import topk_positions

from .base import (
    HeadClusters,
    Owner,
    Policy,
    PolicyCapabilities,
    PolicyContext,
    PolicyError,
    PolicyOptions,
    SeedInput,
    Selection,
    SelectionInput,
)


class SyncKVOptions(PolicyOptions):
    """How often it anticipates, and how K is divided."""

    stride: int = Field(
        default=5, ge=1, le=65536, description="m: steps from one anticipation to the next."
    )
    static: float = Field(
        default=0.5, ge=0.0, le=1.0, description="rho: the part of K that is kept for good."
    )
    union: bool = Field(
        default=False, description="Every head takes the sets of all clusters in turn."
    )

    def declare(self, capabilities: PolicyCapabilities) -> DeclaredPolicy:
        """See `PolicyOptions.declare`: the inference rank counts the steps."""
        return capabilities.declare(refresh_interval=self.stride)


class SyncKVPolicy(Policy):
    """Every ``stride`` steps, let the representative heads choose for their clusters.

    In an anticipation step the request attends to everything, and the queries of the
    representative heads select. In the suspension steps in between nothing is sent but the new K/V,
    and every head attends to the static and the dynamic set of its cluster.

    K is split (Eq. 4): ``static`` of it is chosen once, from the last prompt query of the
    representative head (Eq. 3), and stays; the rest is chosen anew in each anticipation (Eq. 6).

    Notes
    -----
    Where K/V lie: the paper moves those of non-representative heads to pinned host memory. Here all
    K/V are in the pool, in SGLang's process or on the cache rank's GPU, and only the selected rows,
    of every head, in the resident set.

    Deviations from the paper, each an option or stated:

    - The paper says both that representative heads attend fully in every step (Algorithm 1, line
      22) and that in suspension all heads use the sparse cache (Figure 3); here the latter.
    - The text lets a head use its cluster's set, line 23 of Algorithm 1 the union of all; default
      is the text. With ``union`` each cluster contributes K / N_r positions to one set.
    - In an anticipation step all heads attend to everything, not the representative ones alone: a
      slow request is one list of slots. Selections are made as above.
    - The dynamic set leaves out what is static, so that both make K; sink and recent tokens,
      which are attended to anyway, are no candidates.
    - Layers 0 and 1 are dense by default (``exact_layers``).
    - The first sparse step of a request is an anticipation, whatever the stride. If the request
      became sparse while decoding, its static set is chosen there. One of fewer candidates than it
      has places is chosen anew in the next.
    - Scores of a group are the mean of the softmaxes of its query heads (``pooling``). With
      ``pool_before``, which the paper does not have, these are pooled over positions.
    - What is selected enters a resident set that holds ``resident_factor`` selections (LRU); the
      static part is in every selection, so it is never evicted. 1 is the paper's.

    References
    ----------
    *SyncKV: A Syncopated Scheduling Approach to KV Cache Compression for Efficient Long-Context
    LLM Inference*, section 4 and Algorithm 1; clusters: `tandemkv.cache_rank.calibration`.
    """

    capabilities: ClassVar[PolicyCapabilities] = PolicyCapabilities(
        timing=Timing.EXACT_STEP, refresh=RefreshRule.PERIOD, calibration="sync_kv"
    )
    options_model: ClassVar[type[PolicyOptions]] = SyncKVOptions
    options: SyncKVOptions
    pools_positions: ClassVar[bool] = True

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        if context.clusters is None:
            raise PolicyError(
                "policy=sync_kv needs head clusters: give --calibration FILE, made by "
                "`tandemkv calibrate MODEL --policy sync_kv --out FILE`"
            )
        self._clusters: HeadClusters = context.clusters

    def make_rows(self, allocate: Allocate, num_rows: int) -> None:
        """See `Policy.make_rows`: the static sets."""
        layers, heads = self.context.model.num_layers, self.context.model.num_kv_heads
        shape = (layers, num_rows, heads, self.context.selection.budget_tokens)
        self._static = allocate("sync_static_positions", shape, torch.int32)
        # How many of the places that follow are set, and one more; 0: none yet.
        self._num_static = allocate("sync_static_counts", shape[:2], torch.int32)

    @property
    def traits(self) -> PolicyTraits:
        """See `Policy.traits`: only representative heads are slow."""
        return PolicyTraits(slow_heads=self._slow_heads)

    @cached_property
    def _slow_heads(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sorted(set(heads))) for heads in self._clusters.representatives)

    def select(self, request: SelectionInput) -> Selection:
        """See `Policy.select`; `request` is about the representative heads alone."""
        scores = self.pooled(request.score(request.query))  # [S, N_r, width]
        num_static, num_dynamic = self._split(request.budget, scores.shape[1])
        chosen = []
        numbers = (request.hi - request.lo).tolist()
        for owner, own, number in zip(request.owners, scores, numbers, strict=True):
            static = self._static_of(owner, request.layer)
            if static is None:
                static = topk_positions(own.unsqueeze(0), num_static)[0]
                self._keep_static(owner, request.layer, static, number)
            rest = _without(own, static)
            dynamic = topk_positions(rest.unsqueeze(0), num_dynamic)[0]
            chosen.append(self._spread(request, torch.cat([static, dynamic], dim=-1)))
        return Selection(torch.stack(chosen))

    def seed_scores(self, request: SeedInput) -> torch.Tensor:
        """See `Policy.seed_scores`: by the representative head's last prompt query (Eq. 3)."""
        own = request.score(request.queries[-1:], request.positions[-1:])
        scores = self.pooled(own)  # [H, width]
        slow = self._slow_heads[request.layer]
        looking = scores[list(slow)]
        num_static, _ = self._split(request.budget, len(slow))
        static = topk_positions(looking.unsqueeze(0), num_static)[0]
        self._keep_static(request.owner, request.layer, static, request.hi - request.lo)
        if self.options.union:
            return looking.amax(dim=0).expand_as(scores)
        return looking[self._leaders(request.layer)]

    def release(self, owner: Owner) -> None:
        """See `Policy.release`."""
        self._num_static[:, owner[0]] = 0

    def _static_of(self, owner: Owner, layer: int) -> torch.Tensor | None:
        """Return the static set ``[N_r, k]`` of a request, None if it has none yet."""
        row = owner[0]
        count = int(self._num_static[layer, row])
        if not count:
            return None
        return self._static[layer, row, : len(self._slow_heads[layer]), : count - 1].clone()

    def _keep_static(
        self, owner: Owner, layer: int, static: torch.Tensor, num_candidates: int
    ) -> None:
        """Let ``static [N_r, k]`` stay, unless there were too few candidates to fill it."""
        row, (heads, count) = owner[0], static.shape
        if count <= num_candidates:
            self._static[layer, row, :heads, :count] = static
            self._num_static[layer, row] = count + 1

    def _split(self, budget: int, num_clusters: int) -> tuple[int, int]:
        """Return the numbers of static and dynamic positions of one cluster."""
        if self.options.union:
            budget //= num_clusters
        # Of the decimal that was given: in floats (1 - 0.8) * 5 is less than 1.
        num_dynamic = int((1 - Fraction(str(self.options.static))) * budget)
        return budget - num_dynamic, num_dynamic

    def _leaders(self, layer: int) -> list[int]:
        """Return for each head the index of its representative among the slow heads."""
        slow, representatives = self._slow_heads[layer], self._clusters.representatives[layer]
        return [slow.index(representatives[cluster]) for cluster in self._clusters.clusters[layer]]

    def _spread(self, request: SelectionInput, sets: torch.Tensor) -> torch.Tensor:
        """Give every head ``[H, budget]`` its cluster's set, or all, of `sets` ``[N_r, k]``."""
        if not self.options.union:
            return sets[self._leaders(request.layer)]
        heads = self.context.model.num_kv_heads
        merged = dict.fromkeys(p for rank in sets.t().tolist() for p in rank if p >= 0)
        union = torch.full((request.budget,), -1, dtype=torch.int32, device=sets.device)
        union[: len(merged)] = torch.tensor(list(merged), dtype=torch.int32, device=sets.device)
        return union.expand(heads, -1).contiguous()


def _without(scores: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return `scores` ``[H, n]`` with ``-inf`` at `positions` ``[H, k]``; ``-1`` is none."""
    padded = torch.cat([scores, scores.new_zeros((len(scores), 1))], dim=-1)
    index = torch.where(positions < 0, scores.shape[-1], positions).long()
    return padded.scatter(-1, index, float("-inf"))[:, :-1]
