# SPDX-License-Identifier: Apache-2.0
"""Choice of the best-scored positions; called by selection policies."""

import torch

from tandemkv.kernels.check import FLOAT32, INT32, INTS, Dims, check_int, fail
from tandemkv.kernels.dispatch import resolve


def make_topk_scratch(
    num_reqs: int, num_kv_heads: int, k: int, device: torch.device | str
) -> torch.Tensor:
    """Allocate what `topk_positions` works in on a GPU, to be shared by all layers.

    Parameters
    ----------
    num_reqs, num_kv_heads, k : int
        The largest of the calls that use it.
    device : torch.device or str
        Theirs.

    Returns
    -------
    torch.Tensor
        ``[num_reqs * num_kv_heads, size]``, int32, content undefined; `size` is 0
        where the device needs nothing.
    """
    device = torch.device(device)
    size = 0
    if device.type == "cuda":
        capacity: int = resolve("topk", "capacity_of", device)(k)
        size = 2 + 2 * capacity
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
        ``[num_reqs, num_kv_heads, max_len]``, float32. ``-inf`` and NaN are
        never chosen.
    k : int
        Positions per head, ``>= 0``; may exceed ``max_len``.
    lo, hi : torch.Tensor, optional
        ``[num_reqs]``, int32 or int64. Only positions of ``[lo, hi)`` count; what
        stands elsewhere may be anything. By default 0 and ``max_len``, to which
        they are clamped.
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
    On a GPU asynchronous, without host sync and CUDA-graph safe: the grid depends on
    shapes only. Exact for any content; content with very many equal scores
    near the threshold takes a slower path.
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
    run = resolve("topk", "topk_positions", scores.device)
    positions: torch.Tensor = run(
        scores, k, lo=lo, hi=hi, sort=sort, scratch=scratch, out_scores=out_scores
    )
    return positions
