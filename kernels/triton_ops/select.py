# SPDX-License-Identifier: Apache-2.0
"""Triton version of `tandemkv.kernels.select`: scores that are never written.

For ``softmax_mean`` the scan leaves relative logits, from which three more launches choose:

1. One program per head adds up the sums of the scan's programs, takes a stratified random
   sample of the candidates, and derives a bound that more than k scores, and fewer than fit
   into the head's list, all but certainly reach.
2. Several programs per head turn logits into scores and list what reaches the bound.
3. One program per head searches the exact threshold in its list, in registers.

If the sample misled, 3 writes the head's scores over its logits and searches in memory: slower,
and exact as well. The other poolings need no second pass; their scores stand in the scratch
where logits would.
"""

import torch
import triton
import triton.language as tl

from tandemkv.kernels.score import padded_group
from tandemkv.kernels.select import SelectScratch, make_select_scratch
from tandemkv.kernels.triton_ops import topk
from tandemkv.kernels.triton_ops.score import scan
from tandemkv.kernels.triton_ops.score_scan import bounds_of
from tandemkv.kernels.triton_ops.streams import on_stream
from tandemkv.kernels.triton_ops.topk import choose_listed, select_listed, select_streamed
from tandemkv.kernels.triton_ops.topk_search import reach, score_key

_BLOCK = 1024  # tokens that a program of the filter takes at a time
_BOUND_WARPS, _FILTER_WARPS, _SELECT_WARPS = 8, 4, 8
_COLUMNS = 128  # as many as threads; a block is a multiple of twice as many
_FILTER_PROGRAMS = 4096


