# SPDX-License-Identifier: Apache-2.0
"""Reference of `tandemkv.kernels.query`."""

import torch

from tandemkv.kernels.query import QueryWeights


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight.float()


def predict_query(
    hidden: torch.Tensor,
    positions: torch.Tensor,
    weights: QueryWeights,
    cos_sin: torch.Tensor,
) -> torch.Tensor:
    """Predict; see `tandemkv.kernels.query.predict_query`."""
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


def _rotated(query: torch.Tensor, angles: torch.Tensor, *, neighbours: bool) -> torch.Tensor:
    cos, sin = angles.chunk(2, dim=-1)
    if neighbours:
        first, second = query[..., ::2], query[..., 1::2]
    else:
        first, second = query.chunk(2, dim=-1)
    parts = (first * cos - second * sin, second * cos + first * sin)
    return torch.stack(parts, dim=-1).flatten(-2) if neighbours else torch.cat(parts, dim=-1)
