# SPDX-License-Identifier: Apache-2.0
"""Merging of two parts of one attention; called by the inference rank."""

import torch

from tandemkv.kernels.check import FLOAT32, FLOATS, Dims
from tandemkv.kernels.dispatch import resolve


def merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over two disjoint sets of tokens.

    Parameters
    ----------
    out_a, out_b : torch.Tensor
        ``[num_reqs, num_qo_heads, head_dim]``, float.
    lse_a, lse_b : torch.Tensor
        ``[num_reqs, num_qo_heads]``, float32. Natural-log log-sum-exp of the
        scaled logits; ``-inf`` for an empty set, whose output then has no
        influence, NaN included.

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
    run = resolve("merge", "merge_attention", out_a.device)
    result: tuple[torch.Tensor, torch.Tensor] = run(out_a, lse_a, out_b, lse_b)
    return result
