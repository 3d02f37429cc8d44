# SPDX-License-Identifier: Apache-2.0
"""Reference of `tandemkv.kernels.merge`."""

import torch


def _weigh(out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    is_empty = lse == float("-inf")
    # Not relative to the sum of both, whose rounding is of the size of large `lse` themselves.
    weight = torch.sigmoid(lse - other).unsqueeze(-1)
    return (out.float() * weight).masked_fill_(is_empty.unsqueeze(-1), 0.0)


def merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge parts; see `tandemkv.kernels.merge.merge_attention`."""
    lse = torch.logaddexp(lse_a, lse_b)
    out = _weigh(out_a, lse_a, lse_b) + _weigh(out_b, lse_b, lse_a)
    return out.to(out_a.dtype), lse
