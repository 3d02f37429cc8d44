# SPDX-License-Identifier: Apache-2.0
"""Triton version of `tandemkv.kernels.mirror`: one program per head, one launch.

The program sets a bit for each position that is resident, and one for each that is selected, and
looks up the one in the bits of the other. Bits of 256K positions fit into shared memory, where
lookups take a tenth of what they take in a map of all positions. What is resident is known before
the choice is made: where kernels are chained, its bits are there when this begins.

Lists go through memory between barriers: what missing position *j* gets, slot *j* is.
"""

import torch
import triton
import triton.language as tl

from tandemkv.kernels.check import check_int, fail
from tandemkv.kernels.mirror import MAX_AGE, MAX_RESIDENT, MirrorScratch
from tandemkv.kernels.triton_ops.chained import follow, is_chained
from tandemkv.kernels.triton_ops.samples import offsets_of
from tandemkv.kernels.triton_ops.topk_search import reach, score_key

# With eight warps of 168 registers all kernels of a layer take 194.5 us instead of 193.4 (H200,
# 8 x 96K, chained), with 16 of 80 194.9. With 128 191.7, but then a program fills a multiprocessor:
# fewer fit in sooner beside a scan of all keys, and beside two programs of the
# product with W_q, see `query`. Larger blocks need all.
_NUM_WARPS = 16
_REGISTERS, _LARGEST_LIMITED = 96, 4096
_MIN_BLOCK, _MAX_HEAD = 16, 256
_MAX_WORDS = 8192  # of bits that are looked up in shared memory
_MAX_ZEROS = 2048
_NO_PLACE = tl.constexpr(2**31 - 1)
_LAST = tl.constexpr(2**31 - 1)
_OLDEST = tl.constexpr(MAX_AGE)


@triton.jit
def _set_bits(bits, position, mask):
    one = tl.full([], 1, tl.int32)
    tl.atomic_or(bits + (position >> 5), one << (position & 31), mask=mask, sem="relaxed")


@triton.jit
def _load_bits(bits, num_words, BLOCK_WORDS: tl.constexpr):
    """Load words of 32 positions each; without a block, something in their place."""
    if BLOCK_WORDS:
        at = tl.arange(0, BLOCK_WORDS)
        # Atomics do not reach this multiprocessor's cache.
        return tl.load(bits + at, mask=at < num_words, other=0, volatile=True)
    else:
        return tl.zeros([1], tl.int32)


@triton.jit
def _is_set(words, bits, position, mask, BLOCK_WORDS: tl.constexpr):
    """Whether the bits of positions are set, in `words` or, where there is no block, in memory."""
    at = tl.where(mask, position, 0)
    if BLOCK_WORDS:
        word = tl.gather(words, at >> 5, 0)
    else:
        word = tl.load(bits + (at >> 5), mask=mask, other=0, volatile=True)
    return mask & (((word >> (at & 31)) & 1) != 0)


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
    # Steps of 32 bits wrap around: by their difference, and unsigned, as what lies half a turn back
    # is among the oldest. All that may be evicted were last used before this step.
    unsigned: tl.constexpr = tl.uint64 if used.dtype == tl.int64 else tl.uint32
    age = tl.minimum((now - used).to(unsigned, bitcast=True), _OLDEST).to(tl.int32)
    age = tl.where(may_evict, age, 0)
    top = tl.max(age, 0) + 1
    bound, _ = reach(age, count, 1, top, num_evict, 0)
    older, tie = may_evict & (age > bound), may_evict & (age == bound)
    counts = tl.cumsum((older.to(tl.int32) << 16) + tie.to(tl.int32), 0)
    need = count - (tl.max(counts, 0) >> 16)
    tie_rank = counts & 0xFFFF
    keep = older | (tie & (tie_rank <= need))
    place = (counts >> 16) + tl.minimum(tie_rank, need) - 1
    tl.store(out + place, slot, mask=keep)


@triton.jit
def _take_fillers(out, bits, count, end, BLOCK: tl.constexpr):
    """Write the `count` highest positions below `end` whose bits are not set; return how many."""
    num_found = tl.zeros([], tl.int32)
    while (num_found < count) & (end > 0):
        filler = end - 1 - tl.arange(0, BLOCK)
        is_free = filler >= 0
        word = tl.load(bits + (filler >> 5), mask=is_free, other=0, volatile=True)
        is_free = is_free & (((word >> (filler & 31)) & 1) == 0)
        rank = num_found + tl.cumsum(is_free.to(tl.int32), 0)
        tl.store(out + rank - 1, filler, mask=is_free & (rank <= count))
        num_found = tl.minimum(tl.max(rank, 0), count)
        end -= BLOCK
    return num_found


