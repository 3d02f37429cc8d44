# SPDX-License-Identifier: Apache-2.0
"""Triton version of `tandemkv.kernels.shortlist`: score, then choose in registers.

1. Several programs per head gather the keys of a block of candidates and leave logits, and the
   sum of their exponentials.
2. One program per head adds the sums up, turns logits into scores and searches the threshold.
"""

import math

import torch
import triton
import triton.language as tl

from tandemkv.kernels.score import padded_group
from tandemkv.kernels.shortlist import (
    BLOCK_N,
    MAX_LISTED,
    ShortlistScratch,
    make_shortlist_scratch,
)
from tandemkv.kernels.triton_ops.topk import select_listed
from tandemkv.kernels.triton_ops.topk_search import score_key

_INTERPRETED = bool(triton.knobs.runtime.interpret)
_TRITON_DTYPE = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
_SCORE_WARPS = 4
# Beside a scan of all keys a program waits for as many free registers on one multiprocessor; these
# spill next to nothing (H200, `look_ahead` on one GPU, 8 x 64K: 10.94 ms a step instead of 11.10).
_CHOOSE_REGISTERS = 96


@triton.jit(do_not_specialize=["num_listed"])
def _score_kernel(
    q, k_pool, slots, listed, logits, part_lse,
    factor, num_heads, num_listed, width, num_blocks,
    q_stride_b, q_stride_h, q_stride_d, k_stride_s, k_stride_h, slots_stride_b,
    POOLING: tl.constexpr, GROUP: tl.constexpr, PAD_G: tl.constexpr, BLOCK_G: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    ROUND: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    base, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    req, head = base // num_heads, base % num_heads
    place = block * BLOCK_N + tl.arange(0, BLOCK_N)
    position = tl.load(listed + base * num_listed + place, mask=place < num_listed, other=-1)
    valid = position >= 0
    # What follows the end of a list is not read by the choice, but its sums are.
    if tl.max(position, 0) >= 0:
        page = tl.load(slots + req * slots_stride_b + position // PAGE, mask=valid, other=0)
        slot = page.to(tl.int64) * PAGE + position % PAGE
        member, dim = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
        query = tl.load(
            q + req * q_stride_b + (head * GROUP + member)[None, :] * q_stride_h
            + dim[:, None] * q_stride_d,
            mask=(member < GROUP)[None, :] & (dim < DIM)[:, None], other=0.0,
        ).to(ROUND).to(DOT)  # fmt: skip
        keys = tl.load(
            k_pool + slot[:, None] * k_stride_s + head * k_stride_h + dim[None, :],
            mask=valid[:, None] & (dim < DIM)[None, :], other=0.0,
        ).to(DOT)  # fmt: skip
        x = tl.dot(keys, query, input_precision=PRECISION) * factor
        x = tl.where(valid[:, None], x, float("-inf"))
        tl.store(
            logits + (base * width + place)[:, None] * PAD_G + member[None, :], x,
            mask=(place < width)[:, None] & (member < PAD_G)[None, :],
        )  # fmt: skip
        if POOLING == "softmax_mean":
            top = tl.max(x, 0)
            total = tl.sum(tl.exp2(x - top[None, :]), 0)
            tl.store(
                part_lse + (base * num_blocks + block) * PAD_G + member,
                top + tl.log2(total), mask=member < PAD_G,
            )  # fmt: skip
    elif POOLING == "softmax_mean":
        member = tl.arange(0, BLOCK_G)
        tl.store(
            part_lse + (base * num_blocks + block) * PAD_G + member,
            tl.full([BLOCK_G], float("-inf"), tl.float32), mask=member < PAD_G,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_listed", "k", "num_used"])
def _choose_kernel(
    listed, logits, part_lse, out, out_scores, k, num_listed, width, num_blocks, num_used,
    POOLING: tl.constexpr, GROUP: tl.constexpr, PAD_G: tl.constexpr, BLOCK_S: tl.constexpr,
    CAPACITY: tl.constexpr, BLOCK_PAD: tl.constexpr,
):  # fmt: skip
    base = tl.program_id(0).to(tl.int64)
    out_row, score_row = out + base * k, out_scores + base * k
    member, place = tl.arange(0, PAD_G), tl.arange(0, CAPACITY)
    position = tl.load(listed + base * num_listed + place, mask=place < num_listed, other=-1)
    valid = position >= 0
    num_chosen = tl.zeros([], tl.int32)
    if tl.max(position, 0) >= 0:
        x = tl.load(
            logits + (base * width + place)[:, None] * PAD_G + member[None, :],
            mask=valid[:, None], other=float("-inf"),
        )  # fmt: skip
        if POOLING == "softmax_mean":
            part = tl.arange(0, BLOCK_S)
            parts = tl.load(
                part_lse + (base * num_blocks + part)[:, None] * PAD_G + member[None, :],
                mask=(part < num_used)[:, None], other=float("-inf"),
            )  # fmt: skip
            top = tl.max(parts, 0)
            lse = top + tl.log2(tl.sum(tl.exp2(parts - top[None, :]), 0))
            lse = tl.where(member < GROUP, lse, float("inf"))
            score = tl.sum(tl.exp2(x - lse[None, :]), 1) / GROUP
        elif POOLING == "max_logit":
            score = tl.max(tl.where((member < GROUP)[None, :], x, float("-inf")), 1)
        else:
            score = tl.sum(tl.where((member < GROUP)[None, :], x, 0.0), 1) / GROUP
        key = score_key(tl.where(valid, score, float("-inf")))
        num_chosen = select_listed(out_row, score_row, key, position, k, True)
    start = num_chosen
    while start < k:
        column = start + tl.arange(0, BLOCK_PAD)
        tl.store(out_row + column, -1, mask=column < k)
        tl.store(score_row + column, float("-inf"), mask=column < k)
        start += BLOCK_PAD


def choose_listed(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    slots: torch.Tensor,
    listed: torch.Tensor,
    k: int,
    *,
    scale: float,
    pooling: str,
    page_size: int,
    scratch: ShortlistScratch | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose positions; see `tandemkv.kernels.shortlist.choose_listed`."""
    num_reqs, num_qo_heads, dim = q.shape
    heads, width = listed.shape[1:]
    out = torch.empty((num_reqs, heads, k), dtype=torch.int32, device=q.device)
    out_scores = torch.empty(out.shape, dtype=torch.float32, device=q.device)
    if not listed.numel():
        return out.fill_(-1), out_scores.fill_(float("-inf"))
    if width > MAX_LISTED:
        message = (
            f"listed.shape={tuple(listed.shape)}: must have <= {MAX_LISTED} in a list on a GPU; "
            "use a smaller shortlist_factor"
        )
        raise ValueError(message)
    # Copies of a pool would be made in silence, and in every captured layer.
    if k_pool.stride(-1) != 1 or slots.stride(1) != 1 or not listed.is_contiguous():
        message = "k_pool and slots must be dense in their last dimension, listed contiguous"
        raise ValueError(message)
    if scratch is None:
        scratch = make_shortlist_scratch(num_reqs, num_qo_heads, heads, width, q.device)
    group, num_used = num_qo_heads // heads, triton.cdiv(width, BLOCK_N)
    pad_g, num_rows = padded_group(group), num_reqs * heads
    capacity = triton.next_power_of_2(width)
    buffers = (scratch.logits, scratch.part_lse)
    sizes = (width, scratch.logits.shape[1], scratch.part_lse.shape[1])
    is_softmax = pooling == "softmax_mean"
    # The interpreter multiplies bfloat16 as if its bits were integers.
    multiplied = torch.float32 if _INTERPRETED else k_pool.dtype
    _score_kernel[(num_rows, num_used)](
        q, k_pool, slots, listed, *buffers,
        scale * (math.log2(math.e) if is_softmax else 1.0), heads, *sizes,
        *q.stride(), *k_pool.stride()[:2], slots.stride(0),
        POOLING=pooling, GROUP=group, PAD_G=pad_g, BLOCK_G=max(16, pad_g), PAGE=page_size,
        BLOCK_N=BLOCK_N, DIM=dim, BLOCK_D=max(16, triton.next_power_of_2(dim)),
        ROUND=_TRITON_DTYPE[k_pool.dtype], DOT=_TRITON_DTYPE[multiplied],
        PRECISION="ieee" if k_pool.dtype == torch.float32 else "tf32", num_warps=_SCORE_WARPS,
    )  # fmt: skip
    _choose_kernel[(num_rows,)](
        listed, *buffers, out, out_scores, k, *sizes, num_used,
        POOLING=pooling, GROUP=group, PAD_G=pad_g, BLOCK_S=triton.next_power_of_2(num_used),
        CAPACITY=capacity, BLOCK_PAD=1024, num_warps=8 if capacity <= 4096 else 16,
        maxnreg=_CHOOSE_REGISTERS if capacity <= 4096 else None,
    )  # fmt: skip
    return out, out_scores
