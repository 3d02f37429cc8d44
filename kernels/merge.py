# SPDX-License-Identifier: Apache-2.0
"""Merging of two parts of one attention; called by the inference rank."""

import torch

from tandemkv.kernels.check import FLOAT32, FLOATS, Dims


def merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over two disjoint sets of tokens.

    Parameters
    ----------
    out_a, out_b : torch.Tensor
        ``[num_reqs, num_qo_heads, head_dim]``, float.
    lse_a, lse_b : torch.Tensor
        ``[num_reqs, num_qo_heads]``, float32. Natural-log log-sum-exp of the scaled logits;
        ``-inf`` for an empty set, whose output then has no influence, NaN included.

    Returns
    -------
    out : torch.Tensor
        As `out_a`; 0 where both sets are empty. Computed in float32.
    lse : torch.Tensor
        ``[num_reqs, num_qo_heads]``, float32.
    """
    dims = Dims()
    dims.check("out_a", out_a, "num_reqs num_qo_heads head_dim", FLOATS)
    dims.check("lse_a", lse_a, "num_reqs num_qo_heads", FLOAT32)
    dims.check("out_b", out_b, "num_reqs num_qo_heads head_dim", FLOATS)
    dims.check("lse_b", lse_b, "num_reqs num_qo_heads", FLOAT32)
    lse = torch.logaddexp(lse_a, lse_b)
    out = _weigh(out_a, lse_a, lse_b) + _weigh(out_b, lse_b, lse_a)
    return out.to(out_a.dtype), lse


def _weigh(out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    is_empty = lse == float("-inf")
    # Not relative to the sum of both, whose rounding is of the size of large `lse` themselves.
    weight = torch.sigmoid(lse - other).unsqueeze(-1)
    return (out.float() * weight).masked_fill_(is_empty.unsqueeze(-1), 0.0)
