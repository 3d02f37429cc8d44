# SPDX-License-Identifier: Apache-2.0
"""Triton version of `tandemkv.kernels.mirror`: one program per head, one launch.

The program writes the places of the selected positions into a map, position -> place, and looks
up there what stands in each slot. The map is never cleared: an entry counts if the selected
position at its place is the one that was looked up (the sparse sets of Briggs and Torczon, 1993).
Lists go through memory between barriers: what missing position *j* gets, slot *j* is.
"""

import torch
import triton
import triton.language as tl

from tandemkv.kernels.triton_ops.chained import follow, is_chained, prefetch
from tandemkv.kernels.triton_ops.samples import offsets_of
from tandemkv.kernels.triton_ops.topk_search import reach, score_key

MAX_RESIDENT = 32767  # two counts of slots share 32 bits
_NUM_WARPS = 8
# Fewer registers fit in sooner beside a scan of all keys, see `shortlist`; larger blocks need all.
_REGISTERS, _LARGEST_LIMITED = 168, 4096
_MIN_BLOCK, _MAX_HEAD = 16, 256
_LINE = tl.constexpr(32)  # slots of a line of the cache
_NO_PLACE = tl.constexpr(2**31 - 1)
_LAST = tl.constexpr(2**31 - 1)


@triton.jit
def _list_missing(out, select, missing, scores, num_missing, count, HAS_SCORES: tl.constexpr):
    """List the `count` best missing positions, by their scores or else the first ones."""
    keep = missing
    if HAS_SCORES and num_missing > count:
        key = tl.where(missing, tl.maximum(score_key(scores), -(2**31) + 1), -(2**31))
        low = tl.min(tl.where(missing, key, 2**31 - 1), 0)
        top = tl.max(key, 0) + 1
        bound, found = reach(key, count, low, top, num_missing, 0)
        keep = key >= bound
        if found > count:  # of those with the last score, the lowest positions
            need = count - tl.sum((key > bound).to(tl.int32), 0)
            back = tl.where(key == bound, -select, -(2**31))
            first = tl.min(tl.where(key == bound, -select, 1), 0)
            last, _ = reach(back, need, first, 1, found - count + need, 0)
            keep = (key > bound) | (back >= last)
    place = tl.cumsum(keep.to(tl.int32), 0) - 1
    tl.store(out + place, select, mask=keep & (place < count))


@triton.jit
def _list_victims(out, slot, used, now, may_evict, num_evict, count):
    """List the `count` least recently used slots, in ascending order."""
    lowest: tl.constexpr = -(2**31)  # below any -used of int32; int64 steps stay within it too
    age = tl.where(may_evict, -used, lowest)
    top = tl.max(age, 0) + 1
    # All that may be evicted were last used before this step.
    bound, _ = reach(age, count, -now, top, num_evict, 0)
    older, tie = may_evict & (age > bound), may_evict & (age == bound)
    counts = tl.cumsum((older.to(tl.int32) << 16) + tie.to(tl.int32), 0)
    need = count - (tl.max(counts, 0) >> 16)
    tie_rank = counts & 0xFFFF
    keep = older | (tie & (tie_rank <= need))
    place = (counts >> 16) + tl.minimum(tie_rank, need) - 1
    tl.store(out + place, slot, mask=keep)


