# SPDX-License-Identifier: Apache-2.0
"""Triton version of `tandemkv.kernels.position_pooling`: neighbours are read from the cache."""

import torch
import triton
import triton.language as tl

_BLOCK, _NUM_WARPS = 1024, 4


@triton.jit(do_not_specialize=["max_len"])
def _pool_kernel(
    scores, out, max_len, num_heads, stride_b, stride_h,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = scores + (row // num_heads) * stride_b + (row % num_heads) * stride_h
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < max_len
    own = tl.load(base + place, mask=inside, other=float("-inf"))
    best = tl.where(own == own, own, float("-inf"))
    for distance in range(1, BEFORE + 1):
        at = place - distance
        other = tl.load(base + at, mask=inside & (at >= 0), other=float("-inf"))
        # A comparison with NaN is false: what is no number is nobody's best.
        best = tl.where(other > best, other, best)
    for distance in range(1, AFTER + 1):
        at = place + distance
        other = tl.load(base + at, mask=at < max_len, other=float("-inf"))
        best = tl.where(other > best, other, best)
    pooled = tl.where(own > float("-inf"), best, float("-inf"))
    tl.store(out + row * max_len + place, pooled, mask=inside)


def pool_positions(scores: torch.Tensor, before: int, after: int) -> torch.Tensor:
    """Pool; see `tandemkv.kernels.position_pooling.pool_positions`."""
    num_reqs, num_heads, max_len = scores.shape
    out = torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
    _pool_kernel[(num_reqs * num_heads, triton.cdiv(max_len, _BLOCK))](
        scores, out, max_len, num_heads, scores.stride(0), scores.stride(1),
        BEFORE=before, AFTER=after, BLOCK=_BLOCK, num_warps=_NUM_WARPS,
    )  # fmt: skip
    return out
