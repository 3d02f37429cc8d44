# SPDX-License-Identifier: Apache-2.0
"""Triton version of `tandemkv.kernels.rope`: one program per token and head."""

import torch
import triton
import triton.language as tl


@triton.jit
def _rope_kernel(
    x, positions, inv_freq, out,
    num_heads, half, sign, factor,
    x_stride_t, x_stride_h, x_stride_d, positions_stride, freq_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    token, head = index // num_heads, index % num_heads
    at = tl.arange(0, BLOCK)
    mask = at < half
    position = tl.load(positions + token * positions_stride).to(tl.float32)
    angle = position * tl.load(inv_freq + at * freq_stride, mask=mask, other=0.0)
    cos, sin = tl.cos(angle) * factor, tl.sin(angle) * factor * sign
    heads = x + token * x_stride_t + head * x_stride_h
    first = tl.load(heads + at * x_stride_d, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(heads + (at + half) * x_stride_d, mask=mask, other=0.0).to(tl.float32)
    target = out + index * 2 * half
    kind = out.dtype.element_ty
    tl.store(target + at, (first * cos - second * sin).to(kind), mask=mask)
    tl.store(target + half + at, (second * cos + first * sin).to(kind), mask=mask)


def _rotate(
    x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor, sign: float, factor: float
) -> torch.Tensor:
    num_tokens, num_heads, head_dim = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel():
        _rope_kernel[(num_tokens * num_heads,)](
            x, positions, inv_freq, out,
            num_heads, head_dim // 2, sign, factor,
            *x.stride(), positions.stride(0), inv_freq.stride(0),
            BLOCK=triton.next_power_of_2(head_dim // 2), num_warps=1,
        )  # fmt: skip
    return out


def apply_rope(
    x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor, *, scaling: float = 1.0
) -> torch.Tensor:
    """Rotate; see `tandemkv.kernels.rope.apply_rope`."""
    return _rotate(x, positions, inv_freq, 1.0, float(scaling))


def unapply_rope(
    x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor, *, scaling: float = 1.0
) -> torch.Tensor:
    """Rotate back; see `tandemkv.kernels.rope.unapply_rope`."""
    return _rotate(x, positions, inv_freq, -1.0, 1.0 / scaling)
