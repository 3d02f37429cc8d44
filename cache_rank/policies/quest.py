# SPDX-License-Identifier: Apache-2.0
"""Quest: pages of keys, ranked by an upper bound of their logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from tandemkv.cache_rank.protocol.messages import Timing

from .base import Owner, Policy, PolicyCapabilities, PolicyContext, Selection, SelectionInput


@dataclass(slots=True)
class _Pages:
    """Bounds ``[H, capacity, D]`` float32 of one request's pages, keys ``[0, end)`` entered."""

    low: torch.Tensor
    high: torch.Tensor
    end: int


class QuestPolicy(Policy):
    """Take the pages whose best possible logit is highest.

    Per page of 16 tokens and KV head the smallest and largest value of each key component are
    kept. ``sum_d max(q_d low_d, q_d high_d)`` bounds the logit of every key in the page. The
    pages with the highest bounds are taken, with all their tokens, until the budget is filled.

    Notes
    -----
    Pages are counted in positions, and bounds are remembered by position for each (row,
    generation): slots may be shared or rewritten. A page is entered when its first token
    becomes a candidate, and widened as more do; what is already there is never read again.

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

    capabilities: ClassVar[PolicyCapabilities] = PolicyCapabilities(timing=Timing.SAME_STEP_QUERY)

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._size = context.selection.quest_page_tokens
        self._pages: dict[Owner, dict[int, _Pages]] = {}

    def select(self, request: SelectionInput) -> Selection:
        """See `Policy.select`."""
        heads = self.context.model.num_kv_heads
        shape = (len(request.owners), heads, request.budget)
        chosen = torch.full(shape, -1, dtype=torch.int32, device=request.query.device)
        ranges = zip(request.lo.tolist(), request.hi.tolist(), strict=True)
        for i, (lo, hi) in enumerate(ranges):
            if lo < hi:
                pages = self._bring_up_to_date(request, i, lo, hi)
                scores = self._bounds(request.query[i], pages, lo, hi)
                tokens = self._tokens(scores, lo, hi, request.budget)
                chosen[i, :, : tokens.shape[1]] = tokens
        return Selection(chosen)

    def release(self, owner: Owner) -> None:
        """See `Policy.release`."""
        self._pages.pop(owner, None)

    def _bring_up_to_date(self, request: SelectionInput, i: int, lo: int, hi: int) -> _Pages:
        """Enter the keys that became candidates since the last call."""
        layers = self._pages.setdefault(request.owners[i], {})
        pages = layers.get(request.layer)
        if pages is None:
            _, heads, dim = request.stored.k.shape
            empty = torch.empty(heads, 0, dim, device=request.stored.k.device)
            pages = layers[request.layer] = _Pages(empty, empty, lo)
        if pages.end >= hi:
            return pages
        needed = -(-hi // self._size)
        if pages.low.shape[1] < needed:
            pages.low = _grown(pages.low, 2 * needed, float("inf"))
            pages.high = _grown(pages.high, 2 * needed, float("-inf"))
        first, last = pages.end // self._size, needed
        slots = request.stored.slots[i, pages.end : hi].long()
        keys = request.stored.k[slots].float().transpose(0, 1)  # [H, n, D]
        page = torch.arange(pages.end, hi, device=keys.device) // self._size - first
        index = page[None, :, None].expand_as(keys)
        for bounds, how in ((pages.low, "amin"), (pages.high, "amax")):
            bounds[:, first:last].scatter_reduce_(1, index, keys, reduce=how)
        pages.end = hi
        return pages

    def _bounds(self, query: torch.Tensor, pages: _Pages, lo: int, hi: int) -> torch.Tensor:
        """Return the pooled bounds ``[H, num_pages]`` of the pages that hold ``[lo, hi)``."""
        model, pooling = self.context.model, self.context.selection.pooling
        used = slice(lo // self._size, -(-hi // self._size))
        grouped = query.float().view(model.num_kv_heads, model.gqa_group_size, model.head_dim)
        bounds = grouped.clamp(min=0) @ pages.high[:, used].transpose(1, 2)
        bounds += grouped.clamp(max=0) @ pages.low[:, used].transpose(1, 2)
        bounds *= model.scale  # [H, G, num_pages]
        if pooling == "max_logit":
            return bounds.amax(dim=1)
        if pooling == "mean_logit":
            return bounds.mean(dim=1)
        return bounds.softmax(dim=-1).mean(dim=1)

    def _tokens(self, scores: torch.Tensor, lo: int, hi: int, budget: int) -> torch.Tensor:
        """Return positions ``[H, min(budget, hi - lo)]`` int32 of the best pages, best first."""
        size, first = self._size, lo // self._size
        # Two more than a whole budget needs: the first and the last page may be incomplete.
        count = min(scores.shape[1], -(-budget // size) + 2)
        best = scores.topk(count, dim=-1).indices + first
        inside = torch.arange(size, device=scores.device)
        positions = (best[..., None] * size + inside).flatten(1)  # [H, count * size]
        is_candidate = (positions >= lo) & (positions < hi)
        # A stable sort brings the candidates to the front and keeps their order.
        order = is_candidate.int().sort(dim=-1, descending=True, stable=True).indices
        return positions.gather(1, order)[:, : min(budget, hi - lo)].int()


def _grown(bounds: torch.Tensor, capacity: int, fill: float) -> torch.Tensor:
    heads, used, dim = bounds.shape
    grown = bounds.new_full((heads, capacity, dim), fill)
    grown[:, :used] = bounds
    return grown
