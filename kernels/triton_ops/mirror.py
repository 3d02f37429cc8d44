# SPDX-License-Identifier: Apache-2.0
"""Triton version of `tandemkv.kernels.mirror`: one program per head, one launch.

The program writes the inverse of the mirror, position -> slot, into scratch
memory, looks the selected positions up in it, and takes back what it wrote. Lists
go through memory between barriers: what missing position *j* gets, slot *j* is.
"""

import torch
import triton
import triton.language as tl

from tandemkv.kernels.triton_ops.topk_search import reach, score_key

MAX_RESIDENT = 32767  # two counts of slots share 32 bits
_NUM_WARPS, _CHUNK = 16, 32
_MIN_BLOCK, _MAX_HEAD = 16, 256
_FIRST = tl.constexpr(1 << 30)


@triton.jit
def _rank(order, order_of, count, CHUNK: tl.constexpr):
    """Return how many of the first `count` entries of a list in memory `order` comes after."""
    rank = tl.zeros_like(order).to(tl.int32)
    start = tl.zeros([], tl.int32)
    while start < count:
        place = start + tl.arange(0, CHUNK)
        other = tl.load(order_of + place, mask=place < count, other=2**63 - 1)
        rank += tl.sum((other[None, :] < order[:, None]).to(tl.int32), 1)
        start += CHUNK
    return rank


