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
    # Rounded once before the product, which is then no slower than the model's own.
    normed = _normed(hidden.float(), weights.norm, weights.norm_eps).to(hidden.dtype)
    if weights.weight_scale is None:
        query = torch.nn.functional.linear(normed, weights.weight).float()
    else:  # In float32: sums of codes may be more than a float16 holds.
        query = torch.nn.functional.linear(normed.float(), weights.weight.float())
        query = query * weights.weight_scale
    if weights.bias is not None:
        query = query + weights.bias.float()
    query = query.view(len(hidden), -1, cos_sin.shape[1])
    if weights.query_norm is not None:
        query = _normed(query, weights.query_norm, weights.query_norm_eps)
    angles = cos_sin[positions.long().clamp(0, len(cos_sin) - 1)].float()[:, None]
    cos, sin = angles.chunk(2, dim=-1)
    first, second = query.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(hidden.dtype)
