# SPDX-License-Identifier: Apache-2.0
"""Triton version of `tandemkv.kernels.topk`: sample, filter, select; three launches.

1. One program per head takes a stratified random sample of the candidates and
   derives a bound that, all but certainly, more than k and fewer than `capacity` reach.
2. Several programs per head read all scores once and append what reaches the
   bound to the head's list.
3. One program per head searches the exact threshold in its list, in registers.

With at most `capacity` candidates 1 and 2 do nothing. If the sample misled (fewer
than k, or more than fit, reach the bound; many equal scores do that), 3 searches
in memory: slower, and exact as well.
"""

import torch
import triton
import triton.language as tl

from tandemkv.kernels.triton_ops.topk_search import (
    key_score,
    narrow,
    pack_counts,
    reach,
    score_key,
    thirds,
)

MIN_CAPACITY, MAX_CAPACITY = 4096, 16384
MIN_SAMPLE, MAX_SAMPLE = 1024, 16384
# Candidates of which one is sampled, where k is a small part of the list, and else: what reaches
# the bound then fits into it in all but some of a million selections. Not 32 and 16: 64K of prompt
# with some room for answers still take 2048 and 4096, in half of the registers.
POSITIONS_PER_SAMPLE = (36, 17)
_SMALL_PART = 4
_NUM_WARPS = 8
_BLOCK = 2048  # scores that one program of the filter takes at a time
_FILTER_PROGRAMS = 2048  # about two waves of the filter on a GPU of 132 multiprocessors


def capacity_of(k: int) -> int:
    """Return how many candidates of a head its list holds."""
    return min(MAX_CAPACITY, max(MIN_CAPACITY, triton.next_power_of_2(2 * k)))


def positions_per_sample(k: int) -> int:
    """Return of how many candidates one is sampled, to find a bound for the best `k`."""
    return POSITIONS_PER_SAMPLE[0 if _SMALL_PART * k <= capacity_of(k) else 1]


