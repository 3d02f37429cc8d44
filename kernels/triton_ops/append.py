# SPDX-License-Identifier: Apache-2.0
"""Triton version of `tandemkv.kernels.append`: one program per head of a token."""

import torch
import triton
import triton.language as tl

from tandemkv.kernels.triton_ops.bits import as_bits


@triton.jit
def _append_kernel(
    k, v, rows, slots, k_res, v_res, head_dim,
    k_stride_b, k_stride_h, k_stride_d, v_stride_b, v_stride_h, v_stride_d,
    rows_stride, slots_stride,
    kr_stride_r, kr_stride_s, kr_stride_h, kr_stride_d,
    vr_stride_r, vr_stride_s, vr_stride_h, vr_stride_d,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    req, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = tl.load(rows + req * rows_stride).to(tl.int64)
    slot = tl.load(slots + req * slots_stride).to(tl.int64)
    dim = tl.arange(0, BLOCK_D)
    mask = dim < head_dim
    key = tl.load(k + req * k_stride_b + head * k_stride_h + dim * k_stride_d, mask=mask)
    value = tl.load(v + req * v_stride_b + head * v_stride_h + dim * v_stride_d, mask=mask)
    k_to = k_res + row * kr_stride_r + slot * kr_stride_s + head * kr_stride_h
    v_to = v_res + row * vr_stride_r + slot * vr_stride_s + head * vr_stride_h
    tl.store(k_to + dim * kr_stride_d, key, mask=mask)
    tl.store(v_to + dim * vr_stride_d, value, mask=mask)


def append_tokens(
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    k_res: torch.Tensor,
    v_res: torch.Tensor,
) -> None:
    """Write; see `tandemkv.kernels.append.append_tokens`."""
    num_reqs, num_heads, head_dim = k.shape
    if not k.numel():
        return
    _append_kernel[(num_reqs, num_heads)](
        as_bits(k), as_bits(v), rows, slots, as_bits(k_res), as_bits(v_res), head_dim,
        *k.stride(), *v.stride(), *rows.stride(), *slots.stride(),
        *k_res.stride(), *v_res.stride(), BLOCK_D=triton.next_power_of_2(head_dim), num_warps=1,
    )  # fmt: skip
