# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of `tandemkv.kernels.select`: bound, filter, choice."""

import triton
import triton.language as tl

from tandemkv.kernels.triton_ops.chained import follow, lead
from tandemkv.kernels.triton_ops.score_scan import bounds_of, decode_share
from tandemkv.kernels.triton_ops.topk import choose_listed, select_listed, select_streamed
from tandemkv.kernels.triton_ops.topk_search import key_score, reach, score_key

# Keys of one score that is added up in two orders are nearer to each other than this.
ROUNDING = tl.constexpr(64)


@triton.jit
def _put(pointer, value, keep, USE_ASM: tl.constexpr):
    """Store words where `keep`, from the threads that have them.

    A store brings its operands into an order of its own first, through shared memory: nothing
    that scattered words gain by.
    """
    if USE_ASM:
        tl.inline_asm_elementwise(
            """{
                .reg .pred p;
                setp.ne.u32 p, $3, 0;
                @p st.global.u32 [$1], $2;
                mov.u32 $0, 0;
            }""",
            "=r,l,r,r", [pointer, value, keep.to(tl.int32)], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
    else:
        tl.store(pointer, value, mask=keep)


@triton.jit
def _pool(x, top, lse, GROUP: tl.constexpr, CODED: tl.constexpr):
    """Return scores: the mean over heads, the last dimension, of their softmax."""
    if CODED:
        return tl.sum(decode_share(x) * tl.exp2(top - lse), -1) / GROUP
    return tl.sum(tl.exp2(x.to(tl.float32) + (top - lse)), -1) / GROUP


@triton.jit
def _scores_at(
    logits, tile_max, lse, base, position, valid, scratch_width, scratch_tiles,
    GROUP: tl.constexpr, PAD_G: tl.constexpr, BLOCK_N: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    """Return the scores at any positions, -inf where not `valid`."""
    member = tl.arange(0, PAD_G)[None, :]
    logits += base * scratch_width * PAD_G
    tile_max += base * scratch_tiles * PAD_G
    x = tl.load(logits + position[:, None] * PAD_G + member, mask=valid[:, None], other=0)
    top = tl.load(
        tile_max + (position // BLOCK_N)[:, None] * PAD_G + member, mask=valid[:, None], other=0.0
    )
    score = _pool(x, top, lse[None, :], GROUP, CODED)
    return tl.where(valid, score, float("-inf"))


@triton.jit
def _search_memory(
    out, out_scores, logits, tile_max, lse, base, begin, end, k, scratch_width, scratch_tiles,
    GROUP: tl.constexpr, PAD_G: tl.constexpr, BLOCK_N: tl.constexpr, CODED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Choose among all candidates of a head; return how many. Its logits or codes are lost."""
    # A token's logits, two at least, or four codes make room for its score.
    scores = (logits + base * scratch_width * PAD_G).to(tl.pointer_type(tl.float32))
    stride: tl.constexpr = PAD_G // (4 if CODED else 2)
    start = tl.zeros([], tl.int32)
    while begin + start < end:
        position = begin + start + tl.arange(0, BLOCK)
        score = _scores_at(
            logits, tile_max, lse, base, position, position < end, scratch_width,
            scratch_tiles, GROUP, PAD_G, BLOCK_N, CODED,
        )  # fmt: skip
        tl.debug_barrier()  # all have read what is overwritten
        tl.store(scores + position * stride, score, mask=position < end)
        start += BLOCK
    tl.debug_barrier()
    return select_streamed(out, out_scores, scores, stride, begin, end - begin, k, True, BLOCK)


@triton.jit
def _add_equal(
    out, out_scores, logits, tile_max, lse, base, begin, end, wanted, num_chosen, k, scratch_width,
    scratch_tiles, GROUP: tl.constexpr, PAD_G: tl.constexpr, BLOCK_N: tl.constexpr,
    CODED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the lowest positions of the key `wanted` to what is chosen; return how many are then."""
    while (begin < end) & (num_chosen < k):
        position = begin + tl.arange(0, BLOCK)
        score = _scores_at(
            logits, tile_max, lse, base, position, position < end, scratch_width,
            scratch_tiles, GROUP, PAD_G, BLOCK_N, CODED,
        )  # fmt: skip
        is_equal = score_key(score) == wanted
        rank = num_chosen + tl.cumsum(is_equal.to(tl.int32), 0) - 1
        keep = is_equal & (rank < k)
        tl.store(out + rank, position, mask=keep)
        tl.store(out_scores + rank, score, mask=keep)
        num_chosen += tl.sum(keep.to(tl.int32), 0)
        begin += BLOCK
    return num_chosen


@triton.jit
def _sampled_bound(
    logits, tile_max, lse, base, begin, num, k, scratch_width, scratch_tiles,
    GROUP: tl.constexpr, PAD_G: tl.constexpr, BLOCK_N: tl.constexpr, CODED: tl.constexpr,
    CAPACITY: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    """Return what more than `k` scores, and fewer than `CAPACITY`, all but certainly reach."""
    # One random candidate of each of SAMPLE equal parts, as in `topk`.
    part = tl.arange(0, SAMPLE)
    whole, rest = num // SAMPLE, num % SAMPLE  # no product needs more than 32 bits
    left = part * whole + (part * rest) // SAMPLE
    size = (part + 1) * whole + ((part + 1) * rest) // SAMPLE - left
    noise = ((part * 40503) ^ ((part * 30011) >> 7)) & 0xFFFF
    place = begin + left + ((noise * size) >> 16)
    key = score_key(
        _scores_at(
            logits, tile_max, lse, base, place, part >= 0, scratch_width, scratch_tiles, GROUP,
            PAD_G, BLOCK_N, CODED,
        )
    )  # fmt: skip
    # k candidates make `mean` of the sample; more than four deviations make k all but sure,
    # and five below what the list holds make it all but sure that they fit.
    mean = SAMPLE * (k * 1.0 / num)
    rank = (mean + 4.5 * tl.sqrt(mean) + 4).to(tl.int32)
    fitting = tl.sqrt(SAMPLE * (CAPACITY * 1.0 / num) + 6.25) - 2.5
    room = tl.maximum((fitting * fitting).to(tl.int32) - rank, 0)
    slack = tl.minimum(room, rank // 4)
    num_valid = tl.sum((key > -(2**31)).to(tl.int32), 0)
    bound = tl.full([], -(2**31) + 1, tl.int32)
    if num_valid > rank:
        # From the least one on: scores that differ little take no more steps than others.
        least = tl.min(tl.where(key > -(2**31), key, 2**31 - 1), 0)
        most = tl.max(key, 0) + 1
        bound, found = reach(key, rank, least, most, num_valid, slack)
        # So many have just this score that they would not fit: `select_kernel` adds some.
        bound += (found > rank + room).to(tl.int32)
    return bound


@triton.jit(do_not_specialize=["width", "k", "num_splits", "scratch_tiles"])
def bound_kernel(
    lo, hi, active, logits, tile_max, split_lse, head_lse, lists,
    width, k, num_heads, num_splits, scratch_width, scratch_tiles, list_stride,
    lo_stride, hi_stride,
    HAS_ACTIVE: tl.constexpr, GROUP: tl.constexpr, PAD_G: tl.constexpr, BLOCK_N: tl.constexpr,
    CODED: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_P: tl.constexpr, CAPACITY: tl.constexpr,
    SAMPLE: tl.constexpr, LEVELS: tl.constexpr, PER_SAMPLE: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Find a bound for the filter."""
    lead(CHAINED)
    base = tl.program_id(0).to(tl.int64)
    req = base // num_heads
    begin, end = bounds_of(lo, hi, active, req, lo_stride, hi_stride, width, HAS_ACTIVE)
    num = tl.maximum(end - begin, 0)
    bound = tl.full([], -(2**31) + 1, tl.int32)
    if num > 0:
        member, split = tl.arange(0, PAD_G), tl.arange(0, BLOCK_P)
        sums = split_lse + (base * num_splits + split)[:, None] * PAD_G + member[None, :]
        parts = tl.load(sums, mask=(split < num_splits)[:, None], other=float("-inf"))
        for start in tl.static_range(BLOCK_P, BLOCK_S, BLOCK_P):
            is_part = (start + split < num_splits)[:, None]
            more = tl.load(sums + start * PAD_G, mask=is_part, other=float("-inf"))
            peak = tl.maximum(tl.maximum(parts, more), -1e30)  # finite where both are -inf: no NaN
            parts = peak + tl.log2(tl.exp2(parts - peak) + tl.exp2(more - peak))
        largest = tl.max(parts, 0)
        lse = largest + tl.log2(tl.sum(tl.exp2(parts - largest[None, :]), 0))
        lse = tl.where(member < GROUP, lse, float("inf"))
        tl.store(head_lse + base * PAD_G + member, lse)
        if num > CAPACITY:
            # As many as its candidates ask for, where the longest contexts' ask for more.
            for level in tl.static_range(LEVELS):
                fits = (level == 0) | (num // PER_SAMPLE <= (SAMPLE >> level))
                if level + 1 < LEVELS:
                    fits = fits & (num // PER_SAMPLE > (SAMPLE >> (level + 1)))
                if fits:
                    bound = _sampled_bound(
                        logits, tile_max, lse, base, begin, num, k, scratch_width, scratch_tiles,
                        GROUP, PAD_G, BLOCK_N, CODED, CAPACITY, SAMPLE >> level,
                    )  # fmt: skip
    tl.store(lists + base * list_stride, 0)
    tl.store(lists + base * list_stride + 1, bound)


@triton.jit(do_not_specialize=["width", "scratch_tiles"])
def filter_kernel(
    lo, hi, active, logits, tile_max, head_lse, lists,
    width, num_heads, scratch_width, scratch_tiles, list_stride, lo_stride, hi_stride,
    HAS_ACTIVE: tl.constexpr, GROUP: tl.constexpr, PAD_G: tl.constexpr, BLOCK_N: tl.constexpr,
    CODED: tl.constexpr, BLOCK_T: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    RUN: tl.constexpr, CAPACITY: tl.constexpr, USE_ASM: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """List what reaches the bound: positions and scores."""
    base = tl.program_id(0).to(tl.int64)
    req = base // num_heads
    begin, end = bounds_of(lo, hi, active, req, lo_stride, hi_stride, width, HAS_ACTIVE)
    follow(CHAINED)
    if end - begin > CAPACITY:
        step: tl.constexpr = BLOCK_T * BLOCK_N
        row = lists + base * list_stride
        # Scores are not negative: their bits are their keys, and NaN reaches no bound.
        bound = tl.maximum(tl.load(row + 1), 0).to(tl.float32, bitcast=True)
        member = tl.arange(0, PAD_G)
        lse = tl.load(head_lse + base * PAD_G + member)
        logits += base * scratch_width * PAD_G
        tile_max += base * scratch_tiles * PAD_G
        at, last = begin // step + tl.program_id(1), tl.cdiv(end, step)
        while at < last:
            # Whole rows of 16 bytes a thread. Asking for the next block here gains nothing: 15.4
            # instead of 12.7 us (H200, 8 x 64K).
            place = at * (step * PAD_G) + tl.arange(0, step * PAD_G)
            x = tl.load(logits + place, mask=place < scratch_width * PAD_G, other=0)
            x = tl.reshape(x, [BLOCK_T, BLOCK_N, PAD_G])
            tile = at * BLOCK_T + tl.arange(0, BLOCK_T)
            top = tl.load(
                tile_max + tile[:, None] * PAD_G + member[None, :],
                mask=(tile < scratch_tiles)[:, None], other=0.0,
            )  # fmt: skip
            score = _pool(x, top[:, None, :], lse[None, None, :], GROUP, CODED)
            # [ROWS, COLUMNS, RUN]: a thread holds whole columns, as the loads gave them to it.
            score = tl.reshape(score, [ROWS, COLUMNS, RUN])
            member_row = tl.arange(0, ROWS)[:, None, None]
            in_run = tl.arange(0, RUN)[None, None, :]
            position = at * step + member_row * (RUN * COLUMNS) + in_run
            position += tl.arange(0, COLUMNS)[None, :, None] * RUN
            keep = (score >= bound) & (position >= begin) & (position < end)
            # Four bits for each of a column's members: how many before it are kept.
            place = member_row * RUN + in_run
            later = tl.where(place < 7, 0x11111110 << (place * 4), 0)
            before = tl.sum(tl.sum(tl.where(keep, later, 0), 2), 0)
            num_kept = tl.sum(tl.sum(keep.to(tl.int32), 2), 0)
            ends = tl.cumsum(num_kept, 0)
            # One atomic for all: an atomic each is a round trip after the other.
            start = tl.atomic_add(row, tl.sum(num_kept, 0), sem="relaxed")
            rank = (start + ends - num_kept)[None, :, None]
            rank += (before[None, :, None] >> (place * 4)) & 15
            keep = keep & (rank < CAPACITY)
            _put(row + 2 + rank, score.to(tl.int32, bitcast=True), keep, USE_ASM)
            _put(row + 2 + CAPACITY + rank, position, keep, USE_ASM)
            at += tl.num_programs(1)


@triton.jit(do_not_specialize=["width", "k", "scratch_tiles"])
def select_kernel(
    lo, hi, active, logits, tile_max, head_lse, lists, out, out_scores,
    width, k, num_heads, scratch_width, scratch_tiles, list_stride, lo_stride, hi_stride,
    HAS_ACTIVE: tl.constexpr, GROUP: tl.constexpr, PAD_G: tl.constexpr, BLOCK_N: tl.constexpr,
    CODED: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, BLOCK_PAD: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Choose the best `k`: among all where they are few, in the list, or in memory."""
    base = tl.program_id(0).to(tl.int64)
    req = base // num_heads
    begin, end = bounds_of(lo, hi, active, req, lo_stride, hi_stride, width, HAS_ACTIVE)
    follow(CHAINED)
    num = tl.maximum(end - begin, 0)
    row = lists + base * list_stride
    out_row, score_row = out + base * k, out_scores + base * k
    num_listed = tl.load(row)
    bound = tl.load(row + 1)
    lowest = bound == -(2**31) + 1
    member = tl.arange(0, PAD_G)
    lse = tl.load(head_lse + base * PAD_G + member)
    num_chosen = tl.zeros([], tl.int32)
    place = tl.arange(0, CAPACITY)
    if num <= CAPACITY:
        score = _scores_at(
            logits, tile_max, lse, base, begin + place, place < num, scratch_width,
            scratch_tiles, GROUP, PAD_G, BLOCK_N, CODED,
        )  # fmt: skip
        num_chosen = select_listed(out_row, score_row, score_key(score), begin + place, k, True)
    elif (num_listed <= CAPACITY) & ((num_listed >= k) | lowest):
        in_list = place < num_listed
        key = tl.load(row + 2 + place, mask=in_list, other=-(2**31))
        position = tl.load(row + 2 + CAPACITY + place, mask=in_list, other=0)
        # What is listed is a score, and reaches the bound.
        num_chosen = choose_listed(
            out_row, score_row, key, position, num_listed, tl.maximum(bound, 0), k, True
        )
    else:
        in_list = place < num_listed
        key = tl.load(row + 2 + place, mask=in_list, other=2**31 - 1)
        # Scores made anew may be apart from those of the filter in their last bits: nothing that is
        # listed may be taken for what is added.
        is_apart = tl.min(key, 0) - bound >= ROUNDING
        if (num_listed < k) & (num_listed <= CAPACITY) & is_apart:
            # All that reach the bound, and next to them only what is equal to the one below.
            position = tl.load(row + 2 + CAPACITY + place, mask=in_list, other=0)
            tl.store(out_row + place, position, mask=in_list)
            tl.store(score_row + place, key_score(key), mask=in_list)
            num_chosen = _add_equal(
                out_row, score_row, logits, tile_max, lse, base, begin, end, bound - 1, num_listed,
                k, scratch_width, scratch_tiles, GROUP, PAD_G, BLOCK_N, CODED, BLOCK,
            )  # fmt: skip
        if num_chosen < k:
            tl.debug_barrier()  # the same places are written again
            num_chosen = _search_memory(
                out_row, score_row, logits, tile_max, lse, base, begin, end, k, scratch_width,
                scratch_tiles, GROUP, PAD_G, BLOCK_N, CODED, BLOCK,
            )  # fmt: skip
    start = num_chosen
    while start < k:
        column = start + tl.arange(0, BLOCK_PAD)
        tl.store(out_row + column, -1, mask=column < k)
        tl.store(score_row + column, float("-inf"), mask=column < k)
        start += BLOCK_PAD
