# SPDX-License-Identifier: Apache-2.0
"""Triton version of `tandemkv.kernels.step_tables`: a program per request and block of columns.

What a request has once is written by the program of its first block.
"""

import torch
import triton
import triton.language as tl

from tandemkv.kernels.step_tables import CandidateTables
from tandemkv.kernels.triton_ops.slot_rules import latest_slot

_BLOCK = 1024
_WARPS = 4


@triton.jit
def _request(rows, lengths, req, rows_stride, lengths_stride):
    """Return the row, int64, and the length, int32."""
    row = tl.load(rows + req * rows_stride).to(tl.int64)
    return row, tl.load(lengths + req * lengths_stride).to(tl.int32)


@triton.jit
def _counts(row, length, num_resident, num_recent, num_dense):
    """Return what is attended to, how much of it is resident, and if the request is sparse."""
    is_long = length > num_dense
    count = tl.where(is_long, tl.minimum(length, num_resident + num_recent), length)
    filled = tl.minimum(tl.maximum(length - num_recent, 0), num_resident)
    return count, filled, is_long & (row != 0)


@triton.jit
def _attended_kernel(
    rows, lengths, req_to_token, slots, attended, width, context,
    num_resident, num_recent, num_dense, first_slot,
    rows_stride, lengths_stride, table_stride_r, table_stride_c,
    slots_stride_b, slots_stride_c, attended_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    req, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, length = _request(rows, lengths, req, rows_stride, lengths_stride)
    count, filled, is_sparse = _counts(row, length, num_resident, num_recent, num_dense)
    column = block * BLOCK + tl.arange(0, BLOCK)
    mask = column < tl.minimum(count, width)  # the rest of a wide table is not read
    in_set = is_sparse & (column < filled)
    position = tl.minimum(tl.maximum(length - count + column, 0), context - 1)
    in_pool = tl.load(
        req_to_token + row * table_stride_r + position * table_stride_c,
        mask=mask & (in_set == 0), other=0,
    ).to(tl.int32)  # fmt: skip
    resident = (first_slot + row * num_resident).to(tl.int32) + column
    tl.store(
        slots + req * slots_stride_b + column * slots_stride_c,
        tl.where(in_set, resident, in_pool), mask=mask,
    )  # fmt: skip
    if block == 0:
        tl.store(attended + req * attended_stride, count.to(tl.int64))


@triton.jit
def _ring_kernel(
    rows, lengths, slots, attended, set_rows, write_slots, width,
    num_resident, num_recent, num_dense, rows_stride, lengths_stride,
    slots_stride_b, slots_stride_c, attended_stride, set_rows_stride, write_slots_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    req, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, length = _request(rows, lengths, req, rows_stride, lengths_stride)
    count, filled, is_sparse = _counts(row, length, num_resident, num_recent, num_dense)
    column = block * BLOCK + tl.arange(0, BLOCK)
    latest = latest_slot(length - count + column, is_sparse == 0, num_resident, num_recent)
    slot = tl.where(is_sparse & (column < filled), column, latest)
    tl.store(
        slots + req * slots_stride_b + column * slots_stride_c,
        (row * width).to(tl.int32) + slot, mask=column < tl.minimum(count, width),
    )  # fmt: skip
    if block == 0:
        newest = latest_slot(length - 1, is_sparse == 0, num_resident, num_recent)
        tl.store(attended + req * attended_stride, count.to(tl.int64))
        tl.store(set_rows + req * set_rows_stride, row)
        tl.store(write_slots + req * write_slots_stride, newest.to(tl.int64))


@triton.jit
def _candidates_kernel(
    rows, lengths, page_slots, to_rows, positions, to_lengths, lo, hi, num_target,
    active, pages, step, selections, width, max_pages,
    page_size, num_sink, num_excluded, num_resident, num_cold, num_layers,
    rows_stride, lengths_stride, table_stride_r, table_stride_c,
    BLOCK: tl.constexpr,
):  # fmt: skip
    req, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    table_row = tl.load(rows + req * rows_stride).to(tl.int64)
    column = block * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    slot = tl.load(
        page_slots + table_row * table_stride_r + column * table_stride_c, mask=mask, other=0
    )
    page = slot // page_size
    page -= (slot < page * page_size).to(page.dtype)  # division rounds to zero
    tl.store(pages + req * max_pages + column, page.to(tl.int32), mask=mask)
    if block == 0:
        row, length = _request(rows, lengths, req, rows_stride, lengths_stride)
        end = tl.maximum(length - num_excluded, 0)
        is_active = (length > tl.load(num_cold)) & (row != 0)
        tl.store(to_rows + req, row)
        tl.store(to_lengths + req, length)
        tl.store(positions + req, (length - 1).to(tl.int64))
        tl.store(lo + req, num_sink)
        tl.store(hi + req, end)
        tl.store(num_target + req, tl.minimum(end, num_resident))
        tl.store(active + req, is_active)
        count = is_active.to(tl.int64) * num_layers
        tl.atomic_add(selections, count, sem="relaxed", scope="sys")  # may be another GPU's
        if req == 0:
            tl.store(step, tl.load(step) + 1)


def load_attended(
    rows: torch.Tensor,
    lengths: torch.Tensor,
    req_to_token: torch.Tensor,
    slots: torch.Tensor,
    attended: torch.Tensor,
    *,
    num_resident: int,
    num_recent: int,
    num_dense: int,
    first_slot: int,
) -> None:
    """Fill; see `tandemkv.kernels.step_tables.load_attended`."""
    num_reqs, width = len(rows), slots.shape[1]
    if not num_reqs:
        return
    _attended_kernel[(num_reqs, max(1, triton.cdiv(width, _BLOCK)))](
        rows, lengths, req_to_token, slots, attended, width, req_to_token.shape[1],
        num_resident, num_recent, num_dense, first_slot,
        rows.stride(0), lengths.stride(0), *req_to_token.stride(), *slots.stride(),
        attended.stride(0), BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip


def load_ring(
    rows: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    attended: torch.Tensor,
    set_rows: torch.Tensor,
    write_slots: torch.Tensor,
    *,
    num_resident: int,
    num_recent: int,
    num_dense: int,
) -> None:
    """Fill; see `tandemkv.kernels.step_tables.load_ring`."""
    num_reqs, width = len(rows), slots.shape[1]
    if not num_reqs:
        return
    _ring_kernel[(num_reqs, max(1, triton.cdiv(width, _BLOCK)))](
        rows, lengths, slots, attended, set_rows, write_slots, width,
        num_resident, num_recent, num_dense, rows.stride(0), lengths.stride(0),
        *slots.stride(), attended.stride(0), set_rows.stride(0), write_slots.stride(0),
        BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip


def load_candidates(
    rows: torch.Tensor,
    lengths: torch.Tensor,
    page_slots: torch.Tensor,
    tables: CandidateTables,
    *,
    page_size: int,
    num_sink: int,
    num_excluded: int,
    num_resident: int,
    num_cold: torch.Tensor,
    num_layers: int,
) -> None:
    """Fill; see `tandemkv.kernels.step_tables.load_candidates`."""
    num_reqs, width = len(rows), min(tables.pages.shape[1], page_slots.shape[1])
    if not num_reqs:
        tables.step.add_(1)
        return
    _candidates_kernel[(num_reqs, max(1, triton.cdiv(width, _BLOCK)))](
        rows, lengths, page_slots, tables.rows, tables.positions, tables.lengths,
        tables.lo, tables.hi, tables.num_target, tables.active, tables.pages, tables.step,
        tables.selections, width, tables.pages.shape[1],
        page_size, num_sink, num_excluded, num_resident, num_cold, num_layers,
        rows.stride(0), lengths.stride(0), *page_slots.stride(),
        BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