@triton.jit
def _take_missing(
    out, order_of, select, missing, scores, num_missing, count,
    HAS_SCORES: tl.constexpr, BLOCK_CAP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the `count` best missing positions to `out`, best first."""
    if HAS_SCORES:
        key = tl.where(missing, tl.maximum(score_key(scores), -(2**31) + 1), -(2**31))
        keep = missing
        if num_missing > count:
            low = tl.min(tl.where(missing, key, 2**31 - 1), 0)
            top = tl.max(key, 0) + 1
            bound, found = reach(key, count, low, top, num_missing, 0)
            keep = key >= bound
            if found > count:  # of those with the last score, the lowest positions
                need = count - tl.sum((key > bound).to(tl.int32), 0)
                back = tl.where(key == bound, -select, -(2**31))
                last, _ = reach(back, need, -(2**31) + 1, 1, found - count + need, 0)
                keep = (key > bound) | (back >= last)
        place = tl.cumsum(keep.to(tl.int32), 0) - 1
        order = ((-(key.to(tl.int64))) << 31) + select
        tl.store(order_of + place, order, mask=keep)
        tl.debug_barrier()
        column = tl.arange(0, BLOCK_CAP)
        mine = tl.load(order_of + column, mask=column < count, other=0)
        rank = _rank(mine, order_of, count, CHUNK)
        tl.store(out + rank, (mine & 0x7FFFFFFF).to(tl.int32), mask=column < count)
        tl.debug_barrier()
    else:
        place = tl.cumsum(missing.to(tl.int32), 0) - 1
        tl.store(out + place, select, mask=missing & (place < count))


@triton.jit
def _take_victims(
    out, order_of, slot, used, may_evict, count, BLOCK_CAP: tl.constexpr, CHUNK: tl.constexpr
):
    """Write the `count` least recently used slots to `out`, oldest first."""
    lowest: tl.constexpr = -(2**31)  # below any -used of int32; int64 steps stay within it too
    age = tl.where(may_evict, -used, lowest)
    num_evict = tl.sum(may_evict.to(tl.int32), 0)
    low = tl.min(tl.where(may_evict, age, 2**31 - 1), 0)
    top = tl.max(age, 0) + 1
    bound, _ = reach(age, count, low, top, num_evict, 0)
    older, tie = may_evict & (age > bound), may_evict & (age == bound)
    need = count - tl.sum(older.to(tl.int32), 0)
    counts = tl.cumsum((older.to(tl.int32) << 16) + tie.to(tl.int32), 0)
    tie_rank = counts & 0xFFFF
    keep = older | (tie & (tie_rank <= need))
    place = (counts >> 16) + tl.minimum(tie_rank, need) - 1
    tl.store(order_of + place, (-(age.to(tl.int64)) << 16) + slot, mask=keep)
    tl.debug_barrier()
    column = tl.arange(0, BLOCK_CAP)
    mine = tl.load(order_of + column, mask=column < count, other=0)
    rank = _rank(mine, order_of, count, CHUNK)
    tl.store(out + rank, (mine & 0xFFFF).to(tl.int32), mask=column < count)


@triton.jit(
    do_not_specialize=[
        "step",
        "lo",
        "num_protected",
        "cap",
        "num_resident",
        "num_selected",
        "max_context",
    ]
)
def _mirror_kernel(
    selected, selected_scores, resident_pos, last_used, rows, step, num_target, hi, active,
    counters, slot_of, orders, fetch_pos, fetch_slot,
    num_heads, num_selected, num_resident, num_protected, lo, cap, max_context,
    sel_stride_b, sel_stride_h, sel_stride_n, score_stride_b, score_stride_h, score_stride_n,
    pos_stride_b, pos_stride_h, pos_stride_n, used_stride_b, used_stride_h, used_stride_n,
    step_stride, map_stride_b, map_stride_h,
    HAS_SCORES: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_ACTIVE: tl.constexpr,
    HAS_COUNTERS: tl.constexpr, IS_TENSOR: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_HEAD: tl.constexpr, BLOCK_CAP: tl.constexpr,
    BLOCK_FILL: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    req, head = index // num_heads, index % num_heads
    # A row that is not active has neither slots nor selected positions.
    is_active = req >= 0
    if HAS_ACTIVE:
        is_active = tl.load(active + req) != 0
    now = step
    if IS_TENSOR:
        now = tl.load(step + req * step_stride)
    now = now.to(last_used.dtype.element_ty)
    book = req
    if HAS_ROWS:
        book = tl.load(rows + req).to(tl.int64)
    positions = resident_pos + book * pos_stride_b + head * pos_stride_h
    uses = last_used + book * used_stride_b + head * used_stride_h
    slot_of += req * map_stride_b + head * map_stride_h
    out_pos, out_slot, orders = (
        fetch_pos + index * cap,
        fetch_slot + index * cap,
        orders + index * cap,
    )

    # The first slots, protected ones, stand apart where that halves the block of the others.
    num_first = tl.zeros([], tl.int32)
    num_filled, num_empty_first = num_first, num_first
    if BLOCK_HEAD:
        num_first = num_resident - BLOCK_R
        first_slot = tl.arange(0, BLOCK_HEAD)
        in_first = (first_slot < num_first) & is_active
        first_position = tl.load(positions + first_slot * pos_stride_n, mask=in_first, other=-1)
        num_filled = tl.sum((first_position >= 0).to(tl.int32), 0)
        num_empty_first = tl.where(is_active, num_first - num_filled, 0)
    slot = num_first + tl.arange(0, BLOCK_R)
    in_set = (slot < num_resident) & is_active
    position = tl.load(positions + slot * pos_stride_n, mask=in_set, other=-1)
    is_filled = position >= 0
    is_empty = in_set & (position < 0)
    place = tl.arange(0, BLOCK_K)
    select = tl.load(
        selected + req * sel_stride_b + head * sel_stride_h + place * sel_stride_n,
        mask=(place < num_selected) & is_active, other=-1,
    )  # fmt: skip
    scores = tl.zeros([BLOCK_K], tl.float32)
    if HAS_SCORES:
        base = selected_scores + req * score_stride_b + head * score_stride_h
        scores = tl.load(
            base + place * score_stride_n, mask=(place < num_selected) & is_active, other=0.0
        )
    is_token = (select >= 0) & (select < max_context)
    tl.store(slot_of + position, slot, mask=is_filled)
    if BLOCK_HEAD:
        tl.store(slot_of + first_position, first_slot, mask=first_position >= 0)
    tl.debug_barrier()
    found = tl.load(slot_of + select, mask=is_token, other=0)
    missing = is_token & (found < 0)
    tl.store(uses + found * used_stride_n, now, mask=is_token & (found >= 0))
    tl.debug_barrier()
    is_marked = missing
    if not HAS_SCORES:  # of a repeated position the first one counts
        tl.atomic_max(slot_of + select, _FIRST - place, mask=missing)
        tl.debug_barrier()
        first = tl.load(slot_of + select, mask=missing, other=0, volatile=True)
        missing = missing & (first == _FIRST - place)
        tl.debug_barrier()
    used = tl.load(uses + slot * used_stride_n, mask=is_filled, other=0)

    may_evict = is_filled & (slot >= num_protected) & (used != now)
    counts = tl.sum(may_evict.to(tl.int32) + (is_filled.to(tl.int32) << 16), 0)
    num_evict = counts & 0xFFFF
    num_filled += counts >> 16
    num_missing = tl.sum(missing.to(tl.int32), 0)
    num_empty = tl.where(is_active, num_resident - num_filled, 0)
    target = tl.load(num_target + req).to(tl.int32)
    may_fill = tl.minimum(tl.maximum(target - num_filled, 0), num_empty)
    num_open = tl.minimum(may_fill + num_evict, tl.minimum(cap, num_resident))
    num_taken = tl.minimum(num_missing, num_open)
    num_into_empty = tl.minimum(num_taken, may_fill)
    num_victims = num_taken - num_into_empty
    num_fill = tl.minimum(may_fill, num_open) - num_taken

    if num_taken > 0:
        _take_missing(
            out_pos, orders, select, missing, scores, num_missing, num_taken,
            HAS_SCORES, BLOCK_CAP, CHUNK,
        )  # fmt: skip
    num_refilled = tl.minimum(may_fill, num_open)
    if num_refilled > 0:
        if BLOCK_HEAD:
            is_empty_first = in_first & (first_position < 0)
            first_rank = tl.cumsum(is_empty_first.to(tl.int32), 0) - 1
            is_given = is_empty_first & (first_rank < num_refilled)
            tl.store(out_slot + first_rank, first_slot, mask=is_given)
        empty_rank = num_empty_first + tl.cumsum(is_empty.to(tl.int32), 0) - 1
        tl.store(out_slot + empty_rank, slot, mask=is_empty & (empty_rank < num_refilled))
    if num_victims > 0:
        _take_victims(
            out_slot + num_into_empty, orders, slot, used, may_evict, num_victims, BLOCK_CAP, CHUNK
        )
    num_fetched = num_taken
    if num_fill > 0:
        # All missing ones are taken already; the highest positions that are not resident follow.
        tl.store(slot_of + select, 0, mask=is_marked)
        tl.debug_barrier()
        num_left, end = num_fill, tl.minimum(tl.load(hi + req), max_context).to(tl.int32)
        while (num_left > 0) & (end > lo):
            filler = end - 1 - tl.arange(0, BLOCK_FILL)
            is_free = filler >= lo
            is_free = is_free & (tl.load(slot_of + filler, mask=is_free, other=0) < 0)
            rank = tl.cumsum(is_free.to(tl.int32), 0)
            tl.store(out_pos + num_fetched + rank - 1, filler, mask=is_free & (rank <= num_left))
            num_new = tl.minimum(tl.max(rank, 0), num_left)
            num_fetched += num_new
            num_left -= num_new
            end -= BLOCK_FILL
        tl.debug_barrier()
        tl.store(slot_of + select, -1, mask=is_marked)
    if not HAS_SCORES:
        tl.store(slot_of + select, -1, mask=is_marked)
    tl.store(slot_of + position, -1, mask=is_filled)
    if BLOCK_HEAD:
        tl.store(slot_of + first_position, -1, mask=first_position >= 0)

    tl.debug_barrier()
    column = tl.arange(0, BLOCK_CAP)
    is_fetched = column < num_fetched
    to_slot = tl.load(out_slot + column, mask=is_fetched, other=0)
    to_fetch = tl.load(out_pos + column, mask=is_fetched, other=0)
    tl.store(positions + to_slot * pos_stride_n, to_fetch, mask=is_fetched)
    if HAS_COUNTERS:
        num_hits = tl.sum((is_token & (found >= 0)).to(tl.int32), 0)
        tl.atomic_add(counters, num_hits.to(tl.int64), mask=is_active, sem="relaxed")
        tl.atomic_add(counters + 1, num_missing.to(tl.int64), mask=is_active, sem="relaxed")
        tl.atomic_add(counters + 2, num_fetched.to(tl.int64), mask=is_active, sem="relaxed")
    tl.store(
        uses + to_slot * used_stride_n, tl.zeros_like(to_slot).to(now.dtype) + now, mask=is_fetched
    )
    tl.debug_barrier()
    padding = (column >= num_fetched) & (column < cap)
    tl.store(out_pos + column, -1, mask=padding)
    tl.store(out_slot + column, -1, mask=padding)


def mirror_diff(
    selected: torch.Tensor,
    resident_pos: torch.Tensor,
    last_used: torch.Tensor,
    *,
    step: int | torch.Tensor,
    num_protected: int,
    num_target: torch.Tensor,
    hi: torch.Tensor,
    lo: int,
    fetch_cap: int,
    selected_scores: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Update the mirror; see `tandemkv.kernels.mirror.mirror_diff`."""
    num_reqs, num_heads, num_resident = len(selected), *resident_pos.shape[1:]
    if scratch is None:
        message = "scratch=None: must be given on a GPU; make it once with make_mirror_scratch"
        raise ValueError(message)
    if num_resident > MAX_RESIDENT:
        message = f"num_resident={num_resident}: must be <= {MAX_RESIDENT} on a GPU"
        raise ValueError(message)
    shape = (num_reqs, num_heads, fetch_cap)
    fetch_pos = torch.empty(shape, dtype=torch.int32, device=selected.device)
    fetch_slot = torch.empty_like(fetch_pos)
    orders = torch.empty(shape, dtype=torch.int64, device=selected.device)
    if not num_reqs * num_heads:
        return fetch_pos, fetch_slot
    block_r = max(16, triton.next_power_of_2(num_resident))
    num_first = num_resident - block_r // 2
    block_head = 0
    if block_r > _MIN_BLOCK and num_first <= min(num_protected, _MAX_HEAD):
        block_r, block_head = block_r // 2, triton.next_power_of_2(num_first)
    block_cap = max(16, triton.next_power_of_2(fetch_cap))
    is_tensor = isinstance(step, torch.Tensor)
    per_req = isinstance(step, torch.Tensor) and step.dim() > 0 and step.numel() > 1
    scores = selected if selected_scores is None else selected_scores
    flags = num_target if active is None else active.view(torch.int8)
    _mirror_kernel[(num_reqs * num_heads,)](
        selected, scores, resident_pos, last_used, num_target if rows is None else rows,
        step, num_target, hi, flags, orders if counters is None else counters, scratch, orders,
        fetch_pos, fetch_slot, num_heads, selected.shape[-1], num_resident, num_protected, lo,
        fetch_cap, scratch.shape[-1],
        *selected.stride(), *scores.stride(), *resident_pos.stride(), *last_used.stride(),
        step.stride(0) if per_req and isinstance(step, torch.Tensor) else 0, *scratch.stride()[:2],
        HAS_SCORES=selected_scores is not None, HAS_ROWS=rows is not None,
        HAS_ACTIVE=active is not None, HAS_COUNTERS=counters is not None, IS_TENSOR=is_tensor,
        BLOCK_K=max(16, triton.next_power_of_2(selected.shape[-1])),
        BLOCK_R=block_r, BLOCK_HEAD=block_head, BLOCK_CAP=block_cap,
        BLOCK_FILL=1024, CHUNK=min(_CHUNK, block_cap), num_warps=_NUM_WARPS,
    )  # fmt: skip
    return fetch_pos, fetch_slot
