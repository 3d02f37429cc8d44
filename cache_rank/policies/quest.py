# SPDX-License-Identifier: Apache-2.0
"""Quest: pages of keys, ranked by an upper bound of their logits."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from tandemkv.cache_rank.protocol.messages import Timing
from tandemkv.kernels.score import pool_heads

from .base import PageBounds, Policy, PolicyCapabilities, PolicyOptions, Selection, SelectionInput


class QuestOptions(PolicyOptions):
    """The size of a page."""

    page_tokens: int = Field(
        default=16, ge=1, le=1024, description="Tokens of a page, which is taken whole."
    )


class QuestPolicy(Policy):
    """Take the pages whose best possible logit is highest.

    Per page of 16 tokens and KV head the smallest and largest value of each key component are
    kept. ``sum_d max(q_d low_d, q_d high_d)`` bounds the logit of every key in the page. The
    pages with the highest bounds are taken, with all their tokens, until the budget is filled.

    Notes
    -----
    Pages are counted in positions, and bounds are kept by row and position: slots may be shared or
    rewritten. A page is entered when its first token becomes a candidate, and widened as more do;
    what is already there is not read again
    (`tandemkv.cache_rank.engine.page_index.PageBoundsIndex`). A cache rank in a process of its
    own, which the host drives, makes the bounds anew in each step.

    Deviations from the paper:

    - A KV head has one choice of pages: bounds are pooled over the group's query heads as logits
      are elsewhere (``pooling``; of the softmax over pages, by default). The paper's models have
      one query head per KV head.
    - Sink and recent tokens are attended to anyhow and belong to no page.
    - The last page that enters the budget is cut, where it does not fit as a whole.
    - What is chosen enters a resident set (LRU) that holds more than one choice.
    - The paper leaves the first two layers dense: ``exact_layers``, whose default these are.

    References
    ----------
    Tang et al., *Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference*,
    arXiv:2406.10774.
    """

    capabilities: ClassVar[PolicyCapabilities] = PolicyCapabilities(
        timing=Timing.SAME_STEP_QUERY, index="page_bounds", per_head=True
    )
    options_model: ClassVar[type[PolicyOptions]] = QuestOptions
    options: QuestOptions

    @property
    def page_tokens(self) -> int:
        """See `Policy.page_tokens`."""
        return self.options.page_tokens

    def select(self, request: SelectionInput) -> Selection:
        """See `Policy.select`."""
        assert request.pages is not None  # as declared
        heads = self.context.model.num_kv_heads
        shape = (len(request.rows), heads, request.budget)
        chosen = torch.full(shape, -1, dtype=torch.int32, device=request.query.device)
        ranges = zip(request.lo.tolist(), request.hi.tolist(), strict=True)
        for i, (lo, hi) in enumerate(ranges):
            if lo < hi:
                scores = self._bounds(request.query[i], request.pages, i, lo, hi)
                tokens = self._tokens(scores, lo, hi, request)
                chosen[i, :, : tokens.shape[1]] = tokens
        return Selection(chosen)

    def _bounds(
        self, query: torch.Tensor, pages: PageBounds, i: int, lo: int, hi: int
    ) -> torch.Tensor:
        """Return the pooled bounds ``[H, num_pages]`` of the pages that hold ``[lo, hi)``."""
        model = self.context.model
        used = slice(lo // pages.page_tokens, -(-hi // pages.page_tokens))
        grouped = query.float().view(model.num_kv_heads, model.gqa_group_size, model.head_dim)
        low, high = (x[i, used].float().permute(1, 2, 0) for x in (pages.low, pages.high))
        bounds = grouped.clamp(min=0) @ high
        bounds += grouped.clamp(max=0) @ low
        bounds *= model.scale  # [H, G, num_pages]
        return pool_heads(bounds, self.context.selection.pooling)

    def _tokens(
        self, scores: torch.Tensor, lo: int, hi: int, request: SelectionInput
    ) -> torch.Tensor:
        """Return positions ``[H, min(budget, hi - lo)]`` int32 of the best pages, best first."""
        assert request.pages is not None
        budget, size = request.budget, request.pages.page_tokens
        first = lo // size
        # Two more than a whole budget needs: the first and the last page may be incomplete.
        count = min(scores.shape[1], -(-budget // size) + 2)
        best = scores.topk(count, dim=-1).indices + first
        inside = torch.arange(size, device=scores.device)
        positions = (best[..., None] * size + inside).flatten(1)  # [H, count * size]
        is_candidate = (positions >= lo) & (positions < hi)
        # A stable sort brings the candidates to the front and keeps their order.
        order = is_candidate.int().sort(dim=-1, descending=True, stable=True).indices
        return positions.gather(1, order)[:, : min(budget, hi - lo)].int()
