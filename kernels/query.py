# SPDX-License-Identifier: Apache-2.0
"""Query that a decoder layer will ask with, made from a residual stream in one operation.

Called each step for each layer that is selected for, beside the forward pass. Layer by layer
with the modules of the model it is five or six launches, each of which may wait for room beside a
scan of all keys; here it is two.
"""

from dataclasses import dataclass

import torch

from tandemkv.kernels.check import FLOAT32, FLOATS, INT8, INTS, Dims, fail
from tandemkv.kernels.dispatch import uses_triton
from tandemkv.kernels.quantize import quantize_int8

_ROWS = 512
"""Rows quantized at once: their float32 temporaries are a few times the codes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryWeights:
    """What a decoder layer makes its query with."""

    head_dim: int
    """Elements of a head, even."""
    weight: torch.Tensor
    """``[num_qo_heads * head_dim, hidden_size]``, of the dtype of the hidden states, or int8 with
    `weight_scale`."""
    weight_scale: torch.Tensor | None = None
    """``[num_qo_heads * head_dim]``, float32: ``weight * weight_scale[:, None]`` is the matrix.
    There if and only if `weight` is int8 (`quantize_query_weight`)."""
    bias: torch.Tensor | None = None
    """``[num_qo_heads * head_dim]``, float."""
    norm: torch.Tensor | None = None
    """``[hidden_size]``, float: of the RMS norm before attention. None if attention reads the
    residual stream as it is."""
    norm_eps: float = 0.0
    """Of that norm, ``>= 0``."""
    query_norm: torch.Tensor | None = None
    """``[head_dim]``, float: of an RMS norm over each head; or ``[num_qo_heads * head_dim]``: of
    one over all heads together."""
    query_norm_eps: float = 0.0
    """Of that norm, ``>= 0``."""
    rotates_neighbours: bool = False
    """Whether RoPE turns elements ``2 i`` and ``2 i + 1`` of a head together, and not ``i`` and
    ``i + rotary_dim / 2`` (NeoX style)."""


def predict_query(
    hidden: torch.Tensor,
    positions: torch.Tensor,
    weights: QueryWeights,
    cos_sin: torch.Tensor,
) -> torch.Tensor:
    """Return ``rope(query_norm(W norm(hidden) + bias))``; two launches on a GPU.

    What `weights` lacks of that is left out.

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
        ``[num_positions, rotary_dim]``, float: cosines, then sines, of the angles of each position,
        with any scaling in them. The first `rotary_dim` elements of a head are rotated, the others
        are left as they are; even, ``0 < rotary_dim <= head_dim``.

    Returns
    -------
    torch.Tensor
        ``[num_tokens, num_qo_heads, head_dim]``, of the dtype of `hidden`.

    Notes
    -----
    On a GPU all tensors must be dense in their last dimension. The products of hidden values and
    norm weights are rounded to the dtype of `hidden` and multiplied by `weight` in the tensor
    cores; int8 is widened to that dtype before, exactly, and its sums are multiplied by the scale.
    All else is float32, where a model's own layers round after each step. In
    ``look_ahead`` this query chooses tokens, and is not attended with.
    """
    dims = Dims()
    dims.check("hidden", hidden, "num_tokens hidden_size", FLOATS)
    dims.check("positions", positions, "num_tokens", INTS)
    dims.check("cos_sin", cos_sin, "num_positions rotary_dim", FLOATS)
    _check_weights(dims, weights, hidden.dtype)
    if dims["rotary_dim"] % 2 or not 0 < dims["rotary_dim"] <= weights.head_dim:
        required = f"[num_positions, rotary_dim], even and {weights.head_dim} at most"
        fail("cos_sin.shape", tuple(cos_sin.shape), required)
    if uses_triton(hidden.device):
        from tandemkv.kernels.triton_ops.query import predict_query as on_gpu

        return on_gpu(hidden, positions, weights, cos_sin)
    normed = hidden
    if weights.norm is not None:
        # Rounded once before the product, which is then no slower than the model's own.
        normed = _normed(hidden.float(), weights.norm, weights.norm_eps).to(hidden.dtype)
    if weights.weight_scale is None:
        query = torch.nn.functional.linear(normed, weights.weight).float()
    else:  # In float32: sums of codes may be more than a float16 holds.
        query = torch.nn.functional.linear(normed.float(), weights.weight.float())
        query = query * weights.weight_scale
    if weights.bias is not None:
        query = query + weights.bias.float()
    if weights.query_norm is not None:
        query = query.view(len(hidden), -1, len(weights.query_norm))
        query = _normed(query, weights.query_norm, weights.query_norm_eps)
    query = query.reshape(len(hidden), len(weights.weight) // weights.head_dim, weights.head_dim)
    angles = cos_sin[positions.long().clamp(0, len(cos_sin) - 1)].float()[:, None]
    turned, rest = query[..., : cos_sin.shape[1]], query[..., cos_sin.shape[1] :]
    rotated = _rotated(turned, angles, neighbours=weights.rotates_neighbours)
    return torch.cat((rotated, rest), dim=-1).to(hidden.dtype)


def _check_weights(dims: Dims, weights: QueryWeights, dtype: torch.dtype) -> None:
    if weights.norm is not None:
        dims.check("weights.norm", weights.norm, "hidden_size", FLOATS)
    dims.check("weights.weight", weights.weight, "width hidden_size", FLOATS + INT8)
    if weights.head_dim < 2 or weights.head_dim % 2 or dims["width"] % weights.head_dim:
        fail("weights.head_dim", weights.head_dim, f"even, and a divisor of {dims['width']}")
    is_int8, scale = weights.weight.dtype == torch.int8, weights.weight_scale
    if is_int8 != (scale is not None):
        given = "None" if scale is None else "given"
        fail("weights.weight_scale", given, "given with an int8 weight, and with no other")
    if scale is not None:
        dims.check("weights.weight_scale", scale, "width", FLOAT32)
    if weights.bias is not None:
        dims.check("weights.bias", weights.bias, "width", FLOATS)
    if weights.query_norm is not None:
        is_of_head = len(weights.query_norm) == weights.head_dim
        layout = "head_dim" if is_of_head else "width"
        dims.check("weights.query_norm", weights.query_norm, layout, FLOATS)
    if not is_int8 and weights.weight.dtype != dtype:
        fail("weights.weight.dtype", weights.weight.dtype, f"{dtype}, as hidden")
    if min(weights.norm_eps, weights.query_norm_eps) < 0:
        fail("weights", (weights.norm_eps, weights.query_norm_eps), "of epsilons >= 0")


def quantize_query_weight(
    weight: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a query projection symmetrically, with one scale per row, onto a device.

    Parameters
    ----------
    weight : torch.Tensor
        ``[num_qo_heads * head_dim, hidden_size]``, float, finite (not checked), on any device.
    device : torch.device
        Of the result; what is worked out, too, is worked out there, some rows at a time.

    Returns
    -------
    quantized : torch.Tensor
        ``[num_qo_heads * head_dim, hidden_size]``, int8, in ``[-127, 127]``.
    scale : torch.Tensor
        ``[num_qo_heads * head_dim]``, float32, ``> 0``: ``quantized * scale[:, None]`` is within
        ``scale / 2`` of `weight`.
    """
    Dims().check("weight", weight, "width hidden_size", FLOATS)
    quantized = torch.empty(weight.shape, dtype=torch.int8, device=device)
    scale = torch.empty(len(weight), dtype=torch.float32, device=device)
    for first in range(0, len(weight), _ROWS):
        rows = slice(first, first + _ROWS)
        # A row is what a key of one head is there.
        codes, scales = quantize_int8(weight[rows].to(device)[:, None])
        quantized[rows], scale[rows] = codes[:, 0], scales[:, 0]
    return quantized, scale


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight.float()


def _rotated(query: torch.Tensor, angles: torch.Tensor, *, neighbours: bool) -> torch.Tensor:
    cos, sin = angles.chunk(2, dim=-1)
    if neighbours:
        first, second = query[..., ::2], query[..., 1::2]
    else:
        first, second = query.chunk(2, dim=-1)
    parts = (first * cos - second * sin, second * cos + first * sin)
    return torch.stack(parts, dim=-1).flatten(-2) if neighbours else torch.cat(parts, dim=-1)
