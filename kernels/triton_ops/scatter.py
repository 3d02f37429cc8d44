# SPDX-License-Identifier: Apache-2.0
"""Triton version of `tandemkv.kernels.scatter`: one program per few rows of a head."""

import torch
import triton
import triton.language as tl

from tandemkv.kernels.triton_ops.bits import as_bits

_BLOCK_ROWS = 8


@triton.jit
def _scatter_kernel(
    k_res, v_res, rows, fetch_slot, k_in, v_in, pos_res, fetch_pos,
    num_heads, cap, head_dim,
    k_stride_r, k_stride_s, k_stride_h, k_stride_d, v_stride_r, v_stride_s, v_stride_h, v_stride_d,
    rows_stride, slot_stride_b, slot_stride_h, slot_stride_c,
    ki_stride_b, ki_stride_h, ki_stride_c, ki_stride_d,
    vi_stride_b, vi_stride_h, vi_stride_c, vi_stride_d,
    pr_stride_r, pr_stride_h, pr_stride_s, fp_stride_b, fp_stride_h, fp_stride_c,
    HAS_POS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    req = (tl.program_id(0) // num_heads).to(tl.int64)
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    place = (tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    slot = tl.load(
        fetch_slot + req * slot_stride_b + head * slot_stride_h + place * slot_stride_c,
        mask=place < cap, other=-1,
    ).to(tl.int64)  # fmt: skip
    is_token = slot >= 0
    row = tl.load(rows + req * rows_stride).to(tl.int64)
    if HAS_POS:
        position = tl.load(
            fetch_pos + req * fp_stride_b + head * fp_stride_h + place * fp_stride_c, mask=is_token
        )
        target = pos_res + row * pr_stride_r + head * pr_stride_h + slot * pr_stride_s
        tl.store(target, position, mask=is_token)
    dim = tl.arange(0, BLOCK_D)[None, :]
    mask = is_token[:, None] & (dim < head_dim)
    slot, place = slot[:, None], place[:, None]
    k_row = k_in + req * ki_stride_b + head * ki_stride_h + place * ki_stride_c
    v_row = v_in + req * vi_stride_b + head * vi_stride_h + place * vi_stride_c
    k = tl.load(k_row + dim * ki_stride_d, mask=mask)
    v = tl.load(v_row + dim * vi_stride_d, mask=mask)
    k_target = k_res + row * k_stride_r + slot * k_stride_s + head * k_stride_h
    v_target = v_res + row * v_stride_r + slot * v_stride_s + head * v_stride_h
    tl.store(k_target + dim * k_stride_d, k, mask=mask)
    tl.store(v_target + dim * v_stride_d, v, mask=mask)


def scatter_pack(
    k_res: torch.Tensor,
    v_res: torch.Tensor,
    rows: torch.Tensor,
    fetch_slot: torch.Tensor,
    k_in: torch.Tensor,
    v_in: torch.Tensor,
    *,
    pos_res: torch.Tensor | None = None,
    fetch_pos: torch.Tensor | None = None,
) -> None:
    """Scatter rows; see `tandemkv.kernels.scatter.scatter_pack`."""
    num_reqs, num_heads, cap = fetch_slot.shape
    head_dim = k_res.shape[-1]
    if not fetch_slot.numel() or not head_dim:
        return
    positions = (fetch_slot, fetch_slot)  # stands in for pointers that are not read
    has_pos = False
    if pos_res is not None and fetch_pos is not None:
        positions, has_pos = (pos_res, fetch_pos), True
    grid = (num_reqs * num_heads, triton.cdiv(cap, _BLOCK_ROWS))
    _scatter_kernel[grid](
        as_bits(k_res), as_bits(v_res), rows, fetch_slot, as_bits(k_in), as_bits(v_in), *positions,
        num_heads, cap, head_dim,
        *k_res.stride(), *v_res.stride(), *rows.stride(), *fetch_slot.stride(),
        *k_in.stride(), *v_in.stride(), *positions[0].stride(), *positions[1].stride(),
        HAS_POS=has_pos, BLOCK_ROWS=_BLOCK_ROWS, BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=4,
    )  # fmt: skip
