# SPDX-License-Identifier: Apache-2.0
"""Quantization of keys for the index that scores are computed from.

Int8 has one scale a token and head. Int4 has a scale and a zero a channel, over the tokens of
one page, as keys vary far more between channels than between tokens (KIVI, Liu et al.,
arXiv:2402.02750, section 3; deviation: pages of the cache are its groups, and keys that are not
in a completed page are not in the index).
"""

import torch

from tandemkv.kernels.check import INT8, INTS, KV_FLOATS, Dims, fail
from tandemkv.kernels.dispatch import uses_triton
from tandemkv.kernels.paging import rows_at

_UINT8, _FLOAT16 = (torch.uint8,), (torch.float16,)
_MAX, _MAX_INT4 = 127, 15
# The smallest normal float: zero tokens get a scale that divides safely.
_MIN_SCALE = torch.finfo(torch.float32).tiny


def quantize_int8(k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize keys symmetrically, with one scale per token and head.

    Parameters
    ----------
    k : torch.Tensor
        ``[num_tokens, num_kv_heads, head_dim]``, float or float8_e4m3fn, finite (not checked).

    Returns
    -------
    quantized : torch.Tensor
        ``[num_tokens, num_kv_heads, head_dim]``, int8, in ``[-127, 127]``.
    scale : torch.Tensor
        ``[num_tokens, num_kv_heads]``, float32, ``> 0``:
        ``quantized * scale`` is within ``scale / 2`` of `k`.
    """
    dims = Dims()
    dims.check("k", k, "num_tokens num_kv_heads head_dim", KV_FLOATS)
    wide = k.float()
    scale = (wide.abs().amax(dim=-1) / _MAX).clamp_(min=_MIN_SCALE)
    quantized = torch.round(wide / scale.unsqueeze(-1)).clamp_(-_MAX, _MAX)
    return quantized.to(torch.int8), scale


def append_int8(
    k_pool: torch.Tensor,
    slots: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    channels: torch.Tensor | None = None,
) -> None:
    """Bring an int8 key index up to date with the keys in some slots.

    Parameters
    ----------
    k_pool : torch.Tensor
        ``[num_slots, num_kv_heads, head_dim]``, float or float8_e4m3fn, finite.
    slots : torch.Tensor
        ``[n]``, int32 or int64. Slots written since; negative ones are skipped.
        The range is not checked on a GPU.
    codes, scale : torch.Tensor
        ``[num_slots, num_kv_heads, head_dim]``, int8, and ``[num_slots,
        num_kv_heads]``, float32, as from `quantize_int8`; written at `slots`.
    channels : torch.Tensor, optional
        As in `quantize_int4_pages`, of any number R: `codes` then has R in place of `head_dim`.
    """
    dims = Dims()
    dims.check("k_pool", k_pool, "num_slots num_kv_heads head_dim", KV_FLOATS)
    dims.check("slots", slots, "num_tokens", INTS)
    kept = _check_channels(dims, channels)
    dims.check("codes", codes, f"num_slots num_kv_heads {kept}", INT8)
    dims.check("scale", scale, "num_slots num_kv_heads", (torch.float32,))
    if uses_triton(k_pool.device):
        from tandemkv.kernels.triton_ops.quantize import append_int8 as on_gpu

        return on_gpu(k_pool, slots, codes, scale, channels)
    slots = slots[slots >= 0].long()
    codes[slots], scale[slots] = quantize_int8(_kept(rows_at(k_pool, slots).float(), channels))


def _check_channels(dims: Dims, channels: torch.Tensor | None) -> str:
    """Return the name of the size that a copy has in place of `head_dim`."""
    if channels is None:
        return "head_dim"
    dims.check("channels", channels, "num_kv_heads num_channels", INTS)
    return "num_channels"


def _kept(keys: torch.Tensor, channels: torch.Tensor | None) -> torch.Tensor:
    """Return the channels ``[H, R]`` of keys ``[..., H, D]``."""
    if channels is None:
        return keys
    return keys.gather(-1, channels.long().expand(*keys.shape[:-2], -1, -1))


def _check_int4(
    dims: Dims,
    k_pool: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    channels: torch.Tensor | None,
) -> None:
    dims.check("k_pool", k_pool, "num_slots num_kv_heads head_dim", KV_FLOATS)
    kept = _check_channels(dims, channels)
    dims.check("codes", codes, "num_pages num_kv_heads page_size half_dim", _UINT8)
    dims.check("scales", scales, f"num_pages num_kv_heads two {kept}", _FLOAT16)
    if dims["two"] != 2 or dims[kept] != 2 * dims["half_dim"]:
        fail("scales.shape", tuple(scales.shape), "[num_pages, num_kv_heads, 2, 2 * half_dim]")
    if dims["num_slots"] != dims["num_pages"] * dims["page_size"]:
        fail("num_slots", dims["num_slots"], f"num_pages * page_size of codes {tuple(codes.shape)}")


def quantize_int4_pages(
    k_pool: torch.Tensor,
    pages: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    channels: torch.Tensor | None = None,
) -> None:
    """Quantize whole pages of keys, with a scale and a zero per page, head and channel.

    Parameters
    ----------
    k_pool : torch.Tensor
        ``[num_pages * page_size, num_kv_heads, head_dim]``, float or float8_e4m3fn, finite and
        within float16's range; `head_dim` even.
    pages : torch.Tensor
        ``[n]``, int32 or int64. Pages to quantize; negative ones are skipped.
        The range is not checked on a GPU.
    codes : torch.Tensor
        ``[num_pages, num_kv_heads, page_size, head_dim // 2]``, uint8, written at `pages`: channel
        c in the low nibble of byte c, channel ``c + head_dim // 2`` in its high nibble, so that
        either nibble of a row of bytes is a row of neighbouring channels.
    scales : torch.Tensor
        ``[num_pages, num_kv_heads, 2, head_dim]``, float16, written at `pages`: scale, then zero. A
        key is about ``code * scale + zero``: within ``scale / 2``, and within 2**-10 of the page's
        largest magnitude in that channel more, which is the rounding of scale and zero themselves.
    channels : torch.Tensor, optional
        ``[num_kv_heads, R]``, int32 or int64, R even: which channels of each head the copy has, in
        its order; `codes` and `scales` then have R in place of `head_dim`. All by default. The
        range is not checked on a GPU.
    """
    dims = Dims()
    _check_int4(dims, k_pool, codes, scales, channels)
    dims.check("pages", pages, "num_quantized", INTS)
    if uses_triton(k_pool.device):
        from tandemkv.kernels.triton_ops.quantize import quantize_int4_pages as on_gpu

        return on_gpu(k_pool, pages, codes, scales, channels)
    pages = pages[pages >= 0].long()
    num_pages, num_heads, page_size, half = codes.shape
    keys = _kept(k_pool.view(num_pages, page_size, num_heads, -1)[pages].float(), channels)
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
    channels: torch.Tensor | None = None,
) -> None:
    """Quantize the page that a decode step has just completed, for requests where it did.

    Parameters
    ----------
    k_pool, codes, scales, channels : torch.Tensor
        As in `quantize_int4_pages`.
    page_table : torch.Tensor
        ``[num_reqs, max_pages]``, int32 or int64: pages of each request.
    lengths : torch.Tensor
        ``[num_reqs]``, int32 or int64: tokens of each request, the new ones included. If a length
        is a positive multiple of the page size, its last page is quantized; else nothing happens.

    Notes
    -----
    A page is in the index from the step that completes it, so candidates must end at or before
    the last completed page: recent tokens, which are attended to anyway, must
    be at least `page_size`. Several tokens a step would jump over a boundary:
    quantize those pages with `quantize_int4_pages`.
    """
    dims = Dims()
    _check_int4(dims, k_pool, codes, scales, channels)
    dims.check("page_table", page_table, "num_reqs max_pages", INTS)
    dims.check("lengths", lengths, "num_reqs", INTS)
    if uses_triton(k_pool.device):
        from tandemkv.kernels.triton_ops.quantize import append_int4 as on_gpu

        return on_gpu(k_pool, page_table, lengths, codes, scales, channels)
    page_size = codes.shape[2]
    is_full = (lengths > 0) & (lengths % page_size == 0)
    last = (lengths.long() // page_size - 1)[is_full]
    pages = page_table[is_full].gather(1, last[:, None])[:, 0]
    quantize_int4_pages(k_pool, pages, codes, scales, channels)
