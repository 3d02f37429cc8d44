# SPDX-License-Identifier: Apache-2.0
"""Reference of `tandemkv.kernels.quantize`."""

import torch

from tandemkv.kernels.reference.paging import rows_at

_MAX = 127
_MAX_INT4 = 15
# The smallest normal float: zero tokens get a scale that divides safely.
_MIN_SCALE = torch.finfo(torch.float32).tiny


def quantize_int8(k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize; see `tandemkv.kernels.quantize.quantize_int8`."""
    wide = k.float()
    scale = (wide.abs().amax(dim=-1) / _MAX).clamp_(min=_MIN_SCALE)
    quantized = torch.round(wide / scale.unsqueeze(-1)).clamp_(-_MAX, _MAX)
    return quantized.to(torch.int8), scale


def append_int8(
    k_pool: torch.Tensor, slots: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor
) -> None:
    """Quantize slots; see `tandemkv.kernels.quantize.append_int8`."""
    slots = slots[slots >= 0].long()
    codes[slots], scale[slots] = quantize_int8(rows_at(k_pool, slots))


def quantize_int4_pages(
    k_pool: torch.Tensor, pages: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> None:
    """Quantize pages; see `tandemkv.kernels.quantize.quantize_int4_pages`."""
    pages = pages[pages >= 0].long()
    num_pages, num_heads, page_size, half = codes.shape
    keys = k_pool.view(num_pages, page_size, num_heads, 2 * half)[pages].float()
    low, high = keys.amin(dim=1), keys.amax(dim=1)  # [n, H, D]
    step = ((high - low) / _MAX_INT4).half()
    zero = low.half()
    divisor = torch.where(step > 0, step.float(), 1.0)
    shifted = keys - zero.float().unsqueeze(1)
    rounded = torch.round(shifted / divisor.unsqueeze(1)).clamp_(0, _MAX_INT4)
    code = torch.where((step > 0).unsqueeze(1), rounded, 0.0).to(torch.uint8).transpose(1, 2)
    codes[pages] = code[..., :half] | (code[..., half:] << 4)
    scales[pages] = torch.stack([step, zero], dim=2)


def append_int4(
    k_pool: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """Quantize completed pages; see `tandemkv.kernels.quantize.append_int4`."""
    page_size = codes.shape[2]
    is_full = (lengths > 0) & (lengths % page_size == 0)
    last = (lengths.long() // page_size - 1)[is_full]
    quantize_int4_pages(k_pool, page_table[is_full].gather(1, last[:, None])[:, 0], codes, scales)
