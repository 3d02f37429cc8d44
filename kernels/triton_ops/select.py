# SPDX-License-Identifier: Apache-2.0
"""Triton version of `tandemkv.kernels.select`: scores that are never written.

For ``softmax_mean`` the scan leaves relative logits, or for int4 keys codes of a byte of what
they stand for, from which three more launches choose:

1. One program per head adds up the sums of the scan's programs, takes a stratified random
   sample of the candidates, and derives a bound that more than k scores, and fewer than fit
   into the head's list, all but certainly reach.
2. Several programs per head turn logits into scores and list what reaches the bound.
3. One program per head searches the exact threshold in its list, in registers.

With `pooled_positions` scores are written, pooled, and chosen from: their neighbours count, so
none can be dropped by its own.

Where more have one score than fit into a list, what is above it is listed, and 3 adds the lowest
positions of those. If the sample misled, 3 writes the head's scores over its logits or codes and
searches in memory: slower, and exact as well. The other poolings need no second pass; their
scores stand in the scratch where logits would.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton

from tandemkv.kernels.check import fail
from tandemkv.kernels.score import KeyScan, padded_group
from tandemkv.kernels.select import SelectScratch, make_select_scratch
from tandemkv.kernels.triton_ops import topk
from tandemkv.kernels.triton_ops.chained import is_chained
from tandemkv.kernels.triton_ops.position_pooling import pool_positions
from tandemkv.kernels.triton_ops.score import Scanned, ranges_of, scan, score_keys
from tandemkv.kernels.triton_ops.select_kernels import (
    bound_kernel,
    filter_kernel,
    select_kernel,
)

_INTERPRETED = bool(triton.knobs.runtime.interpret)
_BLOCK = 1024  # tokens that a program takes at a time
_BOUND_WARPS, _FILTER_WARPS, _SELECT_WARPS = 8, 4, 8
# Fewer fit in sooner beside a scan of all keys; longer lists need them all.
_SELECT_REGISTERS, _SHORT_LIST = 128, 4096
# More sums at once reach the threads by shuffles, without a barrier, and ptxas then loads the
# sample one by one: 14.7 us instead of 10.1 at 8 x 64K. A sample of 8192 takes as long either way.
_SPLITS = 64
# Heads of few candidates take smaller samples than the longest may need, down to this one: at
# 8 x 96K one of 8192 takes 13.9 us, one of 4096 9.6, and one of 2048 7.5 (H200).
_LEAST_SAMPLE = 1024
_COLUMNS = 128  # as many as threads; a block is a multiple of it
# Measured on an H200, 8 x 64K, with logits: 19.0 us; 22.6 with as many registers as it takes.
_FILTER_PROGRAMS, _FILTER_REGISTERS = 2048, 64


def score_topk(
    keys: KeyScan,
    k: int,
    *,
    scratch: SelectScratch | None = None,
    scan_stream: torch.cuda.Stream | None = None,
    pooled_positions: tuple[int, int] = (0, 0),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose positions; see `tandemkv.kernels.select.score_topk`."""
    (num_reqs, num_qo_heads), heads = keys.q.shape[:2], keys.k_pool.shape[1]
    width, device = keys.width, keys.q.device
    out = torch.empty((num_reqs, heads, k), dtype=torch.int32, device=device)
    out_scores = torch.empty(out.shape, dtype=torch.float32, device=device)
    if not (out.numel() and width):
        return out.fill_(-1), out_scores.fill_(float("-inf"))
    if scratch is None:
        scratch = make_select_scratch(num_reqs, num_qo_heads, heads, width, k, device)
    if any(pooled_positions):
        with _on_stream(scan_stream):
            own = score_keys(keys, scratch=scratch.score)
        return _best_of(pool_positions(own, *pooled_positions), keys, scratch.lists, out_scores)
    buffers, lists = scratch.score, scratch.lists
    if lists.shape[1] < 2 + 2 * topk.capacity_of(k):
        fail("scratch.lists.shape", tuple(lists.shape), f"made by make_select_scratch for k={k}")
    # Other poolings' scores lie densely where the logits would.
    scores = buffers.logits.view(torch.float32).view(*buffers.logits.shape[:2], -1)[:num_reqs]
    with _on_stream(scan_stream):
        scanned = scan(keys, out=scores, scratch=buffers, may_code=True)
    if keys.pooling != "softmax_mean":
        return _best_of(scores[..., :width], keys, lists, out_scores)
    _choose(scanned, scratch, keys, out, out_scores)
    return out, out_scores


