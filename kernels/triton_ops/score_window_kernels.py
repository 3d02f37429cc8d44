# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of `score_window`: two passes over the keys, no logits in memory.

A row is a query head of the window, among those of one KV head. The first pass leaves, for each
part of the candidates, log2 of every row's sum of exponentials, and the rows as they are
multiplied. The second pass takes some tokens, multiplies again, and adds up the rows' weights.
"""

import triton
import triton.language as tl

from tandemkv.kernels.triton_ops.score_scan import widen_int8

# Nibbles of four bytes -> float16, in order: under the exponent 0x64 a code is 1024 + code.
_ASM_INT4: tl.constexpr = tl.constexpr("""{
    .reg .b32 a, b, c, t;
    mov.b32 t, 0x64646464;
    shr.b32 c, $4, 4;
    prmt.b32 a, $4, t, 0x4140;
    prmt.b32 b, $4, t, 0x4342;
    and.b32 $0, a, 0xFF0FFF0F;
    and.b32 $1, b, 0xFF0FFF0F;
    prmt.b32 a, c, t, 0x4140;
    prmt.b32 b, c, t, 0x4342;
    and.b32 $2, a, 0xFF0FFF0F;
    and.b32 $3, b, 0xFF0FFF0F;
    mov.b32 t, 0x64006400;
    sub.f16x2 $0, $0, t;
    sub.f16x2 $1, $1, t;
    sub.f16x2 $2, $2, t;
    sub.f16x2 $3, $3, t;
}""")


@triton.jit
def _widen_int4(x, USE_ASM: tl.constexpr):
    if USE_ASM:
        return tl.inline_asm_elementwise(
            _ASM_INT4, "=r,=r,=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        return (x & 15).to(tl.float16), (x >> 4).to(tl.float16)


@triton.jit
def _load_keys(
    k_pool, k_scale, slots, page, head, start, lo, hi,
    k_stride_s, k_stride_h, k_stride_n, scale_stride_s, scale_stride_h, slots_stride,
    KIND: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, DOT: tl.constexpr, USE_ASM: tl.constexpr,
):  # fmt: skip
    """Return keys of a tile, or both halves of int4 ones, and factors of their logits (int8).

    `page` is that of the tile where a page holds whole tiles; else pages are looked up. What is
    no candidate may be anything.
    """
    dim, row = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    keys = k_pool + head.to(tl.int64) * k_stride_h
    if PAGE % BLOCK_N == 0:
        page = page.to(tl.int64)
        offset = start % PAGE + row
    else:
        position = start + row
        seen = (position >= lo) & (position < hi)
        page = tl.load(slots + position // PAGE * slots_stride, mask=seen, other=0).to(tl.int64)
        offset = position % PAGE
    token = page * PAGE + offset
    if KIND == "int4":
        at = (page * k_stride_s + offset * k_stride_n)[:, None]
    else:
        at = (token * k_stride_s)[:, None]
    in_key = (dim < DIM)[None, :]
    if DIM == BLOCK_D:
        k = tl.load(keys + at + dim[None, :])
    else:
        k = tl.load(keys + at + dim[None, :], mask=in_key, other=0.0)
    other, factor = k, row.to(tl.float32)
    if KIND == "int4":
        steps = k_scale + head.to(tl.int64) * scale_stride_h
        if PAGE % BLOCK_N == 0:
            steps = (steps + page * scale_stride_s + dim)[None, :]
        else:
            steps = (steps + page * scale_stride_s)[:, None] + dim[None, :]
        low, high = _widen_int4(k, USE_ASM)
        step = tl.load(steps, mask=in_key, other=0.0)
        zero = tl.load(steps + 2 * DIM, mask=in_key, other=0.0)
        k = (low * step + zero).to(DOT)
        step = tl.load(steps + DIM, mask=in_key, other=0.0)
        zero = tl.load(steps + 3 * DIM, mask=in_key, other=0.0)
        other = (high * step + zero).to(DOT)
    elif KIND == "int8":
        factor = tl.load(k_scale + token * scale_stride_s + head * scale_stride_h).to(tl.float32)
        k = widen_int8(k, USE_ASM, DOT)
    else:
        k = k.to(DOT)
    return k, other, factor


@triton.jit(do_not_specialize=["lo", "hi", "num_rows", "num_splits"])
def lse_kernel(
    q, k_pool, k_scale, slots, q_positions, queries, part_lse,
    factor, lo, hi, num_rows, padded_rows, num_heads, num_splits,
    q_stride_w, q_stride_h, q_stride_d, k_stride_s, k_stride_h, k_stride_n,
    scale_stride_s, scale_stride_h, slots_stride, positions_stride,
    KIND: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
    ROUND: tl.constexpr, DOT: tl.constexpr, USE_ASM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum exponentials of one part of the candidates, for some rows of one KV head.

    The first part's programs also leave rows, and what their products are in units of.
    """
    # Heads run fastest: keys of one token are neighbours in memory. Blocks of rows share keys.
    head, num_blocks = tl.program_id(0) % num_heads, padded_rows // BLOCK_M
    block = (tl.program_id(0) // num_heads) % num_blocks
    split = tl.program_id(0) // (num_heads * num_blocks)
    first_tile = lo // BLOCK_N
    num_tiles = tl.cdiv(hi, BLOCK_N) - first_tile
    first = first_tile + (split * num_tiles) // num_splits
    last = first_tile + ((split + 1) * num_tiles) // num_splits

    row, dim = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    in_window = row < num_rows
    limit = tl.load(
        q_positions + row // GROUP * positions_stride, mask=in_window, other=2147483647
    ).to(tl.int32)  # fmt: skip
    least = tl.min(limit, 0)
    q_head = head * GROUP + row % GROUP
    at = (row // GROUP * q_stride_w + q_head * q_stride_h)[:, None] + dim[None, :] * q_stride_d
    mask = in_window[:, None] & (dim < DIM)[None, :]
    query = tl.load(q + at, mask=mask, other=0.0).to(tl.float32)
    high = query
    unit = factor
    if KIND == "int4":
        high = tl.load(q + at + DIM * q_stride_d, mask=mask, other=0.0).to(tl.float32)
    if ROUND == tl.float16:  # noqa: SIM300 (a type, not a constant)
        # By a power of two: what is as precise as bfloat16 is not rounded.
        size = tl.max(tl.maximum(tl.max(tl.abs(query), 1), tl.max(tl.abs(high), 1)), 0)
        exponent = size.to(tl.int32, bitcast=True) & 0x7F800000
        exponent = tl.where(exponent > 0, exponent, 0x3F800000)
        inverse = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
        query, high = query * inverse, high * inverse
        unit = unit * exponent.to(tl.float32, bitcast=True)
    query, high = query.to(ROUND).to(DOT), high.to(ROUND).to(DOT)
    base = head.to(tl.int64) * (num_splits + 1) * padded_rows + row
    if split == 0:
        PARTS: tl.constexpr = 2 if KIND == "int4" else 1
        kept = queries + ((head * padded_rows + row) * PARTS * BLOCK_D)[:, None] + dim[None, :]
        tl.store(kept, query)
        if KIND == "int4":
            tl.store(kept + BLOCK_D, high)
        tl.store(part_lse + base + num_splits * padded_rows, tl.zeros_like(limit) + unit)

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    page = 0
    if PAGE % BLOCK_N == 0:
        # Read one tile ahead: in the pipeline an index takes half of its stages from the keys.
        page = tl.load(slots + first * BLOCK_N // PAGE * slots_stride, mask=first < last, other=0)
    for tile in tl.range(first, last, num_stages=STAGES):
        start = tile * BLOCK_N
        k, other, token_factor = _load_keys(
            k_pool, k_scale, slots, page, head, start, lo, hi, k_stride_s, k_stride_h,
            k_stride_n, scale_stride_s, scale_stride_h, slots_stride, KIND, PAGE, BLOCK_N, DIM,
            BLOCK_D, DOT, USE_ASM,
        )  # fmt: skip
        if PAGE % BLOCK_N == 0:
            page = tl.load(
                slots + (start + BLOCK_N) // PAGE * slots_stride, mask=tile + 1 < last, other=0
            )
        x = tl.dot(query, tl.trans(k), input_precision=PRECISION)
        if KIND == "int4":
            x = tl.dot(high, tl.trans(other), x)
        x = x * unit
        if KIND == "int8":
            x = x * token_factor[None, :]
        if (start < lo) | (start + BLOCK_N > tl.minimum(hi, least)):
            position = start + tl.arange(0, BLOCK_N)
            seen = ((position >= lo) & (position < hi))[None, :]
            x = tl.where(seen & (position[None, :] <= limit[:, None]), x, float("-inf"))
        peak = tl.maximum(largest, tl.max(x, 1))
        shift = tl.where(peak == float("-inf"), 0.0, peak)
        total = total * tl.exp2(largest - shift) + tl.sum(tl.exp2(x - shift[:, None]), 1)
        largest = peak
    tl.store(part_lse + base + split * padded_rows, largest + tl.log2(total))


@triton.jit(do_not_specialize=["lo", "hi", "num_rows", "num_splits"])
def weigh_kernel(
    k_pool, k_scale, slots, q_positions, queries, part_lse, out,
    lo, hi, num_rows, padded_rows, num_heads, num_splits, out_stride,
    k_stride_s, k_stride_h, k_stride_n, scale_stride_s, scale_stride_h, slots_stride,
    positions_stride,
    KIND: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_W: tl.constexpr, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, STAGES: tl.constexpr, DOT: tl.constexpr, USE_ASM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add up the weights of all rows for one tile of tokens of one KV head."""
    head, start = tl.program_id(0) % num_heads, tl.program_id(0) // num_heads * BLOCK_N
    is_read = start + BLOCK_N > lo
    page = 0
    if PAGE % BLOCK_N == 0:
        page = tl.load(slots + start // PAGE * slots_stride, mask=is_read, other=0)
    # Keys are the first operand here, so that rows are added up within a thread.
    k, other, token_factor = _load_keys(
        k_pool, k_scale, slots, page, head, start, lo, hi, k_stride_s, k_stride_h, k_stride_n,
        scale_stride_s, scale_stride_h, slots_stride, KIND, PAGE, BLOCK_N, DIM, BLOCK_D, DOT,
        USE_ASM,
    )  # fmt: skip
    position, dim = start + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    split, query = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_W)
    limits = tl.load(
        q_positions + query * positions_stride, mask=query < num_rows // GROUP, other=2147483647
    )
    is_edge = start + BLOCK_N > tl.min(limits, 0)
    parts = part_lse + head.to(tl.int64) * (num_splits + 1) * padded_rows
    PARTS: tl.constexpr = 2 if KIND == "int4" else 1
    total = tl.zeros([BLOCK_N], tl.float32)
    num_blocks = tl.where(is_read, tl.cdiv(num_rows, BLOCK_M), 0)
    for block in tl.range(0, num_blocks, num_stages=STAGES):
        row = block * BLOCK_M + tl.arange(0, BLOCK_M)
        in_window = row < num_rows
        part = tl.load(
            parts + split[:, None] * padded_rows + row[None, :],
            mask=(split < num_splits)[:, None] & in_window[None, :], other=float("-inf"),
        )  # fmt: skip
        unit = tl.load(parts + num_splits * padded_rows + block * BLOCK_M)
        at = queries + ((head * padded_rows + row) * PARTS * BLOCK_D)[:, None] + dim[None, :]
        x = tl.dot(k, tl.trans(tl.load(at)), input_precision=PRECISION)
        if KIND == "int4":
            x = tl.dot(other, tl.trans(tl.load(at + BLOCK_D)), x)
        largest = tl.max(part, 0)
        # Without candidates, infinity: weights of zero.
        is_blind = largest == float("-inf")
        shift = tl.where(is_blind, 0.0, largest)
        lse = shift + tl.log2(tl.sum(tl.exp2(part - shift[None, :]), 0))
        lse = tl.where(is_blind, float("inf"), lse)
        if KIND == "int8":
            x = x * token_factor[:, None]
        x = x * unit - lse[None, :]
        if is_edge:
            # Read here: a register for each of them is too many elsewhere.
            limit = tl.load(q_positions + row // GROUP * positions_stride, mask=in_window, other=0)
            x = tl.where(position[:, None] <= limit[None, :], x, float("-inf"))
        total += tl.sum(tl.exp2(x), 1)
    scores = tl.where(position < lo, float("-inf"), total / num_rows)
    tl.store(out + head.to(tl.int64) * out_stride + position, scores, mask=position < hi)
