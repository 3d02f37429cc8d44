# SPDX-License-Identifier: Apache-2.0
"""Reference of `tandemkv.kernels.shortlist`; reads candidate ranges on the host."""

import torch

from tandemkv.kernels.reference.paging import key_logits
from tandemkv.kernels.reference.topk import topk_positions
from tandemkv.kernels.shortlist import ShortlistScratch


def choose_shortlisted(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    covered: torch.Tensor,
    rows: torch.Tensor,
    lo: torch.Tensor,
    hi: torch.Tensor,
    k: int,
    *,
    num_new: int,
    active: torch.Tensor,
    step: torch.Tensor,
    every: int,
    phase: int,
    due: torch.Tensor,
    scale: float,
    pooling: str,
    page_size: int,
    scratch: ShortlistScratch | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose positions; see `tandemkv.kernels.shortlist.choose_shortlisted`."""
    del scratch  # only the GPU version keeps something between its launches
    num_reqs, _, head_dim = q.shape
    heads = k_pool.shape[1]
    width = positions.shape[2] + num_new
    grouped = (q.float() * scale).reshape(num_reqs, heads, -1, head_dim)
    places = torch.full((num_reqs, heads, width), -1, dtype=torch.int32, device=q.device)
    scores = torch.full(places.shape, float("-inf"), device=q.device)
    ends = torch.where(active, hi, 0)
    came = ends - covered[rows]
    due.copy_(active & (((step + phase) % every == 0) | (came > num_new)))
    for req, (first, last) in enumerate(zip(lo.tolist(), ends.tolist(), strict=True)):
        if last <= first:
            continue
        row = rows[req]
        new = torch.arange(max(int(covered[row]), last - num_new, first), last, device=q.device)
        for head in range(heads):
            listed = positions[row, head]
            listed = listed[(listed >= first) & (listed < last)]
            place = torch.cat([listed, new.to(torch.int32)])
            if not len(place):
                continue
            slot = slots[req, (place // page_size).long()].long() * page_size + place % page_size
            keys = k_pool[:, head : head + 1]
            logits = key_logits(grouped[req, head : head + 1], keys, slot, None)[0]  # [G, n]
            if pooling == "softmax_mean":
                pooled = torch.softmax(logits, dim=-1).mean(dim=0)
            elif pooling == "max_logit":
                pooled = logits.amax(dim=0)
            else:
                pooled = logits.mean(dim=0)
            places[req, head, : len(place)] = place
            scores[req, head, : len(place)] = pooled
    out_scores = torch.empty((num_reqs, heads, k), device=q.device)
    best = topk_positions(scores, k, sort=False, out_scores=out_scores)
    chosen = torch.where(best >= 0, places.gather(2, best.long().clamp(min=0)), -1)
    return chosen.to(torch.int32), out_scores


def store_shortlist(
    found: torch.Tensor,
    hi: torch.Tensor,
    due: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    covered: torch.Tensor,
) -> None:
    """Replace shortlists; see `tandemkv.kernels.shortlist.store_shortlist`."""
    positions[rows[due]] = found[due]
    covered[rows[due]] = hi[due]
