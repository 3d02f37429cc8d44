# SPDX-License-Identifier: Apache-2.0
"""Inputs of predicted queries, and what they are in float64."""

from dataclasses import replace
from typing import NamedTuple

import torch
from tolerances import TOLERANCES, Tolerance

from tandemkv.kernels.query import QueryWeights, quantize_query_weight

FORMS = ("partial", "neighbours", "partial neighbours", "layer", "raw layer", "raw partial")


class QueryInputs(NamedTuple):
    """Arguments of `predict_query`."""

    hidden: torch.Tensor
    positions: torch.Tensor
    weights: QueryWeights
    cos_sin: torch.Tensor


def query_inputs(
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: str,
    *,
    has_bias: bool,
    has_norm: bool,
    form: str = "",
) -> QueryInputs:
    """Draw tokens, hidden size, heads, head dimension; weights are a slice of a wider tensor.

    `form` lists what is unlike Llama: ``partial`` and ``neighbours`` of RoPE, ``raw`` for no norm
    before the projection, ``layer`` for a norm over all heads.
    """
    num_tokens, hidden_size, heads, dim = sizes
    torch.manual_seed(num_tokens)
    width = heads * dim
    turned = dim // 4 if "partial" in form else dim // 2
    angles = torch.arange(500)[:, None] * 100.0 ** (-torch.arange(turned) / turned)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(dtype).to(device)

    wide = torch.randn(width + 7, hidden_size) / hidden_size**0.5
    return QueryInputs(
        hidden=draw(num_tokens, hidden_size) * 3,
        positions=torch.randint(0, 500, (num_tokens,), device=device),
        weights=QueryWeights(
            head_dim=dim,
            norm=None if "raw" in form else 1 + draw(hidden_size) / 4,
            norm_eps=1e-3,
            weight=wide.to(dtype).to(device)[:width],
            bias=draw(width) if has_bias else None,
            query_norm=1 + draw(width if "layer" in form else dim) / 4 if has_norm else None,
            query_norm_eps=1e-2,
            rotates_neighbours="neighbours" in form,
        ),
        cos_sin=torch.cat((angles.cos(), angles.sin()), -1).to(device),
    )


def with_int8(given: QueryInputs) -> QueryInputs:
    """Return `given` with its weight in int8."""
    codes, scale = quantize_query_weight(given.weights.weight, given.hidden.device)
    return given._replace(weights=replace(given.weights, weight=codes, weight_scale=scale))


def predict_in_float64(
    hidden: torch.Tensor, positions: torch.Tensor, weights: QueryWeights, cos_sin: torch.Tensor
) -> torch.Tensor:
    """Return the query by its definition."""

    def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()

    weight = weights.weight.double()
    if weights.weight_scale is not None:
        weight = weight * weights.weight_scale.double()[:, None]
    query = hidden.double()
    if weights.norm is not None:
        query = normed(query, weights.norm, weights.norm_eps)
    query = query @ weight.T
    if weights.bias is not None:
        query = query + weights.bias.double()
    if weights.query_norm is not None:
        query = query.view(len(hidden), -1, len(weights.query_norm))
        query = normed(query, weights.query_norm, weights.query_norm_eps)
    query = query.reshape(len(hidden), -1, weights.head_dim)
    turned = cos_sin.shape[1] // 2
    cos, sin = cos_sin.double()[positions][:, None].chunk(2, -1)
    found = query.clone()
    for pair in range(turned):
        one, other = (
            (2 * pair, 2 * pair + 1) if weights.rotates_neighbours else (pair, pair + turned)
        )
        first, second = query[..., one], query[..., other]
        found[..., one] = first * cos[..., pair] - second * sin[..., pair]
        found[..., other] = second * cos[..., pair] + first * sin[..., pair]
    return found


def tolerance_of(dtype: torch.dtype) -> Tolerance:
    """A sum of many products is off by the rounding of its terms, not of itself."""
    if dtype == torch.float32:
        return Tolerance(abs_error=2e-4, rel_error=2e-4, cosine_gap=1e-9)
    tolerance = TOLERANCES[dtype]
    return replace(tolerance, abs_error=3 * tolerance.abs_error)
