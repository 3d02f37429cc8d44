# SPDX-License-Identifier: Apache-2.0
"""Scores of pages of keys by the largest logit that a key in them could have.

Called by selection policies, each step for a batch.
"""

import torch

from tandemkv.kernels.check import FLOATS, INTS, Dims, check_int, fail
from tandemkv.kernels.dispatch import uses_triton
from tandemkv.kernels.score import POOLINGS, pool_heads


def score_pages(
    q: torch.Tensor,
    bounds: torch.Tensor,
    rows: torch.Tensor,
    lo: torch.Tensor,
    hi: torch.Tensor,
    *,
    num_pages: int,
    page_tokens: int,
    scale: float,
    pooling: str = "softmax_mean",
) -> torch.Tensor:
    """Score the pages that each request's candidate positions ``[lo, hi)`` are in.

    With the least and the largest of each key component in a page,
    ``sum_d max(q_d low_d, q_d high_d)`` is no less than the logit of any key in it.

    Parameters
    ----------
    q : torch.Tensor
        ``[num_reqs, num_qo_heads, head_dim]``, float. Query head j belongs to
        KV head ``j // gqa_group_size``.
    bounds : torch.Tensor
        ``[2, num_rows, max_pages, num_kv_heads, head_dim]``, float, dense in the last dimension:
        low and high. Page p has the positions from ``p * page_tokens`` on. Only pages with
        candidates are read.
    rows : torch.Tensor
        ``[num_reqs]``, int32 or int64. Row of each request in `bounds`.
    lo, hi : torch.Tensor
        ``[num_reqs]``, int32 or int64, ``0 <= lo``, ``hi <= num_pages * page_tokens``. A request
        with ``hi <= lo`` has no candidates.
    num_pages : int
        Width of the result, on the host so that nothing waits for a device; at most `max_pages`.
    page_tokens : int
        Positions of a page.
    scale : float
        Factor of the logits, above 0, usually ``head_dim ** -0.5``.
    pooling : str
        How a KV head's query heads are combined, as in `tandemkv.kernels.score.KeyScan`; the
        softmax is over pages.

    Returns
    -------
    torch.Tensor
        ``[num_reqs, num_kv_heads, num_pages]``, float32, ``-inf`` for pages without candidates.

    Notes
    -----
    On a GPU one launch, two for ``softmax_mean``. The grid depends on sizes only, and programs
    whose pages have no candidates read nothing, so a captured graph may be replayed with other
    `rows`, `lo` and `hi` (these are not checked there). Queries are rounded to the dtype of
    `bounds`; float32 stays float32. In plain torch it loops over requests and reads `rows`, `lo`
    and `hi` on the host.

    References
    ----------
    Tang et al., *Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference*,
    arXiv:2406.10774, Algorithm 1.
    """
    dims = Dims()
    dims.check("q", q, "num_reqs num_qo_heads head_dim", FLOATS)
    dims.check("bounds", bounds, "two num_rows max_pages num_kv_heads head_dim", FLOATS)
    for name, tensor in (("rows", rows), ("lo", lo), ("hi", hi)):
        dims.check(name, tensor, "num_reqs", INTS)
    dims.check_groups("num_qo_heads", "num_kv_heads")
    if dims["two"] != 2:
        fail("bounds.shape[0]", dims["two"], "2 (low, high)")
    if bounds.stride(4) != 1:  # a copy would be made in silence, and in every captured layer
        fail("bounds.stride(4)", bounds.stride(4), "1")
    check_int("num_pages", num_pages, minimum=0, maximum=dims["max_pages"])
    check_int("page_tokens", page_tokens, minimum=1)
    if pooling not in POOLINGS:
        fail("pooling", repr(pooling), f"one of {POOLINGS}")
    if uses_triton(q.device):
        from tandemkv.kernels.triton_ops.page_bounds import score_pages as on_gpu

        return on_gpu(
            q, bounds, rows, lo, hi, num_pages=num_pages, page_tokens=page_tokens, scale=scale,
            pooling=pooling,
        )  # fmt: skip
    num_reqs, num_heads = len(q), bounds.shape[3]
    scores = torch.full((num_reqs, num_heads, num_pages), float("-inf"), device=q.device)
    grouped = q.float().reshape(num_reqs, num_heads, -1, q.shape[2])
    ranges = zip(rows.tolist(), lo.tolist(), hi.tolist(), strict=True)
    for req, (row, first, last) in enumerate(ranges):
        if last <= first:
            continue
        if first < 0 or last > num_pages * page_tokens:
            limit = f"in [0, {num_pages * page_tokens}] (num_pages * page_tokens)"
            fail(f"[lo, hi) of request {req}", (first, last), limit)
        used = slice(first // page_tokens, -(-last // page_tokens))
        low, high = bounds[:, row, used].float().permute(0, 2, 3, 1)  # [H, D, n] each
        logits = grouped[req].clamp(min=0) @ high
        logits += grouped[req].clamp(max=0) @ low
        scores[req, :, used] = pool_heads(logits * scale, pooling)
    return scores
