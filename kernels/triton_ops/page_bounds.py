# SPDX-License-Identifier: Apache-2.0
"""Triton version of `tandemkv.kernels.page_bounds`.

A program takes one request, one KV head and a block of its pages. ``max(q low, q high)`` is
``min(q, 0) low + max(q, 0) high``: two products for tensor cores, of pages, on their long side,
with the query heads of a group. For ``softmax_mean`` a second kernel adds up what the blocks'
exponentials come to.
"""

import math

import torch
import triton
import triton.language as tl

from tandemkv.kernels.score import padded_group

_INTERPRETED = bool(triton.knobs.runtime.interpret)
_TRITON_DTYPE = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
# Pages of a program of the first kernel, unless low and high of one head would fill more bytes.
_BLOCK, _BLOCK_BYTES = 64, 32 << 10
_MIN_DOT = 16  # the smallest extent that tensor cores multiply
# Pages of a program of the second kernel, and how many blocks it adds up at a time.
_POOL_BLOCK, _POOL_PARTS = 512, 128


@triton.jit
def _pages_of(lo, hi, req, lo_stride, hi_stride, num_pages, PAGE: tl.constexpr):
    """Return the first page with candidates, and where such pages end: 0 without candidates."""
    begin = tl.maximum(tl.load(lo + req * lo_stride), 0).to(tl.int32)
    end = tl.load(hi + req * hi_stride).to(tl.int32)
    last = tl.minimum(tl.cdiv(end, PAGE), num_pages)
    return begin // PAGE, tl.where(end > begin, last, 0)


