# SPDX-License-Identifier: Apache-2.0
"""Triton version of `tandemkv.kernels.changed_rows`.

Taking: one program for each head, for it counts what came before. It looks at a block of slots at a
time, and where none differs that is all. Putting: one program for a few rows of a head.
"""

import torch
import triton
import triton.language as tl

from tandemkv.kernels.triton_ops.bits import as_bits

_BLOCK_ROWS, _NUM_WARPS = 16, 4


@triton.jit
def _take_kernel(
    positions, sent, k_res, v_res, rows, active, slots, k, v,
    num_heads, num_slots, cap, head_dim,
    p_stride_r, p_stride_h, p_stride_s, sent_stride_r, sent_stride_h, sent_stride_s,
    k_stride_r, k_stride_s, k_stride_h, k_stride_d,
    v_stride_r, v_stride_s, v_stride_h, v_stride_d,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    req, head = program // num_heads, program % num_heads
    row = tl.load(rows + req).to(tl.int64)
    is_active = tl.load(active + req) != 0
    positions += row * p_stride_r + head * p_stride_h
    sent += row * sent_stride_r + head * sent_stride_h
    slots += program * cap
    dim = tl.arange(0, BLOCK_D)[None, :]
    num_taken, first = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    end = tl.where(is_active, num_slots, 0)
    while first < end:
        slot = first + tl.arange(0, BLOCK)
        now = tl.load(positions + slot * p_stride_s, mask=slot < num_slots, other=0)
        before = tl.load(sent + slot * sent_stride_s, mask=slot < num_slots, other=0)
        differs = (now != before).to(tl.int32)
        num_here = tl.sum(differs, 0)
        if num_here > 0:
            to = num_taken + tl.cumsum(differs, 0) - 1
            is_taken = (differs != 0) & (to < cap)
            tl.store(slots + to, slot, mask=is_taken)
            tl.store(sent + slot * sent_stride_s, now, mask=is_taken)
            mask = is_taken[:, None] & (dim < head_dim)
            source = slot[:, None].to(tl.int64)
            target = (program * cap + to)[:, None] * head_dim + dim
            at = k_res + row * k_stride_r + source * k_stride_s + head * k_stride_h
            tl.store(k + target, tl.load(at + dim * k_stride_d, mask=mask), mask=mask)
            at = v_res + row * v_stride_r + source * v_stride_s + head * v_stride_h
            tl.store(v + target, tl.load(at + dim * v_stride_d, mask=mask), mask=mask)
            num_taken += num_here
        first += BLOCK
    place = num_taken
    while place < cap:
        at = place + tl.arange(0, BLOCK)
        tl.store(slots + at, tl.full([BLOCK], -1, tl.int32), mask=at < cap)
        place += BLOCK


@triton.jit
def _put_kernel(
    slots, k, v, rows, k_res, v_res,
    num_heads, cap, head_dim,
    k_stride_r, k_stride_s, k_stride_h, k_stride_d,
    v_stride_r, v_stride_s, v_stride_h, v_stride_d,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    req, head = program // num_heads, program % num_heads
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + program * cap + place, mask=place < cap, other=-1)
    row = tl.load(rows + req).to(tl.int64)
    dim = tl.arange(0, BLOCK_D)[None, :]
    mask = (slot >= 0)[:, None] & (dim < head_dim)
    source = (program * cap + place)[:, None] * head_dim + dim
    to = slot[:, None].to(tl.int64)
    at = k_res + row * k_stride_r + to * k_stride_s + head * k_stride_h
    tl.store(at + dim * k_stride_d, tl.load(k + source, mask=mask), mask=mask)
    at = v_res + row * v_stride_r + to * v_stride_s + head * v_stride_h
    tl.store(at + dim * v_stride_d, tl.load(v + source, mask=mask), mask=mask)


def take_changed_rows(
    positions: torch.Tensor,
    sent: torch.Tensor,
    k_res: torch.Tensor,
    v_res: torch.Tensor,
    rows: torch.Tensor,
    active: torch.Tensor,
    slots: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """Fill the buffer; see `tandemkv.kernels.changed_rows.take_changed_rows`."""
    num_reqs, num_heads, cap = slots.shape
    if not num_reqs * num_heads:
        return
    _check_dense(slots, k, v, rows, active)
    head_dim = k.shape[3]
    sets = as_bits(k_res), as_bits(v_res)
    _take_kernel[(num_reqs * num_heads,)](
        positions, sent, *sets, rows, active.view(torch.int8), slots, as_bits(k), as_bits(v),
        num_heads, positions.shape[2], cap, head_dim,
        *positions.stride(), *sent.stride(), *k_res.stride(), *v_res.stride(),
        BLOCK=_BLOCK_ROWS, BLOCK_D=triton.next_power_of_2(max(1, head_dim)),
        num_warps=_NUM_WARPS,
    )  # fmt: skip


def put_changed_rows(
    slots: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    k_res: torch.Tensor,
    v_res: torch.Tensor,
) -> None:
    """Empty the buffer; see `tandemkv.kernels.changed_rows.put_changed_rows`."""
    num_reqs, num_heads, cap = slots.shape
    if not num_reqs * num_heads * cap:
        return
    _check_dense(slots, k, v, rows)
    head_dim = k.shape[3]
    _put_kernel[(num_reqs * num_heads, triton.cdiv(cap, _BLOCK_ROWS))](
        slots, as_bits(k), as_bits(v), rows, as_bits(k_res), as_bits(v_res),
        num_heads, cap, head_dim, *k_res.stride(), *v_res.stride(),
        BLOCK=_BLOCK_ROWS, BLOCK_D=triton.next_power_of_2(max(1, head_dim)),
        num_warps=_NUM_WARPS,
    )  # fmt: skip


def _check_dense(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(f"tensor of stride {tensor.stride()}: must be dense")
