# SPDX-License-Identifier: Apache-2.0
"""`tandemkv.kernels.causal_attention` on a GPU: torch's flash attention, bottom-right causal."""

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from tandemkv.kernels.reference import causal_attention as reference

FUSED_DTYPES = (torch.bfloat16, torch.float16)
"""Flash attention takes no others; float32, for tests, goes block by block."""


def attend_causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """Attend causally; see `tandemkv.kernels.causal_attention.attend_causal`."""
    if q.dtype not in FUSED_DTYPES or not q.shape[0]:
        return reference.attend_causal(q, k, v, scale=scale)
    queries, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, H, n, D]
    if q.shape[0] == k.shape[0]:
        out = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=scale, enable_gqa=True
        )
    elif q.shape[0] == 1:  # the last position sees everything
        out = F.scaled_dot_product_attention(queries, keys, values, scale=scale, enable_gqa=True)
    else:
        bias = causal_lower_right(q.shape[0], k.shape[0])
        out = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=bias, scale=scale, enable_gqa=True
        )
    return out.squeeze(0).transpose(0, 1).contiguous()
