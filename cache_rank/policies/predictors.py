# SPDX-License-Identifier: Apache-2.0
"""Predict a query from the window of those before it. Pure functions, batched.

A window is ``[..., W + 1, D]``: the latest W + 1 queries, newest last. `count` ``[...]`` says
how many of them there are; older places are ignored, whatever they hold.
"""

from __future__ import annotations

import torch

_MIN_EPS = 1e-6


def predict_mean(window: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return the mean of the queries there are, ``[..., D]``; `count` is at least 1."""
    there = _is_there(window, count)
    kept = torch.where(there.unsqueeze(-1), window, 0)
    return kept.sum(-2) / there.sum(-1, keepdim=True)


def predict_ridge(
    window: torch.Tensor,
    count: torch.Tensor,
    *,
    eps: float,
    sign: int,
    normalise: str,
) -> torch.Tensor:
    r"""Predict the next query by assembled ridge regression.

    For each size k = 1..W for which there are k predecessors of the newest query q_t: regress
    q_t on ``Qh = [q_{t-k} .. q_{t-1}]`` (Eq. 2: ``G = Qh Qh^T + eps I``, ``b = Qh q_t``),
    ``w = softmax(G^-1 b)`` (Eq. 3), apply the weights one step later,
    ``q^ = sum_i w_i q_{i+1}`` (Eq. 4); average over the sizes (Eq. 5). With no predecessor,
    the newest query itself.

    Parameters
    ----------
    window : torch.Tensor
        ``[..., W + 1, D]``, float32 or float64.
    count : torch.Tensor
        ``[...]`` int64, at least 1.
    eps : float
        Regulariser, relative to the mean of the diagonal of ``Qh Qh^T``; not below 1e-6, so
        that G is invertible.
    sign : {1, -1}
        Sign in the softmax: 1 as in Eq. 3, -1 as in Algorithm 1.
    normalise : {"softmax", "none"}
        Normalisation of the weights; ``none`` is the regression as such.

    Returns
    -------
    torch.Tensor
        ``[..., D]``.
    """
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
    ridge = diagonal.sum(-1) / sizes * max(eps, _MIN_EPS) + torch.finfo(gram.dtype).tiny
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


def _is_there(window: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    size = window.shape[-2]
    return torch.arange(size, device=window.device) >= size - count.unsqueeze(-1)