@triton.jit(do_not_specialize=["num_pages", "num_blocks"])
def _bound_kernel(
    q, bounds, rows, lo, hi, out, logits, block_lse,
    factor, num_heads, num_pages, num_blocks, q_stride_b, q_stride_h, q_stride_d,
    side_stride, row_stride, page_stride, head_stride, rows_stride, lo_stride, hi_stride,
    POOLING: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr, PAD_G: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_P: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    DTYPE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Heads run fastest: bounds of one page are neighbours in memory.
    head = tl.program_id(0) % num_heads
    block = (tl.program_id(0) // num_heads) % num_blocks
    req = (tl.program_id(0) // (num_heads * num_blocks)).to(tl.int64)
    first, last = _pages_of(lo, hi, req, lo_stride, hi_stride, num_pages, PAGE)
    start = block * BLOCK_P
    member, page = tl.arange(0, BLOCK_G), start + tl.arange(0, BLOCK_P)
    base, used = req * num_heads + head, (page >= first) & (page < last)
    pooled = tl.full([BLOCK_P], float("-inf"), tl.float32)
    if (start < last) & (start + BLOCK_P > first):
        dim = tl.arange(0, BLOCK_D)
        in_group = (member < GROUP)[None, :]
        own = q + req * q_stride_b + (head * GROUP + member)[None, :] * q_stride_h
        query = tl.load(
            own + dim[:, None] * q_stride_d, mask=in_group & (dim < DIM)[:, None], other=0.0
        ).to(DTYPE)  # fmt: skip
        row = tl.load(rows + req * rows_stride).to(tl.int64)
        low = bounds + row * row_stride + head.to(tl.int64) * head_stride
        low += page.to(tl.int64)[:, None] * page_stride + dim[None, :]
        inside = used[:, None] & (dim < DIM)[None, :]
        low_k = tl.load(low, mask=inside, other=0.0)
        high_k = tl.load(low + side_stride, mask=inside, other=0.0)
        negative = tl.where(query < 0, query, 0.0)  # NaN stays in the rest
        x = tl.dot(low_k.to(DOT), negative.to(DOT), input_precision=PRECISION)
        x = tl.dot(high_k.to(DOT), (query - negative).to(DOT), x, input_precision=PRECISION)
        x *= factor
        if POOLING == "softmax_mean":
            x = tl.where(used[:, None], x, float("-inf"))
            top = tl.max(x, 0)
            total = tl.sum(tl.exp2(x - top[None, :]), 0)
            at = base * num_pages + page
            tl.store(
                logits + at[:, None] * PAD_G + member[None, :], x,
                mask=(page < num_pages)[:, None] & (member < PAD_G)[None, :],
            )  # fmt: skip
            tl.store(
                block_lse + (base * num_blocks + block) * PAD_G + member, top + tl.log2(total),
                mask=member < PAD_G,
            )  # fmt: skip
        elif POOLING == "max_logit":
            pooled = tl.max(tl.where(in_group, x, float("-inf")), 1)
        else:
            pooled = tl.sum(tl.where(in_group, x, 0.0), 1) / GROUP
    if POOLING != "softmax_mean":
        tl.store(
            out + base * num_pages + page, tl.where(used, pooled, float("-inf")),
            mask=page < num_pages,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_pages", "num_blocks"])
def _pool_kernel(
    lo, hi, out, logits, block_lse, num_heads, num_pages, num_blocks, lo_stride, hi_stride,
    PAGE: tl.constexpr, GROUP: tl.constexpr, PAD_G: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_T: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Turn logits into the mean of the heads' softmax over pages."""
    base = tl.program_id(0).to(tl.int64)
    first, last = _pages_of(lo, hi, base // num_heads, lo_stride, hi_stride, num_pages, PAGE)
    start = tl.program_id(1) * BLOCK_T
    member, page = tl.arange(0, PAD_G), start + tl.arange(0, BLOCK_T)
    pooled = tl.full([BLOCK_T], float("-inf"), tl.float32)
    used = (page >= first) & (page < last)
    if (start < last) & (start + BLOCK_T > first):
        x = tl.load(
            logits + (base * num_pages + page)[:, None] * PAD_G + member[None, :],
            mask=used[:, None], other=0.0,
        )  # fmt: skip
        largest = tl.full([PAD_G], float("-inf"), tl.float32)
        total = tl.zeros([PAD_G], tl.float32)
        end = tl.cdiv(last, BLOCK_P)
        for begin in range(first // BLOCK_P, end, PARTS):
            part = begin + tl.arange(0, PARTS)
            lse = tl.load(
                block_lse + (base * num_blocks + part)[:, None] * PAD_G + member[None, :],
                mask=(part < end)[:, None], other=float("-inf"),
            )  # fmt: skip
            peak = tl.maximum(largest, tl.max(lse, 0))
            total = total * tl.exp2(largest - peak) + tl.sum(tl.exp2(lse - peak[None, :]), 0)
            largest = peak
        share = tl.exp2(x - (largest + tl.log2(total))[None, :])
        pooled = tl.sum(tl.where((member < GROUP)[None, :], share, 0.0), 1) / GROUP
    tl.store(
        out + base * num_pages + page, tl.where(used, pooled, float("-inf")), mask=page < num_pages
    )


def score_pages(
    q: torch.Tensor,
    bounds: torch.Tensor,
    rows: torch.Tensor,
    lo: torch.Tensor,
    hi: torch.Tensor,
    *,
    num_pages: int,
    page_tokens: int,
    scale: float,
    pooling: str,
) -> torch.Tensor:
    """Score pages; see `tandemkv.kernels.page_bounds.score_pages`."""
    num_reqs, num_heads, dim = len(q), *bounds.shape[3:]
    out = torch.empty((num_reqs, num_heads, num_pages), dtype=torch.float32, device=q.device)
    if not out.numel():
        return out
    group, block_d = q.shape[1] // num_heads, max(_MIN_DOT, triton.next_power_of_2(dim))
    block = min(_BLOCK, _BLOCK_BYTES // (2 * block_d * bounds.element_size()))
    block = max(_MIN_DOT, block)
    pad_g, num_blocks = padded_group(group), triton.cdiv(num_pages, block)
    is_softmax = pooling == "softmax_mean"
    logits = lse = out  # not read
    if is_softmax:
        logits = out.new_empty((*out.shape, pad_g))
        lse = out.new_empty((*out.shape[:2], num_blocks, pad_g))
    sizes = (num_heads, num_pages, num_blocks)
    common = {"PAGE": page_tokens, "GROUP": group, "PAD_G": pad_g, "BLOCK_P": block}
    _bound_kernel[(num_reqs * num_blocks * num_heads,)](
        q, bounds, rows, lo, hi, out, logits, lse, scale * (math.log2(math.e) if is_softmax else 1),
        *sizes, *q.stride(), *bounds.stride()[:4], rows.stride(0), lo.stride(0), hi.stride(0),
        POOLING=pooling, **common, BLOCK_G=max(8, pad_g), DIM=dim, BLOCK_D=block_d,
        DTYPE=_TRITON_DTYPE[bounds.dtype],
        # The interpreter multiplies bfloat16 as if its bits were integers.
        DOT=tl.float32 if _INTERPRETED else _TRITON_DTYPE[bounds.dtype],
        PRECISION="ieee" if bounds.dtype == torch.float32 else "tf32", num_warps=4,
    )  # fmt: skip
    if is_softmax:
        _pool_kernel[(num_reqs * num_heads, triton.cdiv(num_pages, _POOL_BLOCK))](
            lo, hi, out, logits, lse, *sizes, lo.stride(0), hi.stride(0), **common,
            BLOCK_T=_POOL_BLOCK, PARTS=_POOL_PARTS, num_warps=4,
        )  # fmt: skip
    return out
