# SPDX-License-Identifier: Apache-2.0
"""Extend attention over prefill staging; called by the inference rank."""

import torch

from tandemkv.kernels.check import FLOATS, Dims, check_int
from tandemkv.kernels.dispatch import resolve


def attend_causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """Let the last positions of a request attend causally to all before them.

    Parameters
    ----------
    q : torch.Tensor
        ``[num_queries, num_qo_heads, head_dim]``, float: the queries of the
        last ``num_queries`` positions.
    k, v : torch.Tensor
        ``[num_tokens, num_kv_heads, head_dim]``, dtype of `q`, in logical
        order; ``num_tokens >= num_queries``.
    scale : float
        Factor of the logits, usually ``head_dim ** -0.5``.

    Returns
    -------
    torch.Tensor
        ``[num_queries, num_qo_heads, head_dim]``, dtype of `q`.

    Notes
    -----
    Memory beyond the result is bounded by blocks of queries times
    ``num_tokens``, not by ``num_queries * num_tokens``.
    """
    dims = Dims()
    dims.check("q", q, "num_queries num_qo_heads head_dim", FLOATS)
    dims.check("k", k, "num_tokens num_kv_heads head_dim", (q.dtype,))
    dims.check("v", v, "num_tokens num_kv_heads head_dim", (q.dtype,))
    dims.check_groups("num_qo_heads", "num_kv_heads")
    check_int("num_queries", dims["num_queries"], minimum=0, maximum=dims["num_tokens"])
    out: torch.Tensor = resolve("causal_attention", "attend_causal", q.device)(q, k, v, scale=scale)
    return out
