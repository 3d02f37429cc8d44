# SPDX-License-Identifier: Apache-2.0
"""Triton versions of the in-place parts of `tandemkv.kernels.quantize`."""

import torch
import triton
import triton.language as tl

_BLOCK_ROWS = 16
# The smallest normal float, as in `tandemkv.kernels.quantize`.
_TINY = torch.finfo(torch.float32).tiny


@triton.jit
def _round(x):
    """Round to nearest even, for magnitudes below 2**22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _int8_kernel(
    k_pool, slots, codes, scale, channels, num_rows, tiny,
    k_stride_s, k_stride_h, k_stride_d, slots_stride, channels_stride_h, channels_stride_r,
    c_stride_s, c_stride_h, c_stride_d, scale_stride_s, scale_stride_h,
    HAS_CHANNELS: tl.constexpr, DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    row, dim = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_D)
    slot = tl.load(slots + row * slots_stride, mask=row < num_rows, other=-1).to(tl.int64)
    is_slot = slot >= 0
    mask = is_slot[:, None] & (dim < DIM)[None, :]
    channel = dim
    if HAS_CHANNELS:
        listed = channels + head * channels_stride_h + dim * channels_stride_r
        channel = tl.load(listed, mask=dim < DIM, other=0)
    at = k_pool + slot[:, None] * k_stride_s + head * k_stride_h + channel[None, :] * k_stride_d
    k = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    step = tl.maximum(tl.div_rn(tl.max(tl.abs(k), 1), 127.0), tiny)
    code = _round(tl.div_rn(k, tl.broadcast_to(step[:, None], k.shape)))
    code = tl.minimum(tl.maximum(code, -127.0), 127.0).to(tl.int8)
    at = codes + slot[:, None] * c_stride_s + head * c_stride_h + dim[None, :] * c_stride_d
    tl.store(at, code, mask=mask)
    tl.store(scale + slot * scale_stride_s + head * scale_stride_h, step, mask=is_slot)


@triton.jit
def _int4_codes(k, mask):
    """Codes, scales and zeros of [tokens, channels], by channel."""
    low = tl.min(tl.where(mask, k, float("inf")), 0)
    high = tl.max(tl.where(mask, k, float("-inf")), 0)
    step, zero = tl.div_rn(high - low, 15.0).to(tl.float16), low.to(tl.float16)
    is_flat = step.to(tl.float32) <= 0
    divisor = tl.where(is_flat, 1.0, step.to(tl.float32))
    shifted = k - zero.to(tl.float32)[None, :]
    code = _round(tl.div_rn(shifted, tl.broadcast_to(divisor[None, :], k.shape)))
    code = tl.where(is_flat[None, :], 0.0, tl.minimum(tl.maximum(code, 0.0), 15.0))
    return code.to(tl.uint8), step, zero


@triton.jit
def _int4_kernel(
    k_pool, pages, lengths, codes, scales, channels,
    k_stride_s, k_stride_h, k_stride_d, pages_stride_b, pages_stride_p, lengths_stride,
    channels_stride_h, channels_stride_r,
    c_stride_p, c_stride_h, c_stride_n, c_stride_d, s_stride_p, s_stride_h, s_stride_k, s_stride_d,
    IS_APPEND: tl.constexpr, HAS_CHANNELS: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    item, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    if IS_APPEND:
        length = tl.load(lengths + item * lengths_stride).to(tl.int64)
        is_full = (length > 0) & (length % PAGE == 0)
        last = pages + item * pages_stride_b + (length // PAGE - 1) * pages_stride_p
        page = tl.load(last, mask=is_full, other=-1).to(tl.int64)
    else:
        page = tl.load(pages + item * pages_stride_b).to(tl.int64)
    if page >= 0:
        row, dim = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
        in_half = dim < HALF
        mask = (row < PAGE)[:, None] & in_half[None, :]
        keys = k_pool + page * PAGE * k_stride_s + head * k_stride_h
        rows = keys + row[:, None] * k_stride_s
        front, back = dim, HALF + dim
        if HAS_CHANNELS:
            listed = channels + head * channels_stride_h
            front = tl.load(listed + front * channels_stride_r, mask=in_half, other=0)
            back = tl.load(listed + back * channels_stride_r, mask=in_half, other=0)
        first = tl.load(rows + front[None, :] * k_stride_d, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(rows + back[None, :] * k_stride_d, mask=mask, other=0.0).to(tl.float32)
        low, low_step, low_zero = _int4_codes(first, (row < PAGE)[:, None])
        high, high_step, high_zero = _int4_codes(second, (row < PAGE)[:, None])
        bytes_ = codes + page * c_stride_p + head * c_stride_h
        bytes_ = bytes_ + row[:, None] * c_stride_n + dim[None, :] * c_stride_d
        tl.store(bytes_, low | (high << 4), mask=mask)
        steps = scales + page * s_stride_p + head * s_stride_h + dim * s_stride_d
        tl.store(steps, low_step, mask=in_half)
        tl.store(steps + HALF * s_stride_d, high_step, mask=in_half)
        tl.store(steps + s_stride_k, low_zero, mask=in_half)
        tl.store(steps + s_stride_k + HALF * s_stride_d, high_zero, mask=in_half)


def append_int8(
    k_pool: torch.Tensor,
    slots: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    channels: torch.Tensor | None = None,
) -> None:
    """Quantize slots; see `tandemkv.kernels.quantize.append_int8`."""
    num_rows, (_, num_heads, dim) = slots.shape[0], codes.shape
    if not num_rows or not dim:
        return
    listed = codes if channels is None else channels
    _int8_kernel[(triton.cdiv(num_rows, _BLOCK_ROWS), num_heads)](
        k_pool, slots, codes, scale, listed, num_rows, _TINY,
        *k_pool.stride(), *slots.stride(), listed.stride(0), listed.stride(-1), *codes.stride(),
        *scale.stride(), HAS_CHANNELS=channels is not None,
        DIM=dim, BLOCK_ROWS=_BLOCK_ROWS, BLOCK_D=triton.next_power_of_2(dim),
    )  # fmt: skip


def _quantize_int4(
    k_pool: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor | None,
    codes: torch.Tensor,
    scales: torch.Tensor,
    channels: torch.Tensor | None,
) -> None:
    _, num_heads, page_size, half = codes.shape
    if not pages.numel() or not half:
        return
    stands_in = pages if lengths is None else lengths
    listed = pages if channels is None else channels
    _int4_kernel[(pages.shape[0], num_heads)](
        k_pool, pages, stands_in, codes, scales, listed,
        *k_pool.stride(), pages.stride(0), pages.stride(-1), stands_in.stride(0),
        listed.stride(0), listed.stride(-1),
        *codes.stride(), *scales.stride(),
        IS_APPEND=lengths is not None, HAS_CHANNELS=channels is not None, PAGE=page_size,
        BLOCK_N=triton.next_power_of_2(page_size), HALF=half, BLOCK_D=triton.next_power_of_2(half),
    )  # fmt: skip


def quantize_int4_pages(
    k_pool: torch.Tensor,
    pages: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    channels: torch.Tensor | None = None,
) -> None:
    """Quantize pages; see `tandemkv.kernels.quantize.quantize_int4_pages`."""
    _quantize_int4(k_pool, pages, None, codes, scales, channels)


def append_int4(
    k_pool: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    channels: torch.Tensor | None = None,
) -> None:
    """Quantize completed pages; see `tandemkv.kernels.quantize.append_int4`."""
    _quantize_int4(k_pool, page_table, lengths, codes, scales, channels)
