# SPDX-License-Identifier: Apache-2.0
"""Quest: pages of keys, ranked by an upper bound of their logits."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from tandemkv.cache_rank.protocol.messages import Timing
from tandemkv.kernels.page_bounds import score_pages
from tandemkv.kernels.topk import topk_positions

from .base import Policy, PolicyCapabilities, PolicyOptions, Selection, SelectionInput


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
    (`tandemkv.cache_rank.engine.page_index.PageBoundsIndex`).

    Deviations from the paper:

    - A KV head has one choice of pages: bounds are pooled over the group's query heads as logits
      are elsewhere (``pooling``; of the softmax over pages, by default). The paper's models have
      one query head per KV head.
    - Sink and recent tokens are attended to anyhow and belong to no page.
    - The last page that enters the budget is cut, where it does not fit as a whole.
    - What is chosen enters a resident set (LRU) that holds ``resident_factor`` choices.
    - The paper leaves the first two layers dense: ``exact_layers``, whose default these are.

    References
    ----------
    Tang et al., *Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference*,
    arXiv:2406.10774.
    """

    capabilities: ClassVar[PolicyCapabilities] = PolicyCapabilities(
        timing=Timing.SAME_STEP_QUERY, index="page_bounds", per_head=True, graph_safe=True
    )
    options_model: ClassVar[type[PolicyOptions]] = QuestOptions
    options: QuestOptions

    @property
    def page_tokens(self) -> int:
        """See `Policy.page_tokens`."""
        return self.options.page_tokens

    def select(self, request: SelectionInput) -> Selection:
        """See `Policy.select`."""
        pages, budget = request.pages, request.budget
        assert pages is not None  # as declared
        scores = score_pages(
            request.query,
            pages.bounds,
            request.rows,
            request.lo,
            request.hi,
            num_pages=pages.num_pages,
            page_tokens=pages.page_tokens,
            scale=self.context.model.scale,
            pooling=self.context.selection.pooling,
        )
        # Two more than a whole budget needs: the first and the last page may be incomplete.
        count = min(pages.num_pages, -(-budget // pages.page_tokens) + 2)
        best = topk_positions(scores, count).unsqueeze(-1)  # [S, H, count, 1]
        inside = torch.arange(pages.page_tokens, dtype=best.dtype, device=best.device)
        positions = (best * pages.page_tokens + inside).flatten(2)
        lo, hi = (x.view(-1, 1, 1) for x in (request.lo, request.hi))
        # Of no page, -1, all positions are below 0.
        is_candidate = (positions >= lo) & (positions < hi)
        place = is_candidate.cumsum(-1).sub_(1)
        # What is no candidate, or beyond the budget, goes to a last place, which is left out.
        place = torch.where(is_candidate, place, budget).clamp_(max=budget)
        chosen = positions.new_full((*positions.shape[:2], budget + 1), -1)
        return Selection(chosen.scatter_(2, place, positions)[..., :budget].contiguous())
