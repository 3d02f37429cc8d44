# SPDX-License-Identifier: Apache-2.0
"""Choice of the best-scored positions; called by selection policies."""

import torch

from tandemkv.kernels.check import FLOAT32, INT32, INTS, Dims, check_int, fail
from tandemkv.kernels.dispatch import uses_triton

_INF = float("inf")


def make_topk_scratch(
    num_reqs: int, num_kv_heads: int, k: int, device: torch.device | str
) -> torch.Tensor:
    """Allocate what `topk_positions` works in on a GPU, for the largest call, shared by all layers.

    ``[num_reqs * num_kv_heads, size]`` int32, content undefined; `size` is 0 where the device needs
    nothing.
    """
    device = torch.device(device)
    size = 0
    if device.type == "cuda":
        from tandemkv.kernels.triton_ops.topk import capacity_of

        size = 2 + 2 * capacity_of(k)
    return torch.empty((num_reqs * num_kv_heads, size), dtype=torch.int32, device=device)


def topk_positions(
    scores: torch.Tensor,
    k: int,
    *,
    lo: torch.Tensor | None = None,
    hi: torch.Tensor | None = None,
    sort: bool = True,
    scratch: torch.Tensor | None = None,
    out_scores: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the positions of the `k` highest scores, best first.

    Parameters
    ----------
    scores : torch.Tensor
        ``[num_reqs, num_kv_heads, max_len]``, float32. ``-inf`` and NaN are never chosen.
    k : int
        Positions per head, ``>= 0``; may exceed ``max_len``.
    lo, hi : torch.Tensor, optional
        ``[num_reqs]``, int32 or int64. Only positions of ``[lo, hi)`` count; what stands elsewhere
        may be anything. By default 0 and ``max_len``, to which they are clamped.
    sort : bool
        False leaves the order of the chosen ones open.
    scratch : torch.Tensor, optional
        From `make_topk_scratch`; by default allocated by each call. Calls that
        share it must be on one stream.
    out_scores : torch.Tensor, optional
        ``[num_reqs, num_kv_heads, k]``, float32, contiguous. Written: the scores
        of the chosen positions, ``-inf`` for padding.

    Returns
    -------
    torch.Tensor
        ``[num_reqs, num_kv_heads, k]``, int32, distinct, padded with ``-1`` at
        the end where fewer than `k` scores can be chosen. Of equal scores the lowest positions
        are chosen, and with `sort` come first.

    Notes
    -----
    On a GPU the grid depends on shapes only. Exact for any content; content with very many equal
    scores near the threshold takes a slower path.
    """
    dims = Dims()
    dims.check("scores", scores, "num_reqs num_kv_heads max_len", FLOAT32)
    check_int("k", k, minimum=0)
    for name, bound in (("lo", lo), ("hi", hi)):
        if bound is not None:
            dims.check(name, bound, "num_reqs", INTS)
    if out_scores is not None:
        if out_scores.shape != (*scores.shape[:2], k) or not out_scores.is_contiguous():
            fail("out_scores.shape", tuple(out_scores.shape), f"[num_reqs, heads, k={k}], dense")
        dims.check("out_scores", out_scores, "num_reqs num_kv_heads k", FLOAT32)
    if scratch is not None:
        dims.check("scratch", scratch, "num_rows scratch_size", INT32)
        need = scores.shape[0] * scores.shape[1]
        if scratch.shape[0] < need:
            fail("scratch.shape", tuple(scratch.shape), f"[>= {need}, ...]: make_topk_scratch")
    if uses_triton(scores.device):
        from tandemkv.kernels.triton_ops.topk import topk_positions as on_gpu

        return on_gpu(scores, k, lo=lo, hi=hi, sort=sort, scratch=scratch, out_scores=out_scores)
    num_reqs, num_kv_heads, max_len = scores.shape
    positions = torch.full((num_reqs, num_kv_heads, k), -1, dtype=torch.int32, device=scores.device)
    if out_scores is not None:
        out_scores.fill_(-_INF)
    num_found = min(k, max_len)
    if num_found:
        ranked = torch.nan_to_num(scores, nan=-_INF, posinf=_INF, neginf=-_INF)
        place = torch.arange(max_len, device=scores.device)
        if lo is not None:
            ranked.masked_fill_((place < lo[:, None])[:, None], -_INF)
        if hi is not None:
            ranked.masked_fill_((place >= hi[:, None])[:, None], -_INF)
        # Sorted in any case: padding has to be at the end. One more tells if equal ones are cut.
        values, indices = torch.topk(ranked, min(num_found + 1, max_len), dim=-1, sorted=True)
        is_tied = ((values[..., 1:] == values[..., :-1]) & (values[..., 1:] > -_INF)).any(dim=-1)
        values, indices = values[..., :num_found], indices[..., :num_found]
        if bool(is_tied.any()):
            indices[is_tied] = _lowest_of_equal(ranked[is_tied], num_found)
        positions[..., :num_found] = torch.where(values > -_INF, indices, -1)
        if out_scores is not None:
            out_scores[..., :num_found] = values
    return positions


def _lowest_of_equal(ranked: torch.Tensor, k: int) -> torch.Tensor:
    """Return places ``[n, k]`` of the best of ``[n, max_len]``, of equal ones the lowest first.

    `torch.topk` takes any of them. Few scores are equal as a rule; pooled ones are.
    """
    bits = (ranked + 0.0).view(torch.int32)  # -0.0 equals 0.0
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32
    order -= torch.arange(ranked.shape[-1], device=ranked.device)
    return torch.topk(order, k, dim=-1, sorted=True).indices
