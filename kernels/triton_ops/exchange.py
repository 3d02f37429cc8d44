# SPDX-License-Identifier: Apache-2.0
"""Triton version of `tandemkv.kernels.exchange`: one program per few rows of a head."""

import torch
import triton
import triton.language as tl

from tandemkv.kernels.exchange import SampleWeights
from tandemkv.kernels.triton_ops.bits import as_bits
from tandemkv.kernels.triton_ops.chained import follow, is_chained

_BLOCK_ROWS, _NUM_WARPS = 16, 4


@triton.jit
def _exchange_kernel(
    k_pool, v_pool, slots, fetch_pos, fetch_slot, k_res, v_res, rows,
    weights, to_weights, active,
    num_heads, cap, head_dim,
    k_stride_s, k_stride_h, k_stride_d, v_stride_s, v_stride_h, v_stride_d,
    slots_stride_b, slots_stride_n, fp_stride_b, fp_stride_h, fp_stride_c,
    fs_stride_b, fs_stride_h, fs_stride_c,
    kr_stride_r, kr_stride_s, kr_stride_h, kr_stride_d,
    vr_stride_r, vr_stride_s, vr_stride_h, vr_stride_d,
    rows_stride,
    weights_stride_r, weights_stride_h, to_weights_stride_r, to_weights_stride_h, active_stride,
    PAGE_SIZE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    NUM_SAMPLES: tl.constexpr, BLOCK_S: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    req = (tl.program_id(0) // num_heads).to(tl.int64)
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    place = (tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    follow(CHAINED)
    position = tl.load(
        fetch_pos + req * fp_stride_b + head * fp_stride_h + place * fp_stride_c,
        mask=place < cap, other=-1,
    ).to(tl.int64)  # fmt: skip
    to = tl.load(
        fetch_slot + req * fs_stride_b + head * fs_stride_h + place * fs_stride_c,
        mask=place < cap, other=-1,
    ).to(tl.int64)  # fmt: skip
    row = tl.load(rows + req * rows_stride).to(tl.int64)
    if NUM_SAMPLES:
        # A head's first program takes its weights along: asked for before pages and rows are, and
        # written while the rows are on their way.
        is_active = tl.load(active + req * active_stride) != 0
        sample = tl.arange(0, BLOCK_S)
        is_carried = (sample < NUM_SAMPLES) & is_active & (tl.program_id(1) == 0)
        weight = tl.load(
            weights + row * weights_stride_r + head * weights_stride_h + sample, mask=is_carried
        )
    is_copied = (position >= 0) & (to >= 0)
    page = tl.load(
        slots + req * slots_stride_b + position // PAGE_SIZE * slots_stride_n,
        mask=is_copied, other=0,
    ).to(tl.int64)  # fmt: skip
    source = (page * PAGE_SIZE + position % PAGE_SIZE)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    mask = is_copied[:, None] & (dim < head_dim)
    k = tl.load(k_pool + source * k_stride_s + head * k_stride_h + dim * k_stride_d, mask=mask)
    v = tl.load(v_pool + source * v_stride_s + head * v_stride_h + dim * v_stride_d, mask=mask)
    if NUM_SAMPLES:
        to_weights += row * to_weights_stride_r + head * to_weights_stride_h
        tl.store(to_weights + sample, weight, mask=is_carried)
    to = to[:, None]
    k_target = k_res + row * kr_stride_r + to * kr_stride_s + head * kr_stride_h
    v_target = v_res + row * vr_stride_r + to * vr_stride_s + head * vr_stride_h
    tl.store(k_target + dim * kr_stride_d, k, mask=mask)
    tl.store(v_target + dim * vr_stride_d, v, mask=mask)


def exchange_rows(
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    fetch_pos: torch.Tensor,
    fetch_slot: torch.Tensor,
    k_res: torch.Tensor,
    v_res: torch.Tensor,
    rows: torch.Tensor,
    *,
    page_size: int = 1,
    weights: SampleWeights | None = None,
) -> None:
    """Copy rows; see `tandemkv.kernels.exchange.exchange_rows`."""
    num_reqs, num_heads, cap = fetch_pos.shape
    head_dim = k_pool.shape[-1]
    if not (num_reqs * num_heads and (weights is not None or cap * head_dim)):
        return
    # What stands in for what is not given.
    carried, targets, active, num_samples = fetch_pos, fetch_pos, rows, 0
    if weights is not None:
        carried, targets = as_bits(weights.source), as_bits(weights.target)
        active, num_samples = weights.active.view(torch.int8), carried.shape[-1]
    chained = is_chained(k_pool.device)
    grid = (num_reqs * num_heads, max(1, triton.cdiv(cap, _BLOCK_ROWS)))
    _exchange_kernel[grid](
        as_bits(k_pool), as_bits(v_pool), slots, fetch_pos, fetch_slot, as_bits(k_res),
        as_bits(v_res), rows, carried, targets, active,
        num_heads, cap, head_dim,
        *k_pool.stride(), *v_pool.stride(), *slots.stride(), *fetch_pos.stride(),
        *fetch_slot.stride(), *k_res.stride(), *v_res.stride(), *rows.stride(),
        *carried.stride()[:2], *targets.stride()[:2], *active.stride(),
        PAGE_SIZE=page_size, BLOCK_ROWS=_BLOCK_ROWS,
        BLOCK_D=triton.next_power_of_2(max(1, head_dim)),
        NUM_SAMPLES=num_samples, BLOCK_S=triton.next_power_of_2(max(1, num_samples)),
        CHAINED=chained, launch_pdl=chained, num_warps=_NUM_WARPS,
    )  # fmt: skip
