# SPDX-License-Identifier: Apache-2.0
"""Reference of `tandemkv.kernels.shortlist`."""

import torch

from tandemkv.kernels.reference.paging import key_logits
from tandemkv.kernels.reference.topk import topk_positions
from tandemkv.kernels.shortlist import ShortlistScratch


def choose_listed(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    slots: torch.Tensor,
    listed: torch.Tensor,
    k: int,
    *,
    scale: float,
    pooling: str,
    page_size: int,
    scratch: ShortlistScratch | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose positions; see `tandemkv.kernels.shortlist.choose_listed`."""
    del scratch  # only the GPU version keeps something between its launches
    num_reqs, _, head_dim = q.shape
    heads = k_pool.shape[1]
    grouped = (q.float() * scale).reshape(num_reqs, heads, -1, head_dim)
    scores = torch.full(listed.shape, float("-inf"), device=q.device)
    for req in range(num_reqs):
        for head in range(heads):
            place = listed[req, head]
            place = place[place >= 0].long()
            if not len(place):
                continue
            slot = slots[req, place // page_size].long() * page_size + place % page_size
            keys = k_pool[:, head : head + 1]
            logits = key_logits(grouped[req, head : head + 1], keys, slot, None)[0]  # [G, n]
            if pooling == "softmax_mean":
                pooled = torch.softmax(logits, dim=-1).mean(dim=0)
            elif pooling == "max_logit":
                pooled = logits.amax(dim=0)
            else:
                pooled = logits.mean(dim=0)
            scores[req, head, : len(place)] = pooled
    out_scores = torch.empty((num_reqs, heads, k), device=q.device)
    best = topk_positions(scores, k, sort=False, out_scores=out_scores)
    chosen = torch.where(best >= 0, listed.gather(2, best.long().clamp(min=0)), -1)
    return chosen.to(torch.int32), out_scores
