# SPDX-License-Identifier: Apache-2.0
"""Query that a decoder layer will ask with, made from a residual stream in one operation.

Called each step for each layer that is selected for, beside the forward pass. Layer by layer
with the modules of the model it is five or six launches, each of which may wait for room beside a
scan of all keys; here it is two.
"""

from dataclasses import dataclass

import torch

from tandemkv.kernels.check import FLOATS, INTS, Dims, fail
from tandemkv.kernels.dispatch import resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryWeights:
    """What a decoder layer makes its query with.

    Attributes
    ----------
    norm : torch.Tensor
        ``[hidden_size]``, float: of the RMS norm before attention.
    norm_eps : float
        Of that norm, ``>= 0``.
    weight : torch.Tensor
        ``[num_qo_heads * head_dim, hidden_size]``, float.
    bias : torch.Tensor, optional
        ``[num_qo_heads * head_dim]``, float.
    query_norm : torch.Tensor, optional
        ``[head_dim]``, float: of an RMS norm over each head.
    query_norm_eps : float
        Of that norm, ``>= 0``.
    """

    norm: torch.Tensor
    norm_eps: float
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    query_norm: torch.Tensor | None = None
    query_norm_eps: float = 0.0


def predict_query(
    hidden: torch.Tensor,
    positions: torch.Tensor,
    weights: QueryWeights,
    cos_sin: torch.Tensor,
) -> torch.Tensor:
    """Return ``rope(query_norm(W norm(hidden) + bias))``.

    Parameters
    ----------
    hidden : torch.Tensor
        ``[num_tokens, hidden_size]``, float: a residual stream. Not changed.
    positions : torch.Tensor
        ``[num_tokens]``, int32 or int64, from 0 and below the length of `cos_sin`; those of rows
        that nobody reads may be anything.
    weights : QueryWeights
        Of the layer.
    cos_sin : torch.Tensor
        ``[num_positions, head_dim]``, float: cosines, then sines, of the angles of each position
        (NeoX style: the two halves of a head are rotated), with any scaling in them.

    Returns
    -------
    torch.Tensor
        ``[num_tokens, num_qo_heads, head_dim]``, of the dtype of `hidden`.

    Raises
    ------
    ValueError
        If an argument differs from the above.

    Notes
    -----
    On a GPU two launches, asynchronous and CUDA-graph safe; all tensors must be dense in their
    last dimension. The products of hidden values and
    norm weights are rounded to the dtype of `hidden` and multiplied by `weight` in the tensor
    cores; all else is float32, where a model's own layers round after each step. In
    ``look_ahead`` this query chooses tokens, and is not attended with.
    """
    dims = Dims()
    dims.check("hidden", hidden, "num_tokens hidden_size", FLOATS)
    dims.check("positions", positions, "num_tokens", INTS)
    dims.check("cos_sin", cos_sin, "num_positions head_dim", FLOATS)
    dims.check("weights.norm", weights.norm, "hidden_size", FLOATS)
    dims.check("weights.weight", weights.weight, "width hidden_size", FLOATS)
    if weights.bias is not None:
        dims.check("weights.bias", weights.bias, "width", FLOATS)
    if weights.query_norm is not None:
        dims.check("weights.query_norm", weights.query_norm, "head_dim", FLOATS)
    if weights.weight.dtype != hidden.dtype:
        fail("weights.weight.dtype", weights.weight.dtype, f"{hidden.dtype}, as hidden")
    if dims["head_dim"] % 2 or dims["head_dim"] == 0 or dims["width"] % dims["head_dim"]:
        fail("cos_sin.shape", tuple(cos_sin.shape), "[num_positions, head_dim], head_dim even")
    if min(weights.norm_eps, weights.query_norm_eps) < 0:
        fail("weights", (weights.norm_eps, weights.query_norm_eps), "of epsilons >= 0")
    run = resolve("query", "predict_query", hidden.device)
    query: torch.Tensor = run(hidden, positions, weights, cos_sin)
    return query