def sample_of(width: int, k: int) -> int:
    """Return how many of at most `width` candidates a bound for the best `k` is derived from."""
    sample = triton.next_power_of_2(width // positions_per_sample(k))
    return min(MAX_SAMPLE, max(MIN_SAMPLE, sample))


@triton.jit
def row_bounds(lo, hi, req, width, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """Return where a request's candidates begin, and how many they are."""
    begin, end = 0, width
    if HAS_LO:
        begin = tl.maximum(tl.load(lo + req), 0).to(tl.int32)
    if HAS_HI:
        end = tl.minimum(tl.load(hi + req), width).to(tl.int32)
    return begin, tl.maximum(end - begin, 0)


@triton.jit(do_not_specialize=["width", "k"])
def _sample_kernel(
    scores, lo, hi, scratch, num_heads, width, k,
    stride_b, stride_h, stride_n, scratch_stride,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, CAPACITY: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    req, head = index // num_heads, index % num_heads
    begin, num = row_bounds(lo, hi, req, width, HAS_LO, HAS_HI)
    bound = tl.full([], -(2**31) + 1, tl.int32)
    if num > CAPACITY:
        # One random candidate of each of SAMPLE equal parts: a period in the text does no harm.
        part = tl.arange(0, SAMPLE)
        left = (part.to(tl.int64) * num) // SAMPLE
        size = ((part + 1).to(tl.int64) * num) // SAMPLE - left
        noise = ((part * 40503) ^ ((part * 30011) >> 7)) & 0xFFFF
        place = begin + left + ((noise.to(tl.int64) * size) >> 16)
        base = scores + req * stride_b + head * stride_h
        key = score_key(tl.load(base + place * stride_n))
        # k candidates make `mean` of the sample; more than four deviations make k all but sure.
        mean = SAMPLE * (k * 1.0 / num)
        rank = (mean + 4.5 * tl.sqrt(mean) + 4).to(tl.int32)
        num_valid = tl.sum((key > -(2**31)).to(tl.int32), 0)
        if num_valid > rank:
            least = tl.min(tl.where(key > -(2**31), key, 2**31 - 1), 0)
            top = tl.max(key, 0) + 1
            bound, _ = reach(key, rank, least, top, num_valid, rank // 16)
    row = scratch + index * scratch_stride
    tl.store(row, 0)
    tl.store(row + 1, bound)


@triton.jit(do_not_specialize=["width"])
def _filter_kernel(
    scores, lo, hi, scratch, num_heads, width,
    stride_b, stride_h, stride_n, scratch_stride,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
    IN_FOURS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    req, head = index // num_heads, index % num_heads
    begin, num = row_bounds(lo, hi, req, width, HAS_LO, HAS_HI)
    if num > CAPACITY:
        row = scratch + index * scratch_stride
        bound = tl.load(row + 1)
        base = scores + req * stride_b + head * stride_h
        # Shares begin and end at multiples of 4 scores, whatever the bounds are: whole 16-byte
        # loads, where there is memory behind the last score of the last row.
        end = begin + num
        share = tl.cdiv(tl.cdiv(end - begin // 4 * 4, 4), tl.num_programs(1)) * 4
        left = begin // 4 * 4 + tl.program_id(1) * share
        right = tl.minimum(left + share, tl.cdiv(end, 4) * 4)
        readable = tl.multiple_of(right, 4) if IN_FOURS else tl.minimum(right, end)
        start = left
        while start < right:
            place = tl.multiple_of(start, 4) + tl.arange(0, BLOCK)
            score = tl.load(
                base + place.to(tl.int64) * stride_n,
                mask=place < readable, other=float("-inf"),
            )  # fmt: skip
            key = score_key(score)
            keep = (key >= bound) & (place >= begin) & (place < end)
            # One in some thirty is kept: an atomic each takes half the time of a scan of all.
            rank = tl.atomic_add(
                row + tl.zeros([BLOCK], tl.int32), 1, mask=keep, sem="relaxed"
            )  # fmt: skip
            keep = keep & (rank < CAPACITY)
            tl.store(row + 2 + rank, key, mask=keep)
            tl.store(row + 2 + CAPACITY + rank, place, mask=keep)
            start += BLOCK


@triton.jit
def _store_chosen(out, out_scores, rank, keep, position, key, HAS_SCORES: tl.constexpr):
    tl.store(out + rank, position, mask=keep)
    if HAS_SCORES:
        tl.store(out_scores + rank, key_score(key), mask=keep)


@triton.jit
def select_listed(out, out_scores, key, position, k, HAS_SCORES: tl.constexpr):
    """Choose among keys in registers; return how many."""
    num_valid = tl.sum((key > -(2**31)).to(tl.int32), 0)
    low = tl.min(tl.where(key > -(2**31), key, 2**31 - 1), 0)
    return choose_listed(out, out_scores, key, position, num_valid, low, k, HAS_SCORES)


@triton.jit
def choose_listed(out, out_scores, key, position, num_valid, low, k, HAS_SCORES: tl.constexpr):
    """Choose among keys of which `num_valid` are valid, and those reach `low`; return how many."""
    keep = key > -(2**31)
    if num_valid > k:
        top = tl.max(key, 0) + 1
        bound, found = reach(key, k, low, top, num_valid, 0)
        keep = key >= bound
        if found > k:  # too many have the last key: the lowest positions of those
            need = k - tl.sum((key > bound).to(tl.int32), 0)
            back = tl.where(key == bound, -position, -(2**31))
            first = tl.min(tl.where(key == bound, -position, 1), 0)
            last, _ = reach(back, need, first, 1, found - k + need, 0)
            keep = (key > bound) | (back >= last)
    rank = tl.cumsum(keep.to(tl.int32), 0) - 1
    _store_chosen(out, out_scores, rank, keep & (rank < k), position, key, HAS_SCORES)
    return tl.minimum(num_valid, k)


@triton.jit
def _load_keys(base, stride, begin, start, num, BLOCK: tl.constexpr):
    place = start + tl.arange(0, BLOCK)
    score = tl.load(
        base + (begin + place).to(tl.int64) * stride, mask=place < num, other=float("-inf")
    )
    return score_key(score), begin + place


@triton.jit
def select_streamed(
    out, out_scores, base, stride, begin, num, k, HAS_SCORES: tl.constexpr, BLOCK: tl.constexpr
):
    """Choose among all candidates, read again for each count; return how many."""
    # From the least to the largest that there is: equal scores, which are what brings most heads
    # here, take no search at all, and scores that differ little a short one.
    least, most = tl.full([], 2**31 - 1, tl.int32), tl.full([], -(2**31), tl.int32)
    found, start = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    while start < num:
        key, _ = _load_keys(base, stride, begin, start, num, BLOCK)
        is_valid = key > -(2**31)
        least = tl.minimum(least, tl.min(tl.where(is_valid, key, 2**31 - 1), 0))
        most = tl.maximum(most, tl.max(key, 0))
        found += tl.sum(is_valid.to(tl.int32), 0)
        start += BLOCK
    low = tl.where(found > 0, least, -(2**31) + 1)
    high = tl.where(found > 0, most, -(2**31) + 1) + 1
    while (low + 1 < high) & (found > k):
        first, second = thirds(low, high)
        at_first, at_second = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
        start = tl.zeros([], tl.int32)
        while start < num:
            key, _ = _load_keys(base, stride, begin, start, num, BLOCK)
            packed = pack_counts(key, first, second)
            at_first += packed & 0xFFFF
            at_second += packed >> 16
            start += BLOCK
        low, high, found = narrow(low, high, k, found, first, second, at_first, at_second)
    bound = low
    num_above = tl.zeros([], tl.int32)
    start = tl.zeros([], tl.int32)
    while start < num:
        key, _ = _load_keys(base, stride, begin, start, num, BLOCK)
        num_above += tl.sum((key > bound).to(tl.int32), 0)
        start += BLOCK
    need = k - num_above
    num_chosen, num_ties = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    start = tl.zeros([], tl.int32)
    while (start < num) & (num_chosen < k):
        key, position = _load_keys(base, stride, begin, start, num, BLOCK)
        is_tie = key == bound
        tie_rank = num_ties + tl.cumsum(is_tie.to(tl.int32), 0)
        keep = (key > bound) | (is_tie & (tie_rank <= need))
        rank = num_chosen + tl.cumsum(keep.to(tl.int32), 0) - 1
        _store_chosen(out, out_scores, rank, keep, position, key, HAS_SCORES)
        num_ties += tl.sum(is_tie.to(tl.int32), 0)
        num_chosen += tl.sum(keep.to(tl.int32), 0)
        start += BLOCK
    return num_chosen


@triton.jit(do_not_specialize=["width", "k"])
def _select_kernel(
    scores, lo, hi, scratch, out, out_scores, num_heads, width, k,
    stride_b, stride_h, stride_n, scratch_stride,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, HAS_SCORES: tl.constexpr,
    CAPACITY: tl.constexpr, BLOCK: tl.constexpr, BLOCK_PAD: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    req, head = index // num_heads, index % num_heads
    begin, num = row_bounds(lo, hi, req, width, HAS_LO, HAS_HI)
    base = scores + req * stride_b + head * stride_h
    row = scratch + index * scratch_stride
    out_row, score_row = out + index * k, out_scores + index * k
    is_short = num <= CAPACITY
    num_listed = tl.load(row)
    lowest = tl.load(row + 1) == -(2**31) + 1
    is_listed = (num_listed <= CAPACITY) & ((num_listed >= k) | lowest)
    if is_short | is_listed:
        place = tl.arange(0, CAPACITY)
        direct = tl.load(
            base + (begin + place).to(tl.int64) * stride_n,
            mask=is_short & (place < num), other=float("-inf"),
        )  # fmt: skip
        in_list = (place < num_listed) & (num > CAPACITY)
        listed = tl.load(row + 2 + place, mask=in_list, other=-(2**31))
        listed_at = tl.load(row + 2 + CAPACITY + place, mask=in_list, other=0)
        key = tl.where(is_short, score_key(direct), listed)
        position = tl.where(is_short, begin + place, listed_at)
        num_chosen = select_listed(out_row, score_row, key, position, k, HAS_SCORES)
    else:
        num_chosen = select_streamed(
            out_row, score_row, base, stride_n, begin, num, k, HAS_SCORES, BLOCK
        )
    start = num_chosen
    while start < k:
        place = start + tl.arange(0, BLOCK_PAD)
        tl.store(out_row + place, -1, mask=place < k)
        if HAS_SCORES:
            tl.store(score_row + place, float("-inf"), mask=place < k)
        start += BLOCK_PAD


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
    """Choose positions; see `tandemkv.kernels.topk.topk_positions`.

    Parameters
    ----------
    scores, k
        As there.
    lo, hi : torch.Tensor, optional
        ``[num_reqs]``, int32 or int64, dense. Only positions of ``[lo, hi)`` count; what stands
        elsewhere may be anything. By default 0 and ``max_len``, to which they are clamped.
    sort : bool
        False leaves the order of the chosen ones open.
    scratch : torch.Tensor, optional
        From `make_topk_scratch`; by default allocated by each call.
    out_scores : torch.Tensor, optional
        ``[num_reqs, num_kv_heads, k]``, float32, contiguous. Written: the scores of the chosen
        positions, ``-inf`` for padding.
    """
    num_reqs, num_heads, width = scores.shape
    num_rows, capacity = num_reqs * num_heads, capacity_of(k)
    out = torch.empty((num_reqs, num_heads, k), dtype=torch.int32, device=scores.device)
    if not out.numel():
        return out
    if scratch is None:
        scratch = out.new_empty((num_rows, 2 + 2 * capacity))
    if scratch.shape[1] < 2 + 2 * capacity or scratch.stride(1) != 1:
        message = (
            f"scratch.shape={tuple(scratch.shape)}: too small for k={k}; use make_topk_scratch"
        )
        raise ValueError(message)
    chosen_scores = out_scores
    if sort and chosen_scores is None:
        chosen_scores = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    bounds = (out if lo is None else lo, out if hi is None else hi)  # not read where None
    flags = {"HAS_LO": lo is not None, "HAS_HI": hi is not None, "CAPACITY": capacity}
    if width > capacity:
        _sample_kernel[(num_rows,)](
            scores, *bounds, scratch, num_heads, width, k, *scores.stride(), scratch.stride(0),
            **flags, SAMPLE=sample_of(width, k), num_warps=_NUM_WARPS,
        )  # fmt: skip
        parts = min(triton.cdiv(width, _BLOCK), max(1, _FILTER_PROGRAMS // num_rows))
        _filter_kernel[(num_rows, parts)](
            scores, *bounds, scratch, num_heads, width, *scores.stride(), scratch.stride(0),
            **flags, BLOCK=_BLOCK, IN_FOURS=_ends_in_fours(scores), num_warps=_NUM_WARPS,
        )  # fmt: skip
    _select_kernel[(num_rows,)](
        scores, *bounds, scratch, out, out if chosen_scores is None else chosen_scores,
        num_heads, width, k, *scores.stride(), scratch.stride(0),
        **flags, HAS_SCORES=chosen_scores is not None, BLOCK=_BLOCK, BLOCK_PAD=1024,
        num_warps=_NUM_WARPS,
    )  # fmt: skip
    if sort and chosen_scores is not None:
        return _sorted(out, chosen_scores)
    return out


def _ends_in_fours(scores: torch.Tensor) -> bool:
    """Whether the last row may be read to a multiple of 4 scores without leaving its memory."""
    behind = -scores.shape[2] % 4
    last = sum((n - 1) * stride for n, stride in zip(scores.shape, scores.stride(), strict=True))
    room = scores.untyped_storage().nbytes() // scores.element_size() - scores.storage_offset()
    return last + behind * scores.stride(2) < room


def _sorted(positions: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Order both best first (ties: lower position), `scores` in place."""
    bits = scores.view(torch.int32)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    place = torch.where(positions < 0, torch.iinfo(torch.int32).max, positions)
    order = torch.argsort((key.long() << 32) - place, dim=-1, descending=True)
    scores.copy_(scores.gather(-1, order))
    return positions.gather(-1, order)
