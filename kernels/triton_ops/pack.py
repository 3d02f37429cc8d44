# SPDX-License-Identifier: Apache-2.0
"""Triton version of `tandemkv.kernels.pack`: one program per few rows of a head."""

import torch
import triton
import triton.language as tl

from tandemkv.kernels.triton_ops.bits import as_bits

_BLOCK_ROWS = 8


@triton.jit
def _gather_kernel(
    k_pool, v_pool, slots, fetch_pos, k_out, v_out,
    num_heads, cap, head_dim,
    k_stride_s, k_stride_h, k_stride_d, v_stride_s, v_stride_h, v_stride_d,
    slots_stride_b, slots_stride_n, pos_stride_b, pos_stride_h, pos_stride_c,
    ko_stride_b, ko_stride_h, ko_stride_c, ko_stride_d,
    vo_stride_b, vo_stride_h, vo_stride_c, vo_stride_d,
    PAGE_SIZE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    req = (tl.program_id(0) // num_heads).to(tl.int64)
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    place = (tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    in_pack = place < cap
    position = tl.load(
        fetch_pos + req * pos_stride_b + head * pos_stride_h + place * pos_stride_c,
        mask=in_pack, other=-1,
    ).to(tl.int64)  # fmt: skip
    is_token = position >= 0
    page = tl.load(
        slots + req * slots_stride_b + position // PAGE_SIZE * slots_stride_n,
        mask=is_token, other=0,
    ).to(tl.int64)  # fmt: skip
    slot = (page * PAGE_SIZE + position % PAGE_SIZE)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    load = is_token[:, None] & (dim < head_dim)
    store = in_pack[:, None] & (dim < head_dim)
    place = place[:, None]
    k = tl.load(
        k_pool + slot * k_stride_s + head * k_stride_h + dim * k_stride_d, mask=load, other=0
    )
    v = tl.load(
        v_pool + slot * v_stride_s + head * v_stride_h + dim * v_stride_d, mask=load, other=0
    )
    k_row = k_out + req * ko_stride_b + head * ko_stride_h + place * ko_stride_c
    v_row = v_out + req * vo_stride_b + head * vo_stride_h + place * vo_stride_c
    tl.store(k_row + dim * ko_stride_d, k, mask=store)
    tl.store(v_row + dim * vo_stride_d, v, mask=store)


def gather_pack(
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    fetch_pos: torch.Tensor,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    *,
    page_size: int = 1,
) -> None:
    """Gather rows; see `tandemkv.kernels.pack.gather_pack`."""
    num_reqs, num_heads, cap = fetch_pos.shape
    head_dim = k_pool.shape[-1]
    if not fetch_pos.numel() or not head_dim:
        return
    grid = (num_reqs * num_heads, triton.cdiv(cap, _BLOCK_ROWS))
    _gather_kernel[grid](
        as_bits(k_pool), as_bits(v_pool), slots, fetch_pos, as_bits(k_out), as_bits(v_out),
        num_heads, cap, head_dim,
        *k_pool.stride(), *v_pool.stride(), *slots.stride(), *fetch_pos.stride(),
        *k_out.stride(), *v_out.stride(),
        PAGE_SIZE=page_size, BLOCK_ROWS=_BLOCK_ROWS, BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=4,
    )  # fmt: skip
