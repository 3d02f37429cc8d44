# SPDX-License-Identifier: Apache-2.0
"""Reference of `tandemkv.kernels.causal_attention`, on torch's fused attention."""

import torch
import torch.nn.functional as F

_QUERY_BLOCK_LEN = 512


def attend_causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """Attend causally; see `tandemkv.kernels.causal_attention.attend_causal`."""
    num_queries, num_tokens = q.shape[0], k.shape[0]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    queries, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, H, n, D]
    offset = num_tokens - num_queries
    if offset == 0 and num_queries:
        whole = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=scale, enable_gqa=True
        )
        return out.copy_(whole.squeeze(0).transpose(0, 1))
    for start in range(0, num_queries, _QUERY_BLOCK_LEN):
        end = min(start + _QUERY_BLOCK_LEN, num_queries)
        num_keys = offset + end
        is_seen = torch.arange(num_keys, device=q.device) <= torch.arange(
            offset + start, num_keys, device=q.device
        ).unsqueeze(-1)
        block = F.scaled_dot_product_attention(
            queries[:, :, start:end],
            keys[:, :, :num_keys],
            values[:, :, :num_keys],
            attn_mask=is_seen,
            scale=scale,
            enable_gqa=True,
        )
        out[start:end] = block.squeeze(0).transpose(0, 1)
    return out
