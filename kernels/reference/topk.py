# SPDX-License-Identifier: Apache-2.0
"""Reference of `tandemkv.kernels.topk`."""

import torch

_INF = float("inf")


def topk_positions(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Choose positions; see `tandemkv.kernels.topk.topk_positions`."""
    num_reqs, num_kv_heads, max_len = scores.shape
    positions = torch.full((num_reqs, num_kv_heads, k), -1, dtype=torch.int32, device=scores.device)
    num_found = min(k, max_len)
    if num_found:
        ranked = torch.nan_to_num(scores, nan=-_INF, posinf=_INF, neginf=-_INF)
        values, indices = torch.topk(ranked, num_found, dim=-1)
        positions[..., :num_found] = torch.where(values > -_INF, indices, -1)
    return positions
