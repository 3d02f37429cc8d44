# SPDX-License-Identifier: Apache-2.0
"""Triton version of `tandemkv.kernels.query_window`: one program per request and query head.

The window is read youngest first, so the systems of all sizes are the leading parts of one
Gram matrix; each has its own regulariser. They are eliminated side by side (Gauss-Jordan
without pivoting: they are positive definite), a register tile ``[W, W, W]``. Predictions are
linear in the queries, so the weights of all sizes are added up before the window is weighed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandemkv.kernels.query_window import MIN_EPS

# Sides of a product of tiles are at least 16.
_MIN_TILE = 16


@triton.jit
def _load_half(base, ages, places, place_stride, at, half, mask, NEWEST_FIRST: tl.constexpr, new):
    tile = tl.load(
        base + places[:, None] * place_stride + at[None, :],
        mask=mask[:, None] & (at < half)[None, :],
        other=0.0,
    ).to(tl.float32)
    # The newest may not have arrived in memory yet.
    if NEWEST_FIRST:
        tile = tl.where(ages[:, None] == 0, new[None, :], tile)
    return tile


@triton.jit
def _turn(first, second, cos, sin, ages, at, half, mask):
    there = mask[:, None] & (at < half)[None, :]
    c = tl.load(cos + ages[:, None] * half + at[None, :], mask=there, other=1.0)
    s = tl.load(sin + ages[:, None] * half + at[None, :], mask=there, other=0.0)
    return first * c - second * s, second * c + first * s


@triton.jit
def _ridge_weights(
    gram, target, count, eps, sign,
    TILE: tl.constexpr, SIZE: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """Weights ``[TILE]`` by age, summed over the sizes that can be used; their number."""
    index = tl.arange(0, TILE)
    # Triton gives the last dimension to the lanes of a warp and the first to a thread's
    # registers, so that the pivot's column is in registers.
    column, system_of, row = index[:, None, None], index[None, :, None], index[None, None, :]
    inside = index[None, :] <= index[:, None]  # [size, age]: index k is the size k + 1
    diagonal = tl.sum(tl.where(index[:, None] == index[None, :], gram, 0.0), 1)
    mean = tl.sum(tl.where(inside, diagonal[None, :] / (index + 1)[:, None], 0.0), 1)
    ridge = mean * eps + 1.1754943508222875e-38
    systems = tl.where((row <= system_of) & (column <= system_of), gram[:, None, :], 0.0)
    systems += tl.where(row == column, tl.where(row <= system_of, ridge[None, :, None], 1.0), 0.0)
    right = tl.where(inside, target[None, :], 0.0)
    solved = tl.full((TILE,), 1, tl.int1)
    for step in tl.static_range(SIZE):
        pivot_column = tl.sum(tl.where(column == step, systems, 0.0), 0)  # [size, row]
        # What is not eliminated yet stays symmetric, what is is zero.
        pivot_row = tl.trans(tl.where(index[None, :] >= step, pivot_column, 0.0))
        is_pivot = index[None, :] == step
        pivot = tl.sum(tl.where(is_pivot, pivot_column, 0.0), 1)  # [size]
        pivot_right = tl.sum(tl.where(is_pivot, right, 0.0), 1)
        solved = solved & (pivot > 0)
        inverse = 1.0 / tl.where(pivot > 0, pivot, 1.0)
        factor = tl.where(is_pivot, 0.0, pivot_column * inverse[:, None])
        systems -= factor[None, :, :] * pivot_row[:, :, None]
        right -= factor * pivot_right[:, None]
    pivots = tl.sum(tl.where(row == column, systems, 0.0), 0)  # [size, row]
    weights = right / tl.where(pivots > 0, pivots, 1.0)
    if SOFTMAX:
        logits = tl.where(inside, sign * weights, float("-inf"))
        weights = tl.exp(logits - tl.max(logits, 1)[:, None])
        weights = weights / tl.sum(weights, 1)[:, None]
    # NaN and infinities differ from themselves times zero.
    total = tl.sum(weights * 0.0, 1)
    usable = solved & (index < SIZE) & (index + 1 < count) & (total == 0.0)
    summed = tl.sum(tl.where(usable[:, None] & inside, weights, 0.0), 0)
    return summed, tl.sum(usable.to(tl.int32), 0)


@triton.jit
def _predict_kernel(
    query, rows, positions, windows, starts, cos, sin, out,
    num_heads, half, eps, sign,
    q_stride_b, q_stride_h, q_stride_d,
    w_stride_row, w_stride_place, w_stride_head,
    SIZE: tl.constexpr, TILE: tl.constexpr, HALF: tl.constexpr, PLACES: tl.constexpr,
    ROTATES: tl.constexpr, IS_RIDGE: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """`SIZE` is W, of the `PLACES` of a row."""
    program = tl.program_id(0).to(tl.int64)
    request, head = program // num_heads, program % num_heads
    at = tl.arange(0, HALF)
    row = tl.load(rows + request)
    position = tl.load(positions + request)
    base = windows + row * w_stride_row + head * w_stride_head
    count = tl.minimum(tl.maximum(position - tl.load(starts + row) + 1, 1), SIZE + 1)
    source = query + request * q_stride_b + head * q_stride_h
    kind = windows.dtype.element_ty
    new_1 = tl.load(source + at * q_stride_d, mask=at < half, other=0.0).to(kind)
    new_2 = tl.load(source + (half + at) * q_stride_d, mask=at < half, other=0.0).to(kind)
    place = base + (position % PLACES) * w_stride_place
    tl.store(place + at, new_1, mask=at < half)
    tl.store(place + half + at, new_2, mask=at < half)
    new_1, new_2 = new_1.to(tl.float32), new_2.to(tl.float32)

    index = tl.arange(0, TILE)
    past_ages = index + 1  # the queries regressed on; each one's successor is one younger
    is_past = (past_ages < count) & (index < SIZE)
    places = tl.where(is_past, (position - past_ages) % PLACES, 0)
    past_1 = _load_half(base, past_ages, places, w_stride_place, at, half, is_past, False, new_1)
    past_2 = _load_half(
        base + half, past_ages, places, w_stride_place, at, half, is_past, False, new_2
    )
    is_next = (index < count) & (index < SIZE)
    places = tl.where(is_next & (index > 0), (position - index) % PLACES, 0)
    is_stored = is_next & (index > 0)
    next_1 = _load_half(base, index, places, w_stride_place, at, half, is_stored, True, new_1)
    next_2 = _load_half(
        base + half, index, places, w_stride_place, at, half, is_stored, True, new_2
    )
    if ROTATES:
        past_1, past_2 = _turn(past_1, past_2, cos, sin, past_ages, at, half, is_past)
        next_1, next_2 = _turn(next_1, next_2, cos, sin, index, at, half, is_next)
    newest_1 = tl.sum(tl.where(index[:, None] == 0, next_1, 0.0), 0)
    newest_2 = tl.sum(tl.where(index[:, None] == 0, next_2, 0.0), 0)
    if IS_RIDGE:
        gram = tl.dot(past_1, tl.trans(past_1), input_precision="ieee")
        gram = tl.dot(past_2, tl.trans(past_2), gram, input_precision="ieee")
        target = tl.sum(past_1 * newest_1[None, :] + past_2 * newest_2[None, :], 1)
        weights, number = _ridge_weights(gram, target, count, eps, sign, TILE, SIZE, SOFTMAX)
        weights = weights / tl.maximum(number, 1)
        result_1 = tl.sum(weights[:, None] * next_1, 0)
        result_2 = tl.sum(weights[:, None] * next_2, 0)
        result_1 = tl.where(number > 0, result_1, newest_1)
        result_2 = tl.where(number > 0, result_2, newest_2)
    else:
        result_1 = (tl.sum(past_1, 0) + newest_1) / count
        result_2 = (tl.sum(past_2, 0) + newest_2) / count
    target_at = out + program * 2 * half + at
    tl.store(target_at, result_1, mask=at < half)
    tl.store(target_at + half, result_2, mask=at < half)


def _sizes(window: int, head_dim: int) -> dict[str, int]:
    return {
        "SIZE": window - 1,
        "TILE": max(_MIN_TILE, triton.next_power_of_2(window - 1)),
        "HALF": max(_MIN_TILE, triton.next_power_of_2(head_dim // 2)),
    }


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
    num_requests, num_heads, dim = query.shape
    out = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    if out.numel():
        _predict_kernel[(num_requests * num_heads,)](
            query, rows.contiguous(), positions.contiguous(), windows, starts.contiguous(),
            windows if cos is None else cos, windows if sin is None else sin, out,
            num_heads, dim // 2, max(eps, MIN_EPS), float(sign),
            *query.stride(), *windows.stride()[:3],
            ROTATES=cos is not None, IS_RIDGE=prediction == "ridge",
            SOFTMAX=normalise == "softmax",
            PLACES=windows.shape[1], **_sizes(windows.shape[1] - 1, dim), num_warps=4,
        )  # fmt: skip
    return out