@triton.jit
def _take_fillers(
    out, place_of, chosen, positions, sel_stride_n, pos_stride_n,
    num_selected, num_resident, count, lo, end, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the `count` highest positions below `end` that the map does not hold; return how many.

    Entries from `num_selected` on are slots.
    """
    num_found = tl.zeros([], tl.int32)
    while (num_found < count) & (end > lo):
        filler = end - 1 - tl.arange(0, BLOCK)
        is_free = filler >= lo
        at = tl.load(place_of + filler, mask=is_free, other=-1)
        is_place = (at >= 0) & (at < num_selected)
        is_slot = (at >= num_selected) & (at < num_selected + num_resident)
        listed = tl.load(chosen + at * sel_stride_n, mask=is_place, other=-1)
        resident = tl.load(positions + (at - num_selected) * pos_stride_n, mask=is_slot, other=-1)
        is_free = is_free & (listed != filler) & (resident != filler)
        rank = num_found + tl.cumsum(is_free.to(tl.int32), 0)
        tl.store(out + rank - 1, filler, mask=is_free & (rank <= count))
        num_found = tl.minimum(tl.max(rank, 0), count)
        end -= BLOCK
    return num_found


@triton.jit
def _bins_of(offset, shift, NUM_BINS: tl.constexpr):
    """Count, for each multiple of ``1 << shift``, how often it is in `offset`."""
    multiple = offset >> shift
    is_one = (offset >= 0) & ((multiple << shift) == offset) & (multiple < NUM_BINS)
    return tl.histogram(tl.where(is_one, multiple, 0), NUM_BINS, mask=is_one)


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
    counters, place_of, hits, fetch_pos, fetch_slot, log_weight,
    num_heads, num_selected, num_resident, num_protected, lo, cap, max_context,
    sel_stride_b, sel_stride_h, sel_stride_n, score_stride_b, score_stride_h, score_stride_n,
    pos_stride_b, pos_stride_h, pos_stride_n, used_stride_b, used_stride_h, used_stride_n,
    step_stride, map_stride_b, map_stride_h, weight_stride_b, weight_stride_h,
    HAS_SCORES: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_ACTIVE: tl.constexpr,
    HAS_COUNTERS: tl.constexpr, IS_TENSOR: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_HEAD: tl.constexpr, BLOCK_CAP: tl.constexpr,
    BLOCK_FILL: tl.constexpr, NUM_SAMPLES: tl.constexpr, BLOCK_S: tl.constexpr,
    NUM_BINS: tl.constexpr, NUM_LINES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    req, head = index // num_heads, index % num_heads
    if HAS_ROWS and CHAINED:
        # The choice that is still being made writes no books: they may be on their way. If the row
        # is an old one still, no harm is done.
        old = tl.load(rows + req).to(tl.int64)
        line = tl.minimum(tl.arange(0, NUM_LINES) * _LINE, num_resident - 1)
        lines = old * pos_stride_b + head * pos_stride_h + line * pos_stride_n
        prefetch(resident_pos + lines, CHAINED)
        lines = old * used_stride_b + head * used_stride_h + line * used_stride_n
        prefetch(last_used + lines, CHAINED)
    follow(CHAINED)
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
    place_of += req * map_stride_b + head * map_stride_h
    out_pos, out_slot = fetch_pos + index * cap, fetch_slot + index * cap
    hits += index * BLOCK_K
    chosen = selected + req * sel_stride_b + head * sel_stride_h

    # What does not depend on anything is on its way before the first barrier.
    place = tl.arange(0, BLOCK_K)
    select = tl.load(chosen + place * sel_stride_n, mask=place < num_selected, other=-1)
    scores = tl.zeros([BLOCK_K], tl.float32)
    if HAS_SCORES:
        base = selected_scores + req * score_stride_b + head * score_stride_h
        scores = tl.load(base + place * score_stride_n, mask=place < num_selected, other=0.0)
    target = tl.load(num_target + req).to(tl.int32)
    # The first slots, protected ones, stand apart where that halves the block of the others.
    num_first = tl.zeros([], tl.int32)
    num_filled, num_empty_first = num_first, num_first
    if BLOCK_HEAD:
        num_first = num_resident - BLOCK_R
        first_slot = tl.arange(0, BLOCK_HEAD)
        in_first = (first_slot < num_first) & is_active
        first_position = tl.load(positions + first_slot * pos_stride_n, mask=in_first, other=-1)
    slot = num_first + tl.arange(0, BLOCK_R)
    in_set = (slot < num_resident) & is_active
    position = tl.load(positions + slot * pos_stride_n, mask=in_set, other=-1)
    used = tl.load(uses + slot * used_stride_n, mask=in_set, other=0)

    is_token = (select >= 0) & (select < max_context) & is_active
    is_filled = position >= 0
    is_empty = in_set & (position < 0)
    tl.store(hits + place, tl.zeros([BLOCK_K], tl.int8))
    if HAS_SCORES:
        tl.store(place_of + select, place, mask=is_token)
    else:  # of a repeated position the first one counts
        tl.store(place_of + select, _NO_PLACE, mask=is_token)
        tl.debug_barrier()
        tl.atomic_min(place_of + select, place, mask=is_token)
    tl.debug_barrier()
    if BLOCK_HEAD:
        is_first = first_position >= 0
        entry = tl.load(
            place_of + first_position, mask=is_first, other=-1, volatile=not HAS_SCORES
        )  # atomics do not reach this multiprocessor's cache
        is_first &= (entry >= 0) & (entry < num_selected)
        is_first &= (
            tl.load(chosen + entry * sel_stride_n, mask=is_first, other=-1) == first_position
        )
        tl.store(hits + entry, tl.full([BLOCK_HEAD], 1, tl.int8), mask=is_first)
        tl.store(
            uses + first_slot * used_stride_n,
            tl.zeros([BLOCK_HEAD], used.dtype) + now, mask=is_first,
        )  # fmt: skip
        num_filled = tl.sum((first_position >= 0).to(tl.int32), 0)
        num_empty_first = tl.where(is_active, num_first - num_filled, 0)
    entry = tl.load(place_of + position, mask=is_filled, other=-1, volatile=not HAS_SCORES)
    is_used = (entry >= 0) & (entry < num_selected)
    entry = tl.where(is_used, entry, 0)
    is_used &= is_filled & (tl.gather(select, entry, 0) == position)
    tl.store(hits + entry, tl.full([BLOCK_R], 1, tl.int8), mask=is_used)
    used = tl.where(is_used, now, used)
    tl.store(uses + slot * used_stride_n, used, mask=is_used)
    may_evict = is_filled & (slot >= num_protected) & (used != now)
    counts = tl.sum(may_evict.to(tl.int32) + (is_filled.to(tl.int32) << 16), 0)
    tl.debug_barrier()
    first = place
    if not HAS_SCORES:
        first = tl.load(place_of + select, mask=is_token, other=0, volatile=True)
    hit = tl.load(hits + first, mask=is_token, other=0)
    missing = is_token & (hit == 0) & (first == place)

    num_evict = counts & 0xFFFF
    num_filled += counts >> 16
    num_missing = tl.sum(missing.to(tl.int32), 0)
    num_empty = tl.where(is_active, num_resident - num_filled, 0)
    may_fill = tl.minimum(tl.maximum(target - num_filled, 0), num_empty)
    num_open = tl.minimum(may_fill + num_evict, tl.minimum(cap, num_resident))
    num_taken = tl.minimum(num_missing, num_open)
    num_into_empty = tl.minimum(num_taken, may_fill)
    num_victims = num_taken - num_into_empty
    num_fill = tl.minimum(may_fill, num_open) - num_taken

    if num_taken > 0:
        _list_missing(out_pos, select, missing, scores, num_missing, num_taken, HAS_SCORES)
    if num_victims > 0:
        _list_victims(out_slot + num_into_empty, slot, used, now, may_evict, num_evict, num_victims)
    num_refilled = tl.minimum(may_fill, num_open)
    if num_refilled > 0:
        if BLOCK_HEAD:
            is_empty_first = in_first & (first_position < 0)
            first_rank = tl.cumsum(is_empty_first.to(tl.int32), 0) - 1
            is_given = is_empty_first & (first_rank < num_refilled)
            tl.store(out_slot + first_rank, first_slot, mask=is_given)
        empty_rank = num_empty_first + tl.cumsum(is_empty.to(tl.int32), 0) - 1
        tl.store(out_slot + empty_rank, slot, mask=is_empty & (empty_rank < num_refilled))
    tl.debug_barrier()
    column = tl.arange(0, BLOCK_CAP)
    if HAS_SCORES:
        # What atomics listed came in any order; in theirs, results do not depend on it.
        listed = tl.load(out_pos + column, mask=column < num_taken, other=_LAST)
        listed = tl.sort(listed)
        tl.debug_barrier()
        tl.store(out_pos + column, listed, mask=column < num_taken)
    num_fetched = num_taken
    if num_fill > 0:
        # All missing ones are taken already; the highest positions that are not resident follow.
        # What is resident stands in the map behind what is selected.
        tl.store(place_of + position, num_selected + slot, mask=is_filled)
        if BLOCK_HEAD:
            tl.store(place_of + first_position, num_selected + first_slot, mask=first_position >= 0)
        tl.debug_barrier()
        end = tl.minimum(tl.load(hi + req), max_context).to(tl.int32)
        num_fetched += _take_fillers(
            out_pos + num_taken, place_of, chosen, positions, sel_stride_n, pos_stride_n,
            num_selected, num_resident, num_fill, lo, end, BLOCK_FILL,
        )  # fmt: skip

    tl.debug_barrier()
    is_fetched = column < num_fetched
    to_slot = tl.load(out_slot + column, mask=is_fetched, other=0)
    to_fetch = tl.load(out_pos + column, mask=is_fetched, other=0)
    tl.store(positions + to_slot * pos_stride_n, to_fetch, mask=is_fetched)
    tl.store(
        uses + to_slot * used_stride_n, tl.zeros_like(to_slot).to(now.dtype) + now, mask=is_fetched
    )
    padding = (column >= num_fetched) & (column < cap)
    tl.store(out_pos + column, -1, mask=padding)
    tl.store(out_slot + column, -1, mask=padding)
    if NUM_SAMPLES:
        # Samples that are resident count once, as they are: which are, a bin for each multiple of
        # the finest stride tells.
        sample, end = tl.arange(0, BLOCK_S), tl.load(hi + req).to(tl.int32)
        offset, span, shift = offsets_of(sample, end - num_protected, NUM_SAMPLES)
        tl.debug_barrier()  # what is fetched is in the books
        held = tl.load(positions + slot * pos_stride_n, mask=in_set, other=-1)
        bins = _bins_of(held - num_protected, shift, NUM_BINS)
        if BLOCK_HEAD:
            held = tl.load(positions + first_slot * pos_stride_n, mask=in_first, other=-1)
            bins += _bins_of(held - num_protected, shift, NUM_BINS)
        exists = (sample < NUM_SAMPLES) & (offset < end - num_protected) & is_active
        is_free = exists & (tl.gather(bins, tl.where(exists, offset >> shift, 0), 0) == 0)
        share = tl.where(is_free, span, 0).to(tl.float32)
        left_out = tl.maximum(end - (num_filled + num_fetched - num_victims), 0).to(tl.float32)
        times = share * (left_out / tl.maximum(tl.sum(share, 0), 1.0))
        weight = tl.where(times > 0, tl.log(tl.where(times > 0, times, 1.0)), float("-inf"))
        weights = log_weight + book * weight_stride_b + head * weight_stride_h
        tl.store(weights + sample, weight, mask=(sample < NUM_SAMPLES) & is_active)
    if HAS_COUNTERS:
        num_hits = tl.sum(hit.to(tl.int32), 0)
        tl.atomic_add(counters, num_hits.to(tl.int64), mask=is_active, sem="relaxed")
        tl.atomic_add(counters + 1, num_missing.to(tl.int64), mask=is_active, sem="relaxed")
        tl.atomic_add(counters + 2, num_fetched.to(tl.int64), mask=is_active, sem="relaxed")


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
    log_weight: torch.Tensor | None = None,
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
    block_cap = max(16, triton.next_power_of_2(fetch_cap))
    block_k = max(16, triton.next_power_of_2(selected.shape[-1]))
    hits = torch.empty((*shape[:2], block_k), dtype=torch.int8, device=selected.device)
    if not num_reqs * num_heads:
        return fetch_pos, fetch_slot
    block_r = max(16, triton.next_power_of_2(num_resident))
    num_first = num_resident - block_r // 2
    block_head = 0
    if block_r > _MIN_BLOCK and num_first <= min(num_protected, _MAX_HEAD):
        block_r, block_head = block_r // 2, triton.next_power_of_2(num_first)
    is_tensor = isinstance(step, torch.Tensor)
    per_req = isinstance(step, torch.Tensor) and step.dim() > 0 and step.numel() > 1
    scores = selected if selected_scores is None else selected_scores
    flags = num_target if active is None else active.view(torch.int8)
    num_samples = 0 if log_weight is None else log_weight.shape[-1]
    chained = is_chained(selected.device)
    _mirror_kernel[(num_reqs * num_heads,)](
        selected, scores, resident_pos, last_used, num_target if rows is None else rows,
        step, num_target, hi, flags, hits if counters is None else counters, scratch, hits,
        fetch_pos, fetch_slot, scores if log_weight is None else log_weight,
        num_heads, selected.shape[-1], num_resident, num_protected, lo,
        fetch_cap, scratch.shape[-1],
        *selected.stride(), *scores.stride(), *resident_pos.stride(), *last_used.stride(),
        step.stride(0) if per_req and isinstance(step, torch.Tensor) else 0, *scratch.stride()[:2],
        *((0, 0) if log_weight is None else log_weight.stride()[:2]),
        HAS_SCORES=selected_scores is not None, HAS_ROWS=rows is not None,
        HAS_ACTIVE=active is not None, HAS_COUNTERS=counters is not None, IS_TENSOR=is_tensor,
        BLOCK_K=block_k, BLOCK_R=block_r, BLOCK_HEAD=block_head, BLOCK_CAP=block_cap,
        BLOCK_FILL=1024, NUM_SAMPLES=num_samples,
        BLOCK_S=max(16, triton.next_power_of_2(max(1, num_samples))),
        NUM_BINS=max(16, triton.next_power_of_2(2 * max(1, num_samples))),
        NUM_LINES=max(1, block_r // _LINE.value), CHAINED=chained, launch_pdl=chained,
        num_warps=_NUM_WARPS,
        maxnreg=_REGISTERS if max(block_k, block_r) <= _LARGEST_LIMITED else None,
    )  # fmt: skip
    return fetch_pos, fetch_slot
