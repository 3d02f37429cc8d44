# SPDX-License-Identifier: Apache-2.0
"""Triton version of `tandemkv.kernels.norm`: one program per vector."""

import torch
import triton
import triton.language as tl


@triton.jit
def _norm_kernel(x, weight, out, x_stride, weight_stride, dim, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    wide = tl.load(x + row * x_stride + at, mask=at < dim, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / dim + eps)
    weights = tl.load(weight + at * weight_stride, mask=at < dim, other=0.0).to(tl.float32)
    tl.store(
        out + row * dim + at, (wide * inverse * weights).to(out.dtype.element_ty), mask=at < dim
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise; see `tandemkv.kernels.norm.rms_norm`."""
    dim = x.shape[-1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    rows = x.reshape(-1, dim)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    block = triton.next_power_of_2(dim)
    _norm_kernel[(len(rows),)](
        rows, weight, out, rows.stride(0), weight.stride(0), dim, float(eps),
        BLOCK=block, num_warps=min(8, max(1, block // 512)),
    )  # fmt: skip
    return out
