# SPDX-License-Identifier: Apache-2.0
"""Triton version of `tandemkv.kernels.changed_rows`.

What differs is found by one program for each head, for it counts what came before. Rows are copied
by a program for a few of them, either way.
"""

import torch
import triton
import triton.language as tl

from tandemkv.kernels.triton_ops.bits import as_bits

_BLOCK_SLOTS, _BLOCK_ROWS, _NUM_WARPS = 1024, 16, 4


# `rows` and `active` may begin at any request of a step.
@triton.jit(do_not_specialize_on_alignment=["rows", "active"])
def _find_kernel(
    positions, sent, rows, active, slots,
    num_heads, num_slots, cap,
    p_stride_r, p_stride_h, p_stride_s, sent_stride_r, sent_stride_h, sent_stride_s,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    req, head = program // num_heads, program % num_heads
    row = tl.load(rows + req).to(tl.int64)
    is_active = tl.load(active + req) != 0
    positions += row * p_stride_r + head * p_stride_h
    sent += row * sent_stride_r + head * sent_stride_h
    slots += program * cap
    num_taken, first = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    end = tl.where(is_active, num_slots, 0)
    while first < end:
        slot = first + tl.arange(0, BLOCK)
        now = tl.load(positions + slot * p_stride_s, mask=slot < num_slots, other=0)
        before = tl.load(sent + slot * sent_stride_s, mask=slot < num_slots, other=0)
        differs = (now != before).to(tl.int32)
        to = num_taken + tl.cumsum(differs, 0) - 1
        is_taken = (differs != 0) & (to < cap)
        tl.store(slots + to, slot, mask=is_taken)
        tl.store(sent + slot * sent_stride_s, now, mask=is_taken)
        num_taken += tl.sum(differs, 0)
        first += BLOCK
    place = num_taken
    while place < cap:
        at = place + tl.arange(0, BLOCK)
        tl.store(slots + at, tl.full([BLOCK], -1, tl.int32), mask=at < cap)
        place += BLOCK


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _copy_kernel(
    slots, k, v, rows, k_res, v_res,
    num_heads, cap, head_dim,
    k_stride_r, k_stride_s, k_stride_h, k_stride_d,
    v_stride_r, v_stride_s, v_stride_h, v_stride_d,
    TAKES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    req, head = program // num_heads, program % num_heads
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + program * cap + place, mask=place < cap, other=-1)
    row = tl.load(rows + req).to(tl.int64)
    dim = tl.arange(0, BLOCK_D)[None, :]
    mask = (slot >= 0)[:, None] & (dim < head_dim)
    there = (program * cap + place)[:, None] * head_dim + dim
    slot = slot[:, None].to(tl.int64)
    k_res += row * k_stride_r + slot * k_stride_s + head * k_stride_h + dim * k_stride_d
    v_res += row * v_stride_r + slot * v_stride_s + head * v_stride_h + dim * v_stride_d
    if TAKES:
        tl.store(k + there, tl.load(k_res, mask=mask), mask=mask)
        tl.store(v + there, tl.load(v_res, mask=mask), mask=mask)
    else:
        tl.store(k_res, tl.load(k + there, mask=mask), mask=mask)
        tl.store(v_res, tl.load(v + there, mask=mask), mask=mask)


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
    if not num_reqs * num_heads * cap:
        return
    _check_dense(slots, k, v, rows, active)
    _find_kernel[(num_reqs * num_heads,)](
        positions, sent, rows, active.view(torch.int8), slots,
        num_heads, positions.shape[2], cap, *positions.stride(), *sent.stride(),
        BLOCK=_BLOCK_SLOTS, num_warps=_NUM_WARPS,
    )  # fmt: skip
    _copy(slots, k, v, rows, k_res, v_res, takes=True)


def put_changed_rows(
    slots: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    k_res: torch.Tensor,
    v_res: torch.Tensor,
) -> None:
    """Empty the buffer; see `tandemkv.kernels.changed_rows.put_changed_rows`."""
    if slots.numel():
        _check_dense(slots, k, v, rows)
        _copy(slots, k, v, rows, k_res, v_res, takes=False)


def _copy(
    slots: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    k_res: torch.Tensor,
    v_res: torch.Tensor,
    *,
    takes: bool,
) -> None:
    num_reqs, num_heads, cap = slots.shape
    head_dim = k.shape[3]
    _copy_kernel[(num_reqs * num_heads, triton.cdiv(cap, _BLOCK_ROWS))](
        slots, as_bits(k), as_bits(v), rows, as_bits(k_res), as_bits(v_res),
        num_heads, cap, head_dim, *k_res.stride(), *v_res.stride(),
        TAKES=takes, BLOCK=_BLOCK_ROWS, BLOCK_D=triton.next_power_of_2(max(1, head_dim)),
        num_warps=_NUM_WARPS,
    )  # fmt: skip


def _check_dense(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(f"tensor of stride {tensor.stride()}: must be dense")