@contextmanager
def _on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run the body on `stream`, between what the current one did before and does after.

    Captured kernels keep the priority of the stream that they were launched on. Without a
    stream the body runs in place.
    """
    if stream is None:
        yield
        return
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


def _choose(
    scanned: Scanned,
    scratch: SelectScratch,
    keys: KeyScan,
    out: torch.Tensor,
    out_scores: torch.Tensor,
) -> None:
    """Choose from what a scan has left: bound, filter and choice, a launch each."""
    (num_reqs, heads, k), buffers, lists = out.shape, scratch.score, scratch.lists
    group, capacity, width = keys.q.shape[1] // heads, topk.capacity_of(k), keys.width
    pad_g = padded_group(group)
    num_rows, ranges = num_reqs * heads, ranges_of(keys)
    sizes = (heads, buffers.logits.shape[2], buffers.tile_max.shape[2])
    strides = (lists.stride(0), keys.lo.stride(0), keys.hi.stride(0))
    flags = {
        "HAS_ACTIVE": keys.active is not None, "GROUP": group, "PAD_G": pad_g,
        "BLOCK_N": scanned.block_n, "CODED": scanned.is_coded,
    }  # fmt: skip
    chained = is_chained(out.device)
    sample, splits = topk.sample_of(width, k), triton.next_power_of_2(scanned.num_splits)
    levels = max(1, (sample // _LEAST_SAMPLE).bit_length())
    bound_kernel[(num_rows,)](
        *ranges, scanned.logits, buffers.tile_max, buffers.split_lse, scratch.head_lse, lists,
        width, k, heads, scanned.num_splits, *sizes[1:], *strides,
        **flags, CAPACITY=capacity, BLOCK_S=splits, SAMPLE=sample, LEVELS=levels,
        PER_SAMPLE=topk.positions_per_sample(k), BLOCK_P=min(splits, _SPLITS),
        CHAINED=chained, num_warps=_BOUND_WARPS if sample < topk.MAX_SAMPLE else 16,
    )  # fmt: skip
    found = (scanned.logits, buffers.tile_max, scratch.head_lse, lists)
    if width > capacity:
        block = max(scanned.block_n, _BLOCK)
        columns = max(_COLUMNS, block // 8)  # at most eight members, of four bits each
        run = min(block // columns, max(2, 16 // (pad_g * scanned.logits.element_size())))
        parts = min(triton.cdiv(width, block), max(1, _FILTER_PROGRAMS // num_rows))
        filter_kernel[(num_rows, parts)](
            *ranges, *found, width, *sizes, *strides, **flags, CAPACITY=capacity,
            BLOCK_T=block // scanned.block_n, ROWS=block // (run * columns), COLUMNS=columns,
            RUN=run, USE_ASM=not _INTERPRETED, CHAINED=chained, num_warps=_FILTER_WARPS,
            maxnreg=_FILTER_REGISTERS if pad_g <= 8 else None, launch_pdl=chained,
        )  # fmt: skip
    select_kernel[(num_rows,)](
        *ranges, *found, out, out_scores, width, k, *sizes, *strides, **flags, CAPACITY=capacity,
        BLOCK=2048, BLOCK_PAD=_BLOCK, CHAINED=chained, num_warps=_SELECT_WARPS,
        maxnreg=_SELECT_REGISTERS if capacity <= _SHORT_LIST else None, launch_pdl=chained,
    )  # fmt: skip


def _best_of(
    scores: torch.Tensor, keys: KeyScan, lists: torch.Tensor, out_scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose among scores that are in memory."""
    ends = keys.hi if keys.active is None else torch.where(keys.active != 0, keys.hi, 0)
    chosen = topk.topk_positions(
        scores, out_scores.shape[2], lo=keys.lo, hi=ends, sort=False, scratch=lists,
        out_scores=out_scores,
    )  # fmt: skip
    return chosen, out_scores
