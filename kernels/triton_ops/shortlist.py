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
from tandemkv.kernels.shortlist import BLOCK_N, ShortlistScratch, make_shortlist_scratch
from tandemkv.kernels.triton_ops.topk import select_listed
from tandemkv.kernels.triton_ops.topk_search import score_key

_INTERPRETED = bool(triton.knobs.runtime.interpret)
_TRITON_DTYPE = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
_SCORE_WARPS = 4
_MAX_WIDTH = 16384  # keys that one program keeps in registers
_COPY_BLOCK = 2048


@triton.jit
def _ends(lo, hi, active, req):
    begin = tl.maximum(tl.load(lo + req), 0)
    return begin, tl.where(tl.load(active + req) != 0, tl.load(hi + req), 0)


@triton.jit
def _positions_at(listed, covered, begin, end, place, num_listed, num_new):
    """Return the candidates at places of a list that goes on with what came later."""
    first_new = tl.maximum(tl.maximum(covered, end - num_new), begin)
    in_list = place < num_listed
    position = tl.load(listed + place, mask=in_list, other=-1)
    position = tl.where(in_list, position, first_new + (place - num_listed))
    valid = (position >= begin) & (position < end) & (place < num_listed + num_new)
    return position, valid


@triton.jit(do_not_specialize=["num_listed"])
def _score_kernel(
    q, k_pool, slots, positions, covered, rows, lo, hi, active, logits, part_lse,
    factor, num_heads, num_listed, num_new, width, num_blocks,
    q_stride_b, q_stride_h, q_stride_d, k_stride_s, k_stride_h, slots_stride_b,
    POOLING: tl.constexpr, GROUP: tl.constexpr, PAD_G: tl.constexpr, BLOCK_G: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    ROUND: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    base, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    req, head = base // num_heads, base % num_heads
    begin, end = _ends(lo, hi, active, req)
    if end > begin:
        row = tl.load(rows + req)
        place = block * BLOCK_N + tl.arange(0, BLOCK_N)
        listed = positions + (row * num_heads + head) * num_listed
        position, valid = _positions_at(
            listed, tl.load(covered + row), begin, end, place, num_listed, num_new
        )
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
            shown = tl.where(top > float("-inf"), top, 0.0)
            total = tl.sum(tl.exp2(x - shown[None, :]), 0)
            tl.store(
                part_lse + (base * num_blocks + block) * PAD_G + member,
                shown + tl.log2(total), mask=member < PAD_G,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_listed", "k", "every", "phase", "num_used"])
def _choose_kernel(
    positions, covered, rows, lo, hi, active, logits, part_lse, step, due, out, out_scores,
    k, num_heads, num_listed, num_new, width, num_blocks, num_used, every, phase,
    POOLING: tl.constexpr, GROUP: tl.constexpr, PAD_G: tl.constexpr, BLOCK_S: tl.constexpr,
    CAPACITY: tl.constexpr, BLOCK_PAD: tl.constexpr,
):  # fmt: skip
    base = tl.program_id(0).to(tl.int64)
    req, head = base // num_heads, base % num_heads
    begin, end = _ends(lo, hi, active, req)
    out_row, score_row = out + base * k, out_scores + base * k
    num_chosen = tl.zeros([], tl.int32)
    row = tl.load(rows + req)
    seen = tl.load(covered + row)
    if head == 0:
        is_due = (tl.load(step) + phase) % every == 0
        is_due = (is_due | (end - seen > num_new)) & (tl.load(active + req) != 0)
        tl.store(due + req, is_due.to(tl.int8))
    if end > begin:
        member = tl.arange(0, PAD_G)
        place = tl.arange(0, CAPACITY)
        listed = positions + (row * num_heads + head) * num_listed
        position, valid = _positions_at(listed, seen, begin, end, place, num_listed, num_new)
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
            top = tl.where(top > float("-inf"), top, 0.0)
            lse = top + tl.log2(tl.sum(tl.exp2(parts - top[None, :]), 0))
            lse = tl.where((member < GROUP) & (lse > float("-inf")), lse, float("inf"))
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


@triton.jit(do_not_specialize=["num_listed"])
def _store_kernel(
    found, hi, due, rows, positions, covered, num_heads, num_listed, BLOCK: tl.constexpr
):  # fmt: skip
    base, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    req, head = base // num_heads, base % num_heads
    if tl.load(due + req) != 0:
        row = tl.load(rows + req)
        place = block * BLOCK + tl.arange(0, BLOCK)
        mask = place < num_listed
        position = tl.load(found + base * num_listed + place, mask=mask, other=-1)
        tl.store(
            positions + (row * num_heads + head) * num_listed + place, position, mask=mask
        )  # fmt: skip
        if (head == 0) & (block == 0):
            tl.store(covered + row, tl.load(hi + req))


def choose_shortlisted(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    covered: torch.Tensor,
    rows: torch.Tensor,
    lo: torch.Tensor,
    hi: torch.Tensor,
    k: int,
    *,
    num_new: int,
    active: torch.Tensor,
    step: torch.Tensor,
    every: int,
    phase: int,
    due: torch.Tensor,
    scale: float,
    pooling: str,
    page_size: int,
    scratch: ShortlistScratch | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose positions; see `tandemkv.kernels.shortlist.choose_shortlisted`."""
    num_reqs, num_qo_heads, dim = q.shape
    heads, num_listed = positions.shape[1:]
    out = torch.empty((num_reqs, heads, k), dtype=torch.int32, device=q.device)
    out_scores = torch.empty(out.shape, dtype=torch.float32, device=q.device)
    if not num_reqs:
        return out, out_scores
    width, group = num_listed + num_new, num_qo_heads // heads
    if width > _MAX_WIDTH:
        message = f"num_listed + num_new = {width}: must be <= {_MAX_WIDTH}"
        raise ValueError(message)
    # Copies of a pool would be made in silence, and in every captured layer.
    if k_pool.stride(-1) != 1 or slots.stride(1) != 1 or not positions.is_contiguous():
        message = "k_pool, slots and positions must be dense in their last dimensions"
        raise ValueError(message)
    if scratch is None:
        scratch = make_shortlist_scratch(num_reqs, num_qo_heads, heads, width, q.device)
    pad_g, num_used = padded_group(group), triton.cdiv(width, BLOCK_N)
    num_rows, capacity = num_reqs * heads, triton.next_power_of_2(width)
    ranges = (covered, rows, lo, hi, active.view(torch.int8), scratch.logits, scratch.part_lse)
    sizes = (num_listed, num_new, scratch.logits.shape[1], scratch.part_lse.shape[1])
    is_softmax = pooling == "softmax_mean"
    # The interpreter multiplies bfloat16 as if its bits were integers.
    multiplied = torch.float32 if _INTERPRETED else k_pool.dtype
    _score_kernel[(num_rows, num_used)](
        q, k_pool, slots, positions, *ranges,
        scale * (math.log2(math.e) if is_softmax else 1.0), heads, *sizes,
        *q.stride(), *k_pool.stride()[:2], slots.stride(0),
        POOLING=pooling, GROUP=group, PAD_G=pad_g, BLOCK_G=max(16, pad_g), PAGE=page_size,
        BLOCK_N=BLOCK_N, DIM=dim, BLOCK_D=max(16, triton.next_power_of_2(dim)),
        ROUND=_TRITON_DTYPE[k_pool.dtype], DOT=_TRITON_DTYPE[multiplied],
        PRECISION="ieee" if k_pool.dtype == torch.float32 else "tf32", num_warps=_SCORE_WARPS,
    )  # fmt: skip
    _choose_kernel[(num_rows,)](
        positions, *ranges, step, due.view(torch.int8), out, out_scores, k, heads, *sizes,
        num_used, every, phase, POOLING=pooling, GROUP=group, PAD_G=pad_g,
        BLOCK_S=triton.next_power_of_2(num_used), CAPACITY=capacity, BLOCK_PAD=1024,
        num_warps=8 if capacity <= 4096 else 16,
    )  # fmt: skip
    return out, out_scores


def store_shortlist(
    found: torch.Tensor,
    hi: torch.Tensor,
    due: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    covered: torch.Tensor,
) -> None:
    """Replace shortlists; see `tandemkv.kernels.shortlist.store_shortlist`."""
    num_reqs, heads, num_listed = found.shape
    if not found.numel():
        return
    _store_kernel[(num_reqs * heads, triton.cdiv(num_listed, _COPY_BLOCK))](
        found, hi, due.view(torch.int8), rows, positions, covered, heads, num_listed,
        BLOCK=_COPY_BLOCK,
    )  # fmt: skip