@triton.jit(
    do_not_specialize=[
        "num_protected",
        "cap",
        "num_first",
        "num_resident",
        "num_selected",
        "num_words",
    ]
)
def _mirror_kernel(
    selected, selected_scores, resident_pos, last_used, rows, step, num_target, hi, active,
    counters, bits, places, fetch_pos, fetch_slot, log_weight,
    num_heads, num_selected, num_first, num_resident, num_protected, cap, num_words,
    sel_stride_b, sel_stride_h, sel_stride_n, score_stride_b, score_stride_h, score_stride_n,
    pos_stride_b, pos_stride_h, pos_stride_n, used_stride_b, used_stride_h, used_stride_n,
    bits_stride_b, bits_stride_h, places_stride_b, places_stride_h,
    weight_stride_b, weight_stride_h,
    HAS_SCORES: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_ACTIVE: tl.constexpr,
    HAS_COUNTERS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_HEAD: tl.constexpr,
    BLOCK_WORDS: tl.constexpr, BLOCK_ZEROS: tl.constexpr, BLOCK_CAP: tl.constexpr,
    BLOCK_FILL: tl.constexpr, NUM_SAMPLES: tl.constexpr,
    BLOCK_S: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    req, head = index // num_heads, index % num_heads
    is_resident = bits + req * bits_stride_b + head * bits_stride_h
    is_chosen = is_resident + num_words
    start = tl.zeros([], tl.int32)
    while start < 2 * num_words:
        word = start + tl.arange(0, BLOCK_ZEROS)
        tl.store(is_resident + word, tl.zeros([BLOCK_ZEROS], tl.int32), mask=word < 2 * num_words)
        start += BLOCK_ZEROS
    # A row that is not active has neither slots nor selected positions.
    is_active = req >= 0
    if HAS_ACTIVE:
        is_active = tl.load(active + req) != 0
    now = tl.load(step).to(last_used.dtype.element_ty)
    book = req
    if HAS_ROWS:
        book = tl.load(rows + req).to(tl.int64)
    positions = resident_pos + book * pos_stride_b + head * pos_stride_h
    uses = last_used + book * used_stride_b + head * used_stride_h
    out_pos, out_slot = fetch_pos + index * cap, fetch_slot + index * cap
    target = tl.load(num_target + req).to(tl.int32)

    # The first slots, protected ones, stand apart where that halves the block of the others.
    slot = num_first + tl.arange(0, BLOCK_R)
    in_set = (slot < num_resident) & is_active
    position = tl.load(positions + slot * pos_stride_n, mask=in_set, other=-1)
    used = tl.load(uses + slot * used_stride_n, mask=in_set, other=0)
    is_filled = position >= 0
    num_filled = tl.sum(is_filled.to(tl.int32), 0)
    num_empty_first = tl.zeros([], tl.int32)
    tl.debug_barrier()
    _set_bits(is_resident, position, is_filled)
    if BLOCK_HEAD:
        first_slot = tl.arange(0, BLOCK_HEAD)
        in_first = (first_slot < num_first) & is_active
        first_position = tl.load(positions + first_slot * pos_stride_n, mask=in_first, other=-1)
        is_first = first_position >= 0
        _set_bits(is_resident, first_position, is_first)
        num_filled_first = tl.sum(is_first.to(tl.int32), 0)
        num_empty_first = tl.where(is_active, num_first - num_filled_first, 0)
        num_filled += num_filled_first
    if NUM_SAMPLES:
        sample, end = tl.arange(0, BLOCK_S), tl.load(hi + req).to(tl.int32)
        offset, span, _ = offsets_of(sample, end - num_protected, NUM_SAMPLES)
        exists = (sample < NUM_SAMPLES) & (offset < end - num_protected) & is_active
    tl.debug_barrier()
    resident_words = _load_bits(is_resident, num_words, BLOCK_WORDS)

    # So far all is as the step before has left it: the choice that is still being made writes
    # no books, and nothing but this kernel uses the bits.
    follow(CHAINED)
    place = tl.arange(0, BLOCK_K)
    chosen = selected + req * sel_stride_b + head * sel_stride_h
    select = tl.load(chosen + place * sel_stride_n, mask=place < num_selected, other=-1)
    is_token = (select >= 0) & (select < num_words * 32) & is_active
    _set_bits(is_chosen, select, is_token)
    scores = tl.zeros([BLOCK_K], tl.float32)
    if HAS_SCORES:
        base = selected_scores + req * score_stride_b + head * score_stride_h
        scores = tl.load(base + place * score_stride_n, mask=place < num_selected, other=0.0)
    is_hit = _is_set(resident_words, is_resident, select, is_token, BLOCK_WORDS)
    missing = is_token & (is_hit == 0)
    if not HAS_SCORES:  # of a repeated position the first one counts
        places += req * places_stride_b + head * places_stride_h
        tl.store(places + select, _NO_PLACE, mask=missing)
        tl.debug_barrier()
        tl.atomic_min(places + select, place, mask=missing)
        tl.debug_barrier()
        first = tl.load(places + select, mask=missing, other=-1, volatile=True)
        missing &= first == place
    tl.debug_barrier()
    chosen_words = _load_bits(is_chosen, num_words, BLOCK_WORDS)
    if BLOCK_HEAD:
        is_used = _is_set(chosen_words, is_chosen, first_position, is_first, 0)
        touched = tl.zeros([BLOCK_HEAD], used.dtype) + now
        tl.store(uses + first_slot * used_stride_n, touched, mask=is_used)
    is_used = _is_set(chosen_words, is_chosen, position, is_filled, BLOCK_WORDS)
    used = tl.where(is_used, now, used)
    tl.store(uses + slot * used_stride_n, used, mask=is_used)
    may_evict = is_filled & (slot >= num_protected) & (used != now)

    both = tl.sum(missing.to(tl.int32) + (is_hit.to(tl.int32) << 16), 0)
    num_missing = both & 0xFFFF
    num_evict = tl.sum(may_evict.to(tl.int32), 0)
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
            is_empty = in_first & (first_position < 0)
            rank = tl.cumsum(is_empty.to(tl.int32), 0)
            tl.store(out_slot + rank - 1, first_slot, mask=is_empty & (rank <= num_refilled))
        is_empty = in_set & (position < 0)
        rank = num_empty_first + tl.cumsum(is_empty.to(tl.int32), 0)
        tl.store(out_slot + rank - 1, slot, mask=is_empty & (rank <= num_refilled))
    tl.debug_barrier()
    column = tl.arange(0, BLOCK_CAP)
    is_taken = column < num_taken
    if HAS_SCORES:
        # What atomics listed came in any order; in theirs, results do not depend on it.
        listed = tl.load(out_pos + column, mask=is_taken, other=_LAST)
        listed = tl.sort(listed)
        tl.debug_barrier()
        tl.store(out_pos + column, listed, mask=is_taken)
    num_fetched = num_taken
    if num_fill > 0:
        # All missing ones are taken already, and come before the others: the highest positions
        # that are not resident then.
        tl.debug_barrier()
        taken = tl.load(out_pos + column, mask=is_taken, other=0)
        _set_bits(is_resident, taken, is_taken)
        tl.debug_barrier()
        last = tl.minimum(tl.load(hi + req), num_words * 32).to(tl.int32)
        num_fetched += _take_fillers(out_pos + num_taken, is_resident, num_fill, last, BLOCK_FILL)

    tl.debug_barrier()
    is_fetched = column < num_fetched
    to_slot = tl.load(out_slot + column, mask=is_fetched, other=0)
    to_fetch = tl.load(out_pos + column, mask=is_fetched, other=0)
    if NUM_SAMPLES:
        into = positions + to_slot * pos_stride_n
        evicted = tl.load(into, mask=is_fetched, other=-1)
        tl.debug_barrier()
    tl.store(positions + to_slot * pos_stride_n, to_fetch, mask=is_fetched)
    tl.store(
        uses + to_slot * used_stride_n, tl.zeros_like(to_slot).to(now.dtype) + now, mask=is_fetched
    )
    padding = (column >= num_fetched) & (column < cap)
    tl.store(out_pos + column, -1, mask=padding)
    tl.store(out_slot + column, -1, mask=padding)
    if NUM_SAMPLES:
        # Samples that are resident count once, as they are.
        _set_bits(is_resident, to_fetch, is_fetched)
        one = tl.full([], 1, tl.int32)
        others = ~(one << (evicted & 31))
        tl.atomic_and(is_resident + (evicted >> 5), others, mask=evicted >= 0, sem="relaxed")
        tl.debug_barrier()
        sampled = num_protected + offset
        is_held = exists & (sampled < num_words * 32)
        is_held = _is_set(resident_words, is_resident, sampled, is_held, 0)
        share = tl.where(exists & (is_held == 0), span, 0).to(tl.float32)
        left_out = tl.maximum(end - (num_filled + num_fetched - num_victims), 0).to(tl.float32)
        times = share * (left_out / tl.maximum(tl.sum(share, 0), 1.0))
        weight = tl.where(times > 0, tl.log(tl.where(times > 0, times, 1.0)), float("-inf"))
        weights = log_weight + book * weight_stride_b + head * weight_stride_h
        tl.store(weights + sample, weight, mask=(sample < NUM_SAMPLES) & is_active)
    if HAS_COUNTERS:
        tl.atomic_add(counters, (both >> 16).to(tl.int64), mask=is_active, sem="relaxed")
        tl.atomic_add(counters + 1, num_missing.to(tl.int64), mask=is_active, sem="relaxed")
        tl.atomic_add(counters + 2, num_fetched.to(tl.int64), mask=is_active, sem="relaxed")


def mirror_diff(
    selected: torch.Tensor,
    resident_pos: torch.Tensor,
    last_used: torch.Tensor,
    *,
    step: torch.Tensor,
    num_protected: int,
    num_target: torch.Tensor,
    hi: torch.Tensor,
    fetch_cap: int,
    selected_scores: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
    log_weight: torch.Tensor | None = None,
    scratch: MirrorScratch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Update the mirror; see `tandemkv.kernels.mirror.mirror_diff`."""
    num_reqs, num_heads, num_resident = len(selected), *resident_pos.shape[1:]
    if scratch is None:
        fail("scratch", None, "given on a GPU; make it once with make_mirror_scratch")
    check_int("num_resident", num_resident, minimum=0, maximum=MAX_RESIDENT)
    shape = (num_reqs, num_heads, fetch_cap)
    fetch_pos = torch.empty(shape, dtype=torch.int32, device=selected.device)
    fetch_slot = torch.empty_like(fetch_pos)
    block_cap = max(16, triton.next_power_of_2(fetch_cap))
    block_k = max(16, triton.next_power_of_2(selected.shape[-1]))
    if not num_reqs * num_heads:
        return fetch_pos, fetch_slot
    block_r = max(16, triton.next_power_of_2(num_resident))
    num_first, block_head = num_resident - block_r // 2, 0
    if block_r > _MIN_BLOCK and num_first <= min(num_protected, _MAX_HEAD):
        block_r, block_head = block_r // 2, triton.next_power_of_2(num_first)
    else:
        num_first = 0
    bits, num_words = scratch.bits, scratch.bits.shape[-1] // 2
    block_words = triton.next_power_of_2(num_words)
    places = bits if scratch.places is None else scratch.places
    scores = selected if selected_scores is None else selected_scores
    flags = num_target if active is None else active.view(torch.int8)
    num_samples = 0 if log_weight is None else log_weight.shape[-1]
    chained = is_chained(selected.device)
    _mirror_kernel[(num_reqs * num_heads,)](
        selected, scores, resident_pos, last_used, num_target if rows is None else rows,
        step, num_target, hi, flags, num_target if counters is None else counters, bits, places,
        fetch_pos, fetch_slot, scores if log_weight is None else log_weight,
        num_heads, selected.shape[-1], num_first, num_resident, num_protected,
        fetch_cap, num_words,
        *selected.stride(), *scores.stride(), *resident_pos.stride(), *last_used.stride(),
        *bits.stride()[:2], *places.stride()[:2],
        *((0, 0) if log_weight is None else log_weight.stride()[:2]),
        HAS_SCORES=selected_scores is not None, HAS_ROWS=rows is not None,
        HAS_ACTIVE=active is not None, HAS_COUNTERS=counters is not None,
        BLOCK_K=block_k, BLOCK_R=block_r, BLOCK_HEAD=block_head,
        BLOCK_WORDS=block_words if block_words <= _MAX_WORDS else 0,
        BLOCK_ZEROS=min(2 * block_words, _MAX_ZEROS), BLOCK_CAP=block_cap, BLOCK_FILL=1024,
        NUM_SAMPLES=num_samples, BLOCK_S=max(16, triton.next_power_of_2(max(1, num_samples))),
        CHAINED=chained, launch_pdl=chained, num_warps=_NUM_WARPS,
        maxnreg=_REGISTERS if max(block_k, block_r) <= _LARGEST_LIMITED else None,
    )  # fmt: skip
    return fetch_pos, fetch_slot
