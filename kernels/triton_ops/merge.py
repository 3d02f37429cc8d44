# SPDX-License-Identifier: Apache-2.0
"""Triton version of `tandemkv.kernels.merge`: one program per query head."""

import torch
import triton
import triton.language as tl


@triton.jit
def _merge_kernel(
    out_a, lse_a, out_b, lse_b, out, lse,
    num_heads, head_dim,
    a_stride_b, a_stride_h, a_stride_d, la_stride_b, la_stride_h,
    b_stride_b, b_stride_h, b_stride_d, lb_stride_b, lb_stride_h,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    req, head = index // num_heads, index % num_heads
    left = tl.load(lse_a + req * la_stride_b + head * la_stride_h)
    right = tl.load(lse_b + req * lb_stride_b + head * lb_stride_h)
    has_left, has_right = left != float("-inf"), right != float("-inf")
    largest = tl.maximum(left, right)
    shift = tl.where(has_left | has_right, largest, 0.0)
    weight_left = tl.where(has_left, tl.exp(left - shift), 0.0)
    weight_right = tl.where(has_right, tl.exp(right - shift), 0.0)
    total = weight_left + weight_right
    norm = tl.where(total > 0, total, 1.0)
    dim = tl.arange(0, BLOCK_D)
    # A part of weight 0 is not even read: it may hold NaN.
    a = tl.load(
        out_a + req * a_stride_b + head * a_stride_h + dim * a_stride_d,
        mask=dim < tl.where(has_left, head_dim, 0), other=0.0,
    ).to(tl.float32)  # fmt: skip
    b = tl.load(
        out_b + req * b_stride_b + head * b_stride_h + dim * b_stride_d,
        mask=dim < tl.where(has_right, head_dim, 0), other=0.0,
    ).to(tl.float32)  # fmt: skip
    merged = a * (weight_left / norm) + b * (weight_right / norm)
    tl.store(out + index * head_dim + dim, merged.to(out.dtype.element_ty), mask=dim < head_dim)
    is_empty = (left == float("-inf")) & (right == float("-inf"))
    tl.store(lse + index, tl.where(is_empty, float("-inf"), shift + tl.log(norm)))


def merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge parts; see `tandemkv.kernels.merge.merge_attention`."""
    num_reqs, num_heads, head_dim = out_a.shape
    out = torch.empty_like(out_a, memory_format=torch.contiguous_format)
    lse = torch.empty_like(lse_a, memory_format=torch.contiguous_format)
    if out.numel():
        _merge_kernel[(num_reqs * num_heads,)](
            out_a, lse_a, out_b, lse_b, out, lse,
            num_heads, head_dim,
            *out_a.stride(), *lse_a.stride(), *out_b.stride(), *lse_b.stride(),
            BLOCK_D=triton.next_power_of_2(head_dim), num_warps=1,
        )  # fmt: skip
    return out, lse
