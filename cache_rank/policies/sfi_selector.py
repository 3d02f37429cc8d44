# SPDX-License-Identifier: Apache-2.0
"""SFI's Selector: closed-form fusion of evidence and prior, and refinements of the log-score.

Pure functions of tensors whose last dimension is the context; `allowed` marks the set J. What is
outside J is 0 in a distribution and ``-inf`` in a log-score. Any float dtype.

References
----------
*Slow-Fast Inference: Training-Free Inference Acceleration via Within-Sentence Support
Stability*, sections 3.2 and 3.3; equation numbers below are of that paper.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def power_mean_evidence(probs: torch.Tensor, allowed: torch.Tensor, alpha: float) -> torch.Tensor:
    """Summarise a window of attention distributions (Eq. 7 and 8).

    Parameters
    ----------
    probs : torch.Tensor
        ``[W, ..., n]``: each row a distribution over J (Eq. 6), 0 outside.
    allowed : torch.Tensor
        ``[..., n]`` bool.
    alpha : float
        In (0, 1]; float32 has digits enough from about 1e-3 on.

    Returns
    -------
    torch.Tensor
        ``[..., n]``: a distribution over J; `probs` itself for W = 1; 0 where J is empty.
        Computed in the log domain: the power of a mean below 1 may underflow.
    """
    if len(probs) == 1:
        return probs[0]
    log_mean = torch.logsumexp(alpha * probs.log(), dim=0) / alpha  # up to a factor
    weights = torch.softmax(log_mean.masked_fill(~allowed, -torch.inf), dim=-1)
    return weights.masked_fill(~allowed, 0.0)  # also where J is empty, a softmax of nothing


def prior(
    key_norms: torch.Tensor,
    allowed: torch.Tensor,
    *,
    norm_exponent: float,
    decay: float,
    decay_power: float,
    tail_brake: float,
    eps: float,
) -> torch.Tensor:
    """Return the cache-aware prior r (Eq. 9-12), ``[..., n]``, a distribution over J.

    `key_norms` are ``[..., n]``; the exponents are gamma, beta, p and eta there. Computed in the
    log domain: the product of the factors may underflow.
    """
    position = torch.arange(allowed.shape[-1], device=allowed.device).to(key_norms.dtype)
    position = position.expand(allowed.shape)
    first = position.masked_fill(~allowed, torch.inf).amin(dim=-1, keepdim=True)
    last = position.masked_fill(~allowed, -torch.inf).amax(dim=-1, keepdim=True)
    u = ((position - first) / (last - first + eps)).clamp(0.0, 1.0).masked_fill(~allowed, 0.0)
    log_prior = -norm_exponent * torch.log(key_norms + eps)  # Eq. 9
    log_prior = log_prior - decay * u.pow(decay_power) + tail_brake * torch.log(1.0 - u + eps)
    weights = torch.softmax(log_prior.masked_fill(~allowed, -torch.inf), dim=-1)
    return weights.masked_fill(~allowed, 0.0)  # also where J is empty, a softmax of nothing


def fuse(evidence: torch.Tensor, prior_: torch.Tensor, lambda_clip: float) -> torch.Tensor:
    """Return ``s = (1 - lambda) f + lambda r`` with the closed-form lambda (Eq. 15, 18)."""
    ff = evidence.square().sum(dim=-1, keepdim=True)
    fr = (evidence * prior_).sum(dim=-1, keepdim=True)
    rr = prior_.square().sum(dim=-1, keepdim=True)
    spread = ff - 2 * fr + rr  # |f - r|^2: 0 when they are equal, and any lambda will do
    best = (ff - fr) / torch.where(spread > 0, spread, torch.ones_like(spread))
    weight = best.clamp(0.0, lambda_clip)
    return (1 - weight) * evidence + weight * prior_


def soft_nms(z: torch.Tensor, *, strength: float, radius: int) -> torch.Tensor:
    """Push down what is below its neighbourhood's maximum (Eq. 20, 21).

    `z` is ``[..., n]``, ``-inf`` outside J; the neighbourhood of j is ``[j - radius, j + radius]``.
    """
    flat = z.reshape(1, -1, z.shape[-1])
    peak = F.max_pool1d(flat, 2 * radius + 1, stride=1, padding=radius).view_as(z)
    gap = torch.where(z.isneginf(), torch.zeros_like(z), peak - z)
    return z - strength * gap.clamp(min=0.0)


def exclude_across_heads(
    z: torch.Tensor, *, strength: float, temperature: float, eps: float
) -> torch.Tensor:
    """Let heads compete for each position (Eq. 22, 23). `z` is ``[..., H, n]``."""
    shares = torch.softmax(z / temperature, dim=-2)
    adjusted = z + strength * torch.log(shares.clamp(min=eps))
    return torch.where(z.isneginf(), z, adjusted)
