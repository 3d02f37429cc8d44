# SPDX-License-Identifier: Apache-2.0
"""What operations are by their definition, in float64; nothing of the product computes it."""

from __future__ import annotations

import math

import torch


def attended(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with q ``[Hq, D]`` to keys and values ``[n, H, D]``: output and log-sum-exp."""
    group = q.shape[0] // keys.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:1], -math.inf, dtype=torch.float64)
    for j in range(q.shape[0] if keys.shape[0] else 0):
        logits = keys[:, j // group].double() @ q[j].double() * scale
        lse[j] = logits.logsumexp(0)
        out[j] = logits.softmax(0) @ values[:, j // group].double()
    return out, lse


def with_samples(
    q: torch.Tensor,
    others: tuple[torch.Tensor, torch.Tensor],
    samples: tuple[torch.Tensor, torch.Tensor],
    weight: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """One softmax ``[B, Hq, D]`` over other tokens and weighted samples.

    Keys and values of both are ``[B, n, H, D]``, `weight` is ``[B, H, n]``: logarithms.
    """
    grouped = q.double().unflatten(1, (weight.shape[1], -1))
    first, second = (
        torch.einsum("bhgd,bnhd->bhgn", grouped, k.double()) * scale
        for k in (others[0], samples[0])
    )
    second = second + weight.double()[:, :, None]
    probs = torch.cat([first, second], -1).softmax(-1)
    values = torch.cat([others[1], samples[1]], 1).double()
    return torch.einsum("bhgn,bnhd->bhgd", probs, values).flatten(1, 2)


def rotated(
    x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Rotate pairs half a head apart of ``[n, heads, D]`` by the angles of their positions."""
    want = torch.empty(x.shape, dtype=torch.float64)
    half = x.shape[-1] // 2
    for n, position in enumerate(positions.tolist()):
        for i in range(half):
            angle = position * float(inv_freq[i])
            a, b = x[n, :, i].double(), x[n, :, i + half].double()
            want[n, :, i] = scaling * (a * math.cos(angle) - b * math.sin(angle))
            want[n, :, i + half] = scaling * (b * math.cos(angle) + a * math.sin(angle))
    return want


def ridge(queries: torch.Tensor, *, eps: float, sign: int, normalise: str) -> torch.Tensor:
    """Eq. 2-5 of AsyncSpade for one head, size by size: `queries` ``[n, D]``, newest last."""
    newest, predictions = queries[-1], []
    for k in range(1, len(queries)):
        past = queries[-1 - k : -1]
        gram = past @ past.T
        gram += eps * gram.diagonal().mean() * torch.eye(k, dtype=queries.dtype)
        weights = torch.linalg.solve(gram, past @ newest)
        if normalise == "softmax":
            weights = torch.softmax(sign * weights, 0)
        predictions.append(weights @ queries[-k:])
    return torch.stack(predictions).mean(0) if predictions else newest


def page_scores(q: torch.Tensor, bounds: torch.Tensor, pooling: str, scale: float) -> torch.Tensor:
    """Scores ``[H, n]`` under q ``[Hq, D]`` of pages with keys within bounds ``[2, n, H, D]``."""
    group = q.shape[0] // bounds.shape[2]
    own = bounds.double().repeat_interleave(group, 2)  # [2, n, Hq, D]
    logits = (q.double() * own).amax(0).sum(-1).T.unflatten(0, (-1, group)) * scale  # [H, G, n]
    if pooling == "softmax_mean":
        return logits.softmax(-1).mean(1)
    return logits.amax(1) if pooling == "max_logit" else logits.mean(1)


def page_magnitude(
    q: torch.Tensor, bounds: torch.Tensor, pooling: str, scale: float
) -> torch.Tensor:
    """What rounding errors of `page_scores` are relative to: not a sum that may cancel."""
    if pooling != "softmax_mean":
        q, bounds, pooling = q.abs(), bounds.abs(), "max_logit"
    return page_scores(q, bounds, pooling, scale).max()


def dequantized(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Keys ``[num_slots, H, D]`` of an int4 index, written out channel by channel."""
    num_pages, heads, page_size, half = codes.shape
    keys = torch.zeros(num_pages, page_size, heads, 2 * half, dtype=torch.float64)
    for channel in range(2 * half):
        nibble = codes[..., channel] & 15 if channel < half else codes[..., channel - half] >> 4
        step, zero = scales[:, :, :, channel].double().unbind(2)  # [P, H]
        keys[..., channel] = (nibble * step[..., None] + zero[..., None]).transpose(1, 2)
    return keys.reshape(num_pages * page_size, heads, 2 * half)


def int4_bound(keys: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """How far keys ``[P, page_size, H, D]`` may be from their codes: ``[P, H, D]``."""
    largest = keys.double().abs().amax(dim=1)
    # 2**-20: half a step of float16's subnormals, for scale (times 15) and zero.
    return scales[:, :, 0].double() / 2 + 2.0**-10 * largest + 2.0**-20
