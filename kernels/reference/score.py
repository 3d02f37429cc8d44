# SPDX-License-Identifier: Apache-2.0
"""Reference of `tandemkv.kernels.score`; reads candidate ranges on the host."""

import torch

from tandemkv.kernels.check import fail
from tandemkv.kernels.reference.paging import key_logits, slots_of
from tandemkv.kernels.score import ScoreScratch

# Logits of a query window held at a time, in elements (64 MiB).
_MAX_WINDOW_LOGITS = 1 << 24


def score_keys(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    slots: torch.Tensor,
    lo: torch.Tensor,
    hi: torch.Tensor,
    *,
    width: int,
    scale: float,
    pooling: str = "softmax_mean",
    k_scale: torch.Tensor | None = None,
    page_size: int = 1,
    active: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    scratch: ScoreScratch | None = None,
) -> torch.Tensor:
    """Score candidates; see `tandemkv.kernels.score.score_keys`."""
    del scratch  # only the GPU version keeps something between two passes
    num_reqs, _, head_dim = q.shape
    num_kv_heads = k_pool.shape[1]
    grouped = (q.float() * scale).reshape(num_reqs, num_kv_heads, -1, head_dim)
    scores = out
    if scores is None:
        scores = grouped.new_full((num_reqs, num_kv_heads, width), float("-inf"))
    limit = min(width, slots.shape[1] * page_size)
    if active is not None:
        hi = torch.where(active != 0, hi, 0)
    for req, (first, last) in enumerate(zip(lo.tolist(), hi.tolist(), strict=True)):
        if last <= first:
            continue
        if first < 0 or last > limit:
            fail(f"[lo, hi) of request {req}", (first, last), f"in [0, {limit}] (width, max_pages)")
        row = slots_of(slots[req], first, last, page_size)
        logits = key_logits(grouped[req], k_pool, row, k_scale)  # [H, G, n]
        if pooling == "softmax_mean":
            pooled = torch.softmax(logits, dim=-1).mean(dim=1)
        elif pooling == "max_logit":
            pooled = logits.amax(dim=1)
        else:
            pooled = logits.mean(dim=1)
        scores[req, :, first:last] = pooled
    return scores


def score_window(
    q_window: torch.Tensor,
    k_pool: torch.Tensor,
    slots_row: torch.Tensor,
    lo: int,
    hi: int,
    q_positions: torch.Tensor,
    *,
    scale: float,
    k_scale: torch.Tensor | None = None,
    page_size: int = 1,
) -> torch.Tensor:
    """Score one request for seeding; see `tandemkv.kernels.score.score_window`."""
    window_len, num_qo_heads, head_dim = q_window.shape
    num_kv_heads = k_pool.shape[1]
    group = num_qo_heads // num_kv_heads
    scores = k_pool.new_full((num_kv_heads, hi), float("-inf"), dtype=torch.float32)
    if lo >= hi:
        return scores
    grouped = (q_window.float() * scale).reshape(window_len, num_kv_heads, group, head_dim)
    positions = torch.arange(lo, hi, device=q_window.device)
    total = scores.new_zeros((num_kv_heads, hi - lo))
    row = slots_of(slots_row, lo, hi, page_size)
    num_per_chunk = max(1, _MAX_WINDOW_LOGITS // (num_qo_heads * (hi - lo)))
    for start in range(0, window_len, num_per_chunk):
        part = grouped[start : start + num_per_chunk].transpose(0, 1)  # [H, w, G, D]
        num_queries = part.shape[1]
        logits = key_logits(part.reshape(num_kv_heads, -1, head_dim), k_pool, row, k_scale).view(
            num_kv_heads, num_queries, group, -1
        )
        hidden = positions > q_positions[start : start + num_queries, None]  # [w, n]
        logits.masked_fill_(hidden[:, None, :], float("-inf"))
        probs = torch.softmax(logits, dim=-1)
        probs.masked_fill_(hidden.all(dim=-1)[:, None, None], 0.0)  # the softmax of nothing
        total += probs.sum(dim=(1, 2))
    scores[:, lo:] = total / (window_len * group)
    return scores
