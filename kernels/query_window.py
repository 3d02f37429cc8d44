# SPDX-License-Identifier: Apache-2.0
"""Predict a query from the window of those before it.

Called by the policies that select for a later step: `ridge_predict` with windows that a
policy keeps on the host, `push_and_predict` inside a captured decode step.
"""

from __future__ import annotations

import torch

from tandemkv.kernels.check import FLOAT32, FLOATS, INT64, INTS, Dims, check_int, fail
from tandemkv.kernels.dispatch import uses_triton

NORMALISATIONS = ("softmax", "none")
PREDICTIONS = ("ridge", "mean")
# W x W systems for all W sizes lie in the registers of one program.
MAX_RIDGE_WINDOW = 16
MIN_EPS = 1e-6


def _check_window(window: torch.Tensor, count: torch.Tensor) -> None:
    if window.dtype not in (torch.float32, torch.float64):
        fail("window.dtype", window.dtype, "float32 or float64")
    if window.ndim < 2 or window.shape[-2] < 2:
        fail("window.shape", tuple(window.shape), "[..., W + 1, D] with W of at least 1")
    if count.shape != window.shape[:-2] or count.dtype not in INTS:
        fail("count", f"{count.dtype}{tuple(count.shape)}", f"integers {tuple(window.shape[:-2])}")
    if count.device != window.device:
        fail("count.device", count.device, f"{window.device}, as the other arguments")


def _check_ridge(eps: float, sign: int, normalise: str) -> None:
    if not eps >= 0:
        fail("eps", eps, ">= 0")
    if sign not in (1, -1):
        fail("sign", sign, "1 or -1")
    if normalise not in NORMALISATIONS:
        fail("normalise", repr(normalise), f"one of {NORMALISATIONS}")