@triton.jit
def _scores_at(
    logits, tile_max, lse, base, position, valid, scratch_width, scratch_tiles,
    GROUP: tl.constexpr, PAD_G: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the scores at any positions, -inf where not `valid`."""
    member = tl.arange(0, PAD_G)[None, :]
    logits += base * scratch_width * PAD_G
    tile_max += base * scratch_tiles * PAD_G
    x = tl.load(
        logits + position[:, None] * PAD_G + member, mask=valid[:, None], other=0.0
    ).to(tl.float32)  # fmt: skip
    top = tl.load(
        tile_max + (position // BLOCK_N)[:, None] * PAD_G + member, mask=valid[:, None], other=0.0
    )
    score = tl.sum(tl.exp2(x + (top - lse[None, :])), 1) / GROUP
    return tl.where(valid, score, float("-inf"))


@triton.jit(do_not_specialize=["width", "k", "num_splits", "scratch_tiles"])
def _bound_kernel(
    lo, hi, active, logits, tile_max, split_lse, head_lse, lists,
    width, k, num_heads, num_splits, scratch_width, scratch_tiles, list_stride,
    lo_stride, hi_stride,
    HAS_ACTIVE: tl.constexpr, GROUP: tl.constexpr, PAD_G: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr, CAPACITY: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    base = tl.program_id(0).to(tl.int64)
    req = base // num_heads
    begin, end = bounds_of(lo, hi, active, req, lo_stride, hi_stride, width, HAS_ACTIVE)
    num = tl.maximum(end - begin, 0)
    bound = tl.full([], -(2**31) + 1, tl.int32)
    if num > 0:
        member, split = tl.arange(0, PAD_G), tl.arange(0, BLOCK_S)
        parts = tl.load(
            split_lse + (base * num_splits + split)[:, None] * PAD_G + member[None, :],
            mask=(split < num_splits)[:, None], other=float("-inf"),
        )  # fmt: skip
        largest = tl.max(parts, 0)
        lse = largest + tl.log2(tl.sum(tl.exp2(parts - largest[None, :]), 0))
        lse = tl.where(member < GROUP, lse, float("inf"))
        tl.store(head_lse + base * PAD_G + member, lse)
        if num > CAPACITY:
            # One random candidate of each of SAMPLE equal parts, as in `topk`.
            part = tl.arange(0, SAMPLE)
            whole, rest = num // SAMPLE, num % SAMPLE  # no product needs more than 32 bits
            left = part * whole + (part * rest) // SAMPLE
            size = (part + 1) * whole + ((part + 1) * rest) // SAMPLE - left
            noise = ((part * 40503) ^ ((part * 30011) >> 7)) & 0xFFFF
            place = begin + left + ((noise * size) >> 16)
            key = score_key(
                _scores_at(
                    logits, tile_max, lse, base, place, part >= 0, scratch_width, scratch_tiles,
                    GROUP, PAD_G, BLOCK_N,
                )
            )  # fmt: skip
            mean = SAMPLE * (k * 1.0 / num)
            rank = (mean + 4.5 * tl.sqrt(mean) + 4).to(tl.int32)
            num_valid = tl.sum((key > -(2**31)).to(tl.int32), 0)
            if num_valid > rank:
                top = tl.max(key, 0) + 1
                # As far above `rank` as the list has room, by as many deviations; scores are not
                # negative.
                room = tl.sqrt(SAMPLE * (CAPACITY * 1.0 / num) + 5) - 2.25
                slack = tl.minimum((room * room).to(tl.int32) - rank, rank // 4)
                bound, _ = reach(key, rank, 0, top, num_valid, tl.maximum(slack, 0))
    tl.store(lists + base * list_stride, 0)
    tl.store(lists + base * list_stride + 1, bound)


@triton.jit(do_not_specialize=["width", "scratch_tiles"])
def _filter_kernel(
    lo, hi, active, logits, tile_max, head_lse, lists,
    width, num_heads, scratch_width, scratch_tiles, list_stride, lo_stride, hi_stride,
    HAS_ACTIVE: tl.constexpr, GROUP: tl.constexpr, PAD_G: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    base = tl.program_id(0).to(tl.int64)
    req = base // num_heads
    begin, end = bounds_of(lo, hi, active, req, lo_stride, hi_stride, width, HAS_ACTIVE)
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
            # Whole rows of 16 bytes a thread.
            place = at * (step * PAD_G) + tl.arange(0, step * PAD_G)
            x = tl.load(logits + place, mask=place < scratch_width * PAD_G, other=0.0)
            x = tl.reshape(x, [BLOCK_T, BLOCK_N, PAD_G]).to(tl.float32)
            tile = at * BLOCK_T + tl.arange(0, BLOCK_T)
            top = tl.load(
                tile_max + tile[:, None] * PAD_G + member[None, :],
                mask=(tile < scratch_tiles)[:, None], other=0.0,
            )  # fmt: skip
            score = tl.sum(tl.exp2(x + (top - lse[None, :])[:, None, :]), 2) / GROUP
            # [ROWS, COLUMNS, 2]: a thread holds whole columns, as the loads gave them to it.
            score = tl.reshape(score, [ROWS, COLUMNS, 2])
            member_row = tl.arange(0, ROWS)[:, None, None]
            pair = tl.arange(0, 2)[None, None, :]
            position = at * step + member_row * (2 * COLUMNS) + pair
            position += tl.arange(0, COLUMNS)[None, :, None] * 2
            keep = (score >= bound) & (position >= begin) & (position < end)
            # Four bits for each of a column's members: how many before it are kept.
            place = member_row * 2 + pair
            later = tl.where(place < 7, 0x11111110 << (place * 4), 0)
            before = tl.sum(tl.sum(tl.where(keep, later, 0), 2), 0)
            num_kept = tl.sum(tl.sum(keep.to(tl.int32), 2), 0)
            ends = tl.cumsum(num_kept, 0)
            # One atomic for all: an atomic each is a round trip after the other.
            start = tl.atomic_add(row, tl.sum(num_kept, 0), sem="relaxed")
            rank = (start + ends - num_kept)[None, :, None]
            rank += (before[None, :, None] >> (place * 4)) & 15
            keep = keep & (rank < CAPACITY)
            tl.store(row + 2 + rank, score.to(tl.int32, bitcast=True), mask=keep)
            tl.store(row + 2 + CAPACITY + rank, position, mask=keep)
            at += tl.num_programs(1)


@triton.jit(do_not_specialize=["width", "k", "scratch_tiles"])
def _select_kernel(
    lo, hi, active, logits, tile_max, head_lse, lists, out, out_scores,
    width, k, num_heads, scratch_width, scratch_tiles, list_stride, lo_stride, hi_stride,
    HAS_ACTIVE: tl.constexpr, GROUP: tl.constexpr, PAD_G: tl.constexpr, BLOCK_N: tl.constexpr,
    CAPACITY: tl.constexpr, BLOCK: tl.constexpr, BLOCK_PAD: tl.constexpr,
):  # fmt: skip
    base = tl.program_id(0).to(tl.int64)
    req = base // num_heads
    begin, end = bounds_of(lo, hi, active, req, lo_stride, hi_stride, width, HAS_ACTIVE)
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
            scratch_tiles, GROUP, PAD_G, BLOCK_N,
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
        # A token's logits, two at least, make room for its score.
        scores = (logits + base * scratch_width * PAD_G).to(tl.pointer_type(tl.float32))
        stride: tl.constexpr = PAD_G // 2
        start = tl.zeros([], tl.int32)
        while start < num:
            position = begin + start + tl.arange(0, BLOCK)
            score = _scores_at(
                logits, tile_max, lse, base, position, position < end, scratch_width,
                scratch_tiles, GROUP, PAD_G, BLOCK_N,
            )  # fmt: skip
            tl.debug_barrier()  # all have read what is overwritten
            tl.store(scores + position * stride, score, mask=position < end)
            start += BLOCK
        tl.debug_barrier()
        num_chosen = select_streamed(out_row, score_row, scores, stride, begin, num, k, True, BLOCK)
    start = num_chosen
    while start < k:
        column = start + tl.arange(0, BLOCK_PAD)
        tl.store(out_row + column, -1, mask=column < k)
        tl.store(score_row + column, float("-inf"), mask=column < k)
        start += BLOCK_PAD


def score_topk(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    slots: torch.Tensor,
    lo: torch.Tensor,
    hi: torch.Tensor,
    k: int,
    *,
    width: int,
    scale: float,
    pooling: str = "softmax_mean",
    k_scale: torch.Tensor | None = None,
    page_size: int = 1,
    active: torch.Tensor | None = None,
    scratch: SelectScratch | None = None,
    scan_stream: torch.cuda.Stream | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose positions; see `tandemkv.kernels.select.score_topk`."""
    num_reqs, num_qo_heads = q.shape[:2]
    heads = k_pool.shape[1]
    group, pad_g = num_qo_heads // heads, padded_group(num_qo_heads // heads)
    out = torch.empty((num_reqs, heads, k), dtype=torch.int32, device=q.device)
    out_scores = torch.empty(out.shape, dtype=torch.float32, device=q.device)
    if not out.numel():
        return out, out_scores
    if not width:
        return out.fill_(-1), out_scores.fill_(float("-inf"))
    if scratch is None:
        scratch = make_select_scratch(num_reqs, num_qo_heads, heads, width, k, q.device)
    buffers, lists = scratch.score, scratch.lists
    capacity = topk.capacity_of(k)
    if lists.shape[1] < 2 + 2 * capacity:
        have = tuple(lists.shape)
        message = f"scratch.lists.shape={have}: too small for k={k}; use make_select_scratch"
        raise ValueError(message)
    # Other poolings' scores lie densely where the logits would.
    scores = buffers.logits.view(torch.float32).view(*buffers.logits.shape[:2], -1)[:num_reqs]
    with on_stream(scan_stream):
        scanned = scan(
            q, k_pool, slots, lo, hi, width=width, scale=scale, pooling=pooling,
            k_scale=k_scale, page_size=page_size, active=active, out=scores, scratch=buffers,
        )  # fmt: skip
    if pooling != "softmax_mean":
        ends = hi if active is None else torch.where(active != 0, hi, 0)
        chosen = topk.topk_positions(
            scores[..., :width], k, lo=lo, hi=ends, sort=False, scratch=lists,
            out_scores=out_scores,
        )  # fmt: skip
        return chosen, out_scores
    num_rows = num_reqs * heads
    ranges = (lo, hi, lo if active is None else active.view(torch.int8))
    sizes = (heads, buffers.logits.shape[2], buffers.tile_max.shape[2])
    strides = (lists.stride(0), lo.stride(0), hi.stride(0))
    flags = {
        "HAS_ACTIVE": active is not None, "GROUP": group, "PAD_G": pad_g,
        "BLOCK_N": scanned.block_n, "CAPACITY": capacity,
    }  # fmt: skip
    sample = triton.next_power_of_2(width // topk.POSITIONS_PER_SAMPLE)
    sample = min(topk.MAX_SAMPLE, max(topk.MIN_SAMPLE, sample))
    _bound_kernel[(num_rows,)](
        *ranges, buffers.logits, buffers.tile_max, buffers.split_lse, scratch.head_lse, lists,
        width, k, heads, scanned.num_splits, *sizes[1:], *strides,
        **flags, BLOCK_S=triton.next_power_of_2(scanned.num_splits), SAMPLE=sample,
        num_warps=_BOUND_WARPS if sample < topk.MAX_SAMPLE else 16,
    )  # fmt: skip
    if width > capacity:
        block = max(scanned.block_n, _BLOCK)
        columns = max(_COLUMNS, block // 8)  # at most eight members, of four bits each
        parts = min(triton.cdiv(width, block), max(1, _FILTER_PROGRAMS // num_rows))
        _filter_kernel[(num_rows, parts)](
            *ranges, buffers.logits, buffers.tile_max, scratch.head_lse, lists, width, *sizes,
            *strides, **flags, BLOCK_T=block // scanned.block_n,
            ROWS=block // (2 * columns), COLUMNS=columns, num_warps=_FILTER_WARPS,
        )  # fmt: skip
    _select_kernel[(num_rows,)](
        *ranges, buffers.logits, buffers.tile_max, scratch.head_lse, lists, out, out_scores,
        width, k, *sizes, *strides, **flags, BLOCK=2048, BLOCK_PAD=1024, num_warps=_SELECT_WARPS,
    )  # fmt: skip
    return out, out_scores
