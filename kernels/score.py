# SPDX-License-Identifier: Apache-2.0
"""Scores of cached keys under queries, per KV head.

Called by selection policies, each step for a batch (`score_keys`) and once per
request when prefill ends (`score_window`).
"""

import torch

from tandemkv.kernels.check import FLOATS, INT8, INTS, Dims, check_int, fail
from tandemkv.kernels.dispatch import resolve

POOLINGS = ("softmax_mean", "max_logit", "mean_logit")


def _check_keys(dims: Dims, k_pool: torch.Tensor, k_scale: torch.Tensor | None) -> None:
    dims.check("k_pool", k_pool, "num_slots num_kv_heads head_dim", FLOATS + INT8)
    dims.check_groups("num_qo_heads", "num_kv_heads")
    if k_scale is not None:
        dims.check("k_scale", k_scale, "num_slots num_kv_heads", FLOATS)
    if (k_pool.dtype == torch.int8) != (k_scale is not None):
        given = None if k_scale is None else k_scale.dtype
        fail("k_scale", given, f"given if and only if k_pool is int8; k_pool is {k_pool.dtype}")


def score_keys(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    slots: torch.Tensor,
    lo: torch.Tensor,
    hi: torch.Tensor,
    *,
    width: int,
    scale: float,
    pooling: str = "softmax_mean",
    k_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score each request's candidate positions ``[lo, hi)``.

    Parameters
    ----------
    q : torch.Tensor
        ``[num_reqs, num_qo_heads, head_dim]``, float. Query head j belongs to
        KV head ``j // gqa_group_size``.
    k_pool : torch.Tensor
        ``[num_slots, num_kv_heads, head_dim]``, float or int8.
    slots : torch.Tensor
        ``[num_reqs, max_len]``, int32 or int64. Physical slot of each logical
        position; only ``[lo, hi)`` is read.
    lo, hi : torch.Tensor
        ``[num_reqs]``, int32 or int64, ``0 <= lo``, ``hi <= width``. A request
        with ``hi <= lo`` has no candidates.
    width : int
        Width of the result, on the host so that nothing waits for a device; at
        least the largest `hi`, at most ``max_len``.
    scale : float
        Factor of the logits, usually ``head_dim ** -0.5``.
    pooling : str
        How a KV head's query heads are combined. ``softmax_mean``: mean of the
        softmax over the candidates (after the softmax). ``max_logit``,
        ``mean_logit``: of the scaled logits.
    k_scale : torch.Tensor, optional
        ``[num_slots, num_kv_heads]``, float: scales of an int8 `k_pool`, as
        `quantize_int8` returns them.

    Returns
    -------
    torch.Tensor
        ``[num_reqs, num_kv_heads, width]``, float32; ``-inf`` outside
        ``[lo, hi)``.

    Raises
    ------
    ValueError
        If a shape, dtype, device, `width` or `pooling` differs from the above;
        on CPU also if a range or a slot that it covers is out of bounds.

    Notes
    -----
    The reference uses views where slots are contiguous, loops over requests and
    reads `lo` and `hi` on the host.
    """
    dims = Dims()
    dims.check("q", q, "num_reqs num_qo_heads head_dim", FLOATS)
    _check_keys(dims, k_pool, k_scale)
    dims.check("slots", slots, "num_reqs max_len", INTS)
    dims.check("lo", lo, "num_reqs", INTS)
    dims.check("hi", hi, "num_reqs", INTS)
    check_int("width", width, minimum=0, maximum=dims["max_len"])
    if pooling not in POOLINGS:
        fail("pooling", repr(pooling), f"one of {POOLINGS}")
    run = resolve("score", "score_keys", q.device)
    scores: torch.Tensor = run(
        q, k_pool, slots, lo, hi, width=width, scale=scale, pooling=pooling, k_scale=k_scale
    )
    return scores


def score_window(
    q_window: torch.Tensor,
    k_pool: torch.Tensor,
    slots_row: torch.Tensor,
    lo: int,
    hi: int,
    q_positions: torch.Tensor,
    *,
    scale: float,
    k_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score one request's candidates under a window of causal queries.

    Each query takes a softmax over the candidates at or before its own
    position; the result is the mean over queries and over each head group.

    Parameters
    ----------
    q_window : torch.Tensor
        ``[window_len, num_qo_heads, head_dim]``, float, ``window_len > 0``.
    k_pool, k_scale, scale
        As in `score_keys`.
    slots_row : torch.Tensor
        ``[len]``, int32 or int64. Physical slot of each logical position.
    lo, hi : int
        Candidates are ``[lo, hi)``, ``0 <= lo``, ``0 <= hi <= len``; none if
        ``hi <= lo``.
    q_positions : torch.Tensor
        ``[window_len]``, int32 or int64. Logical positions of the queries. One
        that sees no candidate contributes zeros.

    Returns
    -------
    torch.Tensor
        ``[num_kv_heads, hi]``, float32; ``-inf`` below `lo`, 0 where no query
        sees the position.

    Raises
    ------
    ValueError
        If an argument differs from the above; on CPU also if a slot is out of
        bounds.
    """
    dims = Dims()
    dims.check("q_window", q_window, "window_len num_qo_heads head_dim", FLOATS)
    _check_keys(dims, k_pool, k_scale)
    dims.check("slots_row", slots_row, "len", INTS)
    dims.check("q_positions", q_positions, "window_len", INTS)
    check_int("window_len", dims["window_len"], minimum=1)
    check_int("lo", lo, minimum=0)
    check_int("hi", hi, minimum=0, maximum=dims["len"])
    run = resolve("score", "score_window", q_window.device)
    scores: torch.Tensor = run(
        q_window, k_pool, slots_row, lo, hi, q_positions, scale=scale, k_scale=k_scale
    )
    return scores
