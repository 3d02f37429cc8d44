# SPDX-License-Identifier: Apache-2.0
"""Reference of `tandemkv.kernels.topk`."""

import torch

_INF = float("inf")


def topk_positions(
    scores: torch.Tensor,
    k: int,
    *,
    lo: torch.Tensor | None = None,
    hi: torch.Tensor | None = None,
    sort: bool = True,
    scratch: torch.Tensor | None = None,
    out_scores: torch.Tensor | None = None,
) -> torch.Tensor:
    """Choose positions; see `tandemkv.kernels.topk.topk_positions`."""
    num_reqs, num_kv_heads, max_len = scores.shape
    positions = torch.full((num_reqs, num_kv_heads, k), -1, dtype=torch.int32, device=scores.device)
    if out_scores is not None:
        out_scores.fill_(-_INF)
    num_found = min(k, max_len)
    if num_found:
        ranked = torch.nan_to_num(scores, nan=-_INF, posinf=_INF, neginf=-_INF)
        place = torch.arange(max_len, device=scores.device)
        if lo is not None:
            ranked.masked_fill_((place < lo[:, None])[:, None], -_INF)
        if hi is not None:
            ranked.masked_fill_((place >= hi[:, None])[:, None], -_INF)
        # Sorted in any case: padding has to be at the end. One more tells if equal ones are cut.
        values, indices = torch.topk(ranked, min(num_found + 1, max_len), dim=-1, sorted=True)
        is_tied = ((values[..., 1:] == values[..., :-1]) & (values[..., 1:] > -_INF)).any(dim=-1)
        values, indices = values[..., :num_found], indices[..., :num_found]
        if bool(is_tied.any()):
            indices[is_tied] = _lowest_of_equal(ranked[is_tied], num_found)
        positions[..., :num_found] = torch.where(values > -_INF, indices, -1)
        if out_scores is not None:
            out_scores[..., :num_found] = values
    return positions


def _lowest_of_equal(ranked: torch.Tensor, k: int) -> torch.Tensor:
    """Return places ``[n, k]`` of the best of ``[n, max_len]``, of equal ones the lowest first.

    `torch.topk` takes any of them. Few scores are equal as a rule; pooled ones are.
    """
    bits = (ranked + 0.0).view(torch.int32)  # -0.0 equals 0.0
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32
    order -= torch.arange(ranked.shape[-1], device=ranked.device)
    return torch.topk(order, k, dim=-1, sorted=True).indices