def mean_predict(window: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return the mean of the queries there are.

    Parameters
    ----------
    window, count : torch.Tensor
        As in `ridge_predict`.

    Returns
    -------
    torch.Tensor
        ``[..., D]``, as `window`.
    """
    _check_window(window, count)
    there = _is_there(window, count)
    kept = torch.where(there.unsqueeze(-1), window, 0)
    return kept.sum(-2) / there.sum(-1, keepdim=True)


def ridge_predict(
    window: torch.Tensor, count: torch.Tensor, *, eps: float, sign: int, normalise: str
) -> torch.Tensor:
    r"""Predict the next query by assembled ridge regression.

    For each size k = 1..W for which there are k predecessors of the newest query q_t: regress
    q_t on ``Qh = [q_{t-k} .. q_{t-1}]`` (Eq. 2: ``G = Qh Qh^T + eps I``, ``b = Qh q_t``),
    ``w = softmax(G^-1 b)`` (Eq. 3), apply the weights one step later,
    ``q^ = sum_i w_i q_{i+1}`` (Eq. 4); average over the sizes (Eq. 5). With no predecessor,
    the newest query itself. A size whose system cannot be solved is left out.

    Parameters
    ----------
    window : torch.Tensor
        ``[..., W + 1, D]``, float32 or float64, newest last.
    count : torch.Tensor
        ``[...]``, int32 or int64: queries that there are, at least 1; older places are
        ignored, whatever they hold.
    eps : float
        Regulariser, ``>= 0``, relative to the mean of the diagonal of ``Qh Qh^T``; not below
        1e-6, so that G is invertible.
    sign : {1, -1}
        Sign in the softmax: 1 as in Eq. 3, -1 as in Algorithm 1.
    normalise : {"softmax", "none"}
        Normalisation of the weights; ``none`` is the regression as such.

    Returns
    -------
    torch.Tensor
        ``[..., D]``, as `window`.

    Notes
    -----
    One batch of Cholesky factorisations. No host sync.

    References
    ----------
    *AsyncSpade: Efficient Test-Time Scaling with Asynchronous Sparse Decoding*, Eq. 2-5.
    """
    _check_window(window, count)
    _check_ridge(eps, sign, normalise)
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
    factor, info = torch.linalg.cholesky_ex(system)
    weights = torch.cholesky_solve(right.unsqueeze(-1), factor).squeeze(-1)  # [..., k, W]
    if normalise == "softmax":
        weights = torch.softmax((sign * weights).masked_fill(~inside, float("-inf")), dim=-1)

    predictions = weights @ kept[..., 1:, :]  # [..., k, D]
    usable = sizes < count.unsqueeze(-1)
    usable = usable & (info == 0) & torch.isfinite(predictions).all(-1)
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
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    eps: float = 1e-2,
    sign: int = 1,
    normalise: str = "softmax",
) -> torch.Tensor:
    """Put each request's newest query into its window, and predict a later one from that.

    The query of position p lies in place ``p % (W + 2)``, and the newest W + 1 are read; a window
    holds what was put into it since position ``starts[row]``, without a gap. With `cos` and `sin`
    every query is first rotated from its own position to that of the prediction's use. This is the
    same as to undo RoPE, predict, and rotate the prediction: Gram matrices see differences of
    positions only, and every prediction is linear in the queries. The angles are of W + 1 small
    offsets, so that one table serves all steps and float32 loses nothing at long contexts;
    RoPE's scaling factor cancels.

    Parameters
    ----------
    query : torch.Tensor
        ``[B, Hq, D]``, float, after RoPE, `D` even.
    rows : torch.Tensor
        ``[B]``, int64, distinct but for rows that nobody reads (padding).
    positions : torch.Tensor
        ``[B]``, int64, of `query`.
    windows : torch.Tensor
        ``[num_rows, W + 2, Hq, D]``, float, last dimension dense. Changed in place; queries
        are rounded to its dtype.
    starts : torch.Tensor
        ``[num_rows]``, int64: first position of which the window holds the query. Where it is
        larger than the row's position, the new query is all there is.
    prediction : {"ridge", "mean"}
        `ridge_predict` (W at most 16), or the mean of the queries there are.
    cos, sin : torch.Tensor, optional
        ``[W + 1, D / 2]``, float32: of the angles between the query a steps before the newest
        and the use, for a = 0..W.
    eps, sign, normalise
        As in `ridge_predict`.

    Returns
    -------
    torch.Tensor
        ``[B, Hq, D]`` float32.

    Notes
    -----
    On a GPU one launch, no host sync; shapes alone decide the grid, so a captured graph may be
    replayed with other rows and positions.
    """
    dims = Dims()
    dims.check("query", query, "num_reqs num_qo_heads head_dim", FLOATS)
    dims.check("rows", rows, "num_reqs", INT64)
    dims.check("positions", positions, "num_reqs", INT64)
    dims.check("windows", windows, "num_rows places num_qo_heads head_dim", FLOATS)
    dims.check("starts", starts, "num_rows", INT64)
    if dims["head_dim"] % 2:
        fail("query.shape", tuple(query.shape), "of an even head_dim")
    if windows.stride(-1) != 1:
        fail("windows.stride", windows.stride(), "dense in the last dimension")
    if prediction not in PREDICTIONS:
        fail("prediction", repr(prediction), f"one of {PREDICTIONS}")
    largest = MAX_RIDGE_WINDOW if prediction == "ridge" else None
    check_int("windows.shape[1] - 2", dims["places"] - 2, minimum=1, maximum=largest)
    _check_angles(dims, cos, sin)
    _check_ridge(eps, sign, normalise)
    if uses_triton(query.device):
        from tandemkv.kernels.triton_ops.query_window import push_and_predict as on_gpu

        return on_gpu(
            query, rows, positions, windows, starts, prediction=prediction, cos=cos, sin=sin,
            eps=eps, sign=sign, normalise=normalise,
        )  # fmt: skip
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


def _check_angles(dims: Dims, cos: torch.Tensor | None, sin: torch.Tensor | None) -> None:
    if (cos is None) != (sin is None):
        fail("sin", sin, "given together with cos")
    if cos is not None and sin is not None:
        dims.check("cos", cos, "window half_head_dim", FLOAT32)
        dims.check("sin", sin, "window half_head_dim", FLOAT32)
        if dims["head_dim"] != 2 * dims["half_head_dim"]:
            fail("cos.shape", tuple(cos.shape), f"[W + 1, head_dim / 2 = {dims['head_dim'] / 2:g}]")
        if not (cos.is_contiguous() and sin.is_contiguous()):
            fail("cos.stride", cos.stride(), "contiguous, and sin too")


def _is_there(window: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    size = window.shape[-2]
    return torch.arange(size, device=window.device) >= size - count.unsqueeze(-1)
