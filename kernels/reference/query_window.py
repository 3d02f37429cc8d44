# SPDX-License-Identifier: Apache-2.0
"""Reference of `tandemkv.kernels.query_window`."""

from __future__ import annotations

import torch

MIN_EPS = 1e-6


def mean_predict(window: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Average; see `tandemkv.kernels.query_window.mean_predict`."""
    there = _is_there(window, count)
    kept = torch.where(there.unsqueeze(-1), window, 0)
    return kept.sum(-2) / there.sum(-1, keepdim=True)


def ridge_predict(
    window: torch.Tensor, count: torch.Tensor, *, eps: float, sign: int, normalise: str
) -> torch.Tensor:
    """Predict; see `tandemkv.kernels.query_window.ridge_predict`."""
    there = _is_there(window, count)
    kept = torch.where(there.unsqueeze(-1), window, 0)
    past, newest = kept[..., :-1, :], kept[..., -1, :]
    size = past.shape[-2]
    gram = past @ past.transpose(-1, -2)  # [..., W, W]
    target = (past @ newest.unsqueeze(-1)).squeeze(-1)  # [..., W]

    # One batch of all sizes: what is outside the last k gets an identity row, hence weight 0.
    sizes = torch.arange(1, size + 1, device=window.device)
    inside = torch.arange(size, device=window.device) >= size - sizes[:, None]  # [k, W]
    pairs = inside.unsqueeze(-1) & inside.unsqueeze(-2)
    diagonal = torch.where(inside, gram.diagonal(dim1=-2, dim2=-1).unsqueeze(-2), 0)
    ridge = diagonal.sum(-1) / sizes * max(eps, MIN_EPS) + torch.finfo(gram.dtype).tiny
    system = torch.where(pairs, gram.unsqueeze(-3), 0)
    on_diagonal = torch.where(inside, ridge.unsqueeze(-1), 1)
    system = system + torch.diag_embed(on_diagonal)
    right = torch.where(inside, target.unsqueeze(-2), 0)
    factor, _ = torch.linalg.cholesky_ex(system)
    weights = torch.cholesky_solve(right.unsqueeze(-1), factor).squeeze(-1)  # [..., k, W]
    if normalise == "softmax":
        weights = torch.softmax((sign * weights).masked_fill(~inside, float("-inf")), dim=-1)

    predictions = weights @ kept[..., 1:, :]  # [..., k, D]
    usable = sizes < count.unsqueeze(-1)
    usable = usable & torch.isfinite(predictions).all(-1)
    total = torch.where(usable.unsqueeze(-1), predictions, 0).sum(-2)
    number = usable.sum(-1, keepdim=True)
    return torch.where(number > 0, total / number.clamp(min=1), newest)


def push_and_predict(
    query: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    windows: torch.Tensor,
    starts: torch.Tensor,
    *,
    prediction: str,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    eps: float,
    sign: int,
    normalise: str,
) -> torch.Tensor:
    """Push and predict; see `tandemkv.kernels.query_window.push_and_predict`."""
    places = windows.shape[1]
    size = places - 1
    windows[rows, positions % places] = query.to(windows.dtype)
    ages = torch.arange(size - 1, -1, -1, device=query.device)  # newest last
    at = positions[:, None] - ages
    window = windows[rows[:, None], at % places].float()  # [B, W + 1, Hq, D]
    count = (positions - starts[rows] + 1).clamp(1, size)
    if cos is not None and sin is not None:
        cos, sin = cos[ages].unsqueeze(1), sin[ages].unsqueeze(1)  # [W + 1, 1, D / 2]
        first, second = window.chunk(2, dim=-1)
        window = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    window = window.transpose(1, 2)
    counts = count[:, None].expand(window.shape[:2])
    if prediction == "mean":
        return mean_predict(window, counts)
    return ridge_predict(window, counts, eps=eps, sign=sign, normalise=normalise)


def _is_there(window: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    size = window.shape[-2]
    return torch.arange(size, device=window.device) >= size - count.unsqueeze(-1)
