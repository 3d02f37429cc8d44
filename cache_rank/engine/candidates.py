# SPDX-License-Identifier: Apache-2.0
"""The candidate positions of the requests that a selection is made for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tandemkv.cache_rank.policies.base import Owner, PageBounds, SelectionInput, StoredKV
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings
from tandemkv.kernels.score import score_keys
from tandemkv.kernels.to_device import to_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Positions ``[lo, hi)`` of S requests, as of the step that uses the selection."""

    owners: tuple[Owner, ...]
    """The requests; none where they are known on a GPU only."""
    rows: torch.Tensor
    """``[S]`` int64: their rows."""
    positions: torch.Tensor
    use_positions: torch.Tensor
    """``[S]`` int64: position of the step's query, and of the query that the selection is for."""
    lo: torch.Tensor
    hi: torch.Tensor
    """``[S]`` int64."""
    slots: torch.Tensor
    """``[S, width]`` int32, slots of the store by position; `width` is the largest `hi`."""
    pages: torch.Tensor | None = None
    """``[S, max_pages]`` int32, pages of `page_size` slots that hold them; `slots` by default."""
    page_size: int = 1

    def subset(self, places: Sequence[int]) -> Candidates:
        """Return those of the requests at `places`."""
        if len(places) == len(self.owners):
            return self
        index = to_device(places, self.lo.device)
        return replace(
            self,
            owners=tuple(self.owners[i] for i in places),
            rows=self.rows[index],
            positions=self.positions[index],
            use_positions=self.use_positions[index],
            lo=self.lo[index],
            hi=self.hi[index],
            slots=self.slots[index],
            pages=None if self.pages is None else self.pages[index],
        )

    def request(
        self,
        layer: int,
        query: torch.Tensor,
        keys: tuple[torch.Tensor, torch.Tensor | None],
        stored: tuple[torch.Tensor, torch.Tensor],
        *,
        model: ModelSpec,
        selection: SelectionSettings,
        heads: tuple[int, ...],
        bounds: PageBounds | None = None,
    ) -> SelectionInput:
        """Return what a policy is asked for them.

        `layer` and `query` are as in `SelectionInput`; query and scores are of the groups of
        `heads` alone. `keys` are what is scored, with scales.
        """
        return SelectionInput(
            layer=layer,
            owners=self.owners,
            rows=self.rows,
            query=query,
            positions=self.positions,
            use_positions=self.use_positions,
            score=CandidateScorer(
                candidates=self,
                keys=keys,
                model=model,
                pooling=selection.pooling,
                heads=heads,
            ),
            budget=selection.budget_tokens,
            lo=self.lo,
            hi=self.hi,
            stored=StoredKV(*stored, self.slots),
            pages=bounds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateScorer:
    """Scores candidates of one layer, of all KV heads or of `heads` alone; a `Scorer`.

    `keys` are keys and scales, as `tandemkv.kernels.score.score_keys` takes them.
    """

    candidates: Candidates
    keys: tuple[torch.Tensor, torch.Tensor | None]
    model: ModelSpec
    pooling: str
    heads: tuple[int, ...]

    def __call__(self, query: torch.Tensor) -> torch.Tensor:
        """Return ``[S, len(heads), width]`` float32 for ``[S, len(heads) * group, D]``."""
        keys, k_scale = self.keys
        if len(self.heads) == self.model.num_kv_heads:
            return self._score(query, keys, k_scale)
        group = self.model.gqa_group_size
        parts = []
        for i, head in enumerate(self.heads):  # views of the pool: a list of heads would copy it
            scale = None if k_scale is None else k_scale[:, head : head + 1]
            own = query[:, i * group : (i + 1) * group]
            parts.append(self._score(own, keys[:, head : head + 1], scale))
        return torch.cat(parts, dim=1)

    def _score(
        self, query: torch.Tensor, keys: torch.Tensor, k_scale: torch.Tensor | None
    ) -> torch.Tensor:
        candidates = self.candidates
        return score_keys(
            query,
            keys,
            candidates.slots if candidates.pages is None else candidates.pages,
            candidates.lo,
            candidates.hi,
            width=candidates.slots.shape[1],
            scale=self.model.scale,
            pooling=self.pooling,
            k_scale=k_scale,
            page_size=candidates.page_size,
        )
