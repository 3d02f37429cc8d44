# SPDX-License-Identifier: Apache-2.0
"""Triton kernel of `score_keys`: one pass over the keys.

A program takes one request, one KV head and a contiguous part of the candidates, whose
borders it reads on the device. Keys are the first operand of the product, so that tokens fill
the tensor cores' long side and the few query heads of a group their short one; what is
quantized is widened to float16, exactly, in registers.
"""

import triton
import triton.language as tl

# Eight nibbles of four bytes -> eight float16, five instructions for all, where conversions cost
# several each. A nibble as it stands is the subnormal nibble * 2**-24 (a high one, which keeps its
# place, sixteen times that), and tensor cores multiply subnormals exactly. Two bytes share a
# register with the one between them left out, so dimensions come in the order of `_swap`.
_ASM_INT4: tl.constexpr = tl.constexpr("""{
    .reg .b32 t;
    shr.b32 t, $4, 8;
    and.b32 $0, $4, 0x000F000F;
    and.b32 $1, t, 0x000F000F;
    and.b32 $2, $4, 0x00F000F0;
    and.b32 $3, t, 0x00F000F0;
}""")
_SUBNORMAL: tl.constexpr = tl.constexpr(2.0**24)
_HIGH: tl.constexpr = tl.constexpr(1.0 / 16)
# int8 with the sign bit turned is value + 128; under the exponent 0x64 a byte is 1024 + byte.
_ASM_INT8: tl.constexpr = tl.constexpr("""{
    .reg .b32 t, c;
    mov.b32 c, 0x64646464;
    xor.b32 t, $2, 0x80808080;
    prmt.b32 $0, t, c, 0x4140;
    prmt.b32 $1, t, c, 0x4342;
    mov.b32 c, 0x64806480;
    sub.f16x2 $0, $0, c;
    sub.f16x2 $1, $1, c;
}""")


# Four floats -> four codes of `encode_share`, two a register on the way.
_ASM_SHARE: tl.constexpr = tl.constexpr("""{
    .reg .b32 a, b;
    cvt.rn.f16x2.f32 a, $2, $1;
    cvt.rn.f16x2.f32 b, $4, $3;
    add.u32 a, a, 0x00400040;
    add.u32 b, b, 0x00400040;
    shr.u32 a, a, 7;
    shr.u32 b, b, 7;
    prmt.b32 $0, a, b, 0x6420;
}""")


@triton.jit
def _swap(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, USE_ASM: tl.constexpr):
    """Bring rows, dimensions, into the order that `_widen_int4` has them in."""
    if USE_ASM:
        x = tl.permute(tl.reshape(x, [ROWS // 4, 2, 2, COLUMNS]), (0, 2, 1, 3))
        x = tl.reshape(x, [ROWS, COLUMNS])
    return x


@triton.jit
def _widen_int4(x, USE_ASM: tl.constexpr, DOT: tl.constexpr):
    """Return low and high nibbles, in the order of `_swap` and in units of the dtype."""
    if USE_ASM:
        low, high = tl.inline_asm_elementwise(
            _ASM_INT4, "=r,=r,=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
        return low.to(DOT), high.to(DOT)
    else:
        return (x & 15).to(DOT), (x & 240).to(DOT)


@triton.jit
def widen_int8(x, USE_ASM: tl.constexpr, DOT: tl.constexpr):
    """Convert by way of float16, exactly."""
    if USE_ASM:
        return tl.inline_asm_elementwise(
            _ASM_INT8, "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4
        ).to(DOT)
    else:
        return x.to(DOT)


@triton.jit
def encode_share(share, USE_ASM: tl.constexpr):
    """Return codes of a byte of what is in [0, 1]: the upper half of a float16 without its sign.

    Five bits of exponent and three of mantissa: within a sixteenth of what is coded, down to
    2**-14; less is off by up to 2**-18, and zero below that. NaN becomes zero or stays NaN.
    """
    if USE_ASM:
        return tl.inline_asm_elementwise(
            _ASM_SHARE, "=r,r,r,r,r", [share], dtype=tl.uint8, is_pure=True, pack=4
        )
    else:
        bits = share.to(tl.float16).to(tl.uint16, bitcast=True)
        return ((bits + 64) >> 7).to(tl.uint8)


@triton.jit
def decode_share(code):
    """Undo `encode_share`, in float32; what is no code may be NaN."""
    return (code.to(tl.uint16) << 7).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def bounds_of(lo, hi, active, req, lo_stride, hi_stride, width, HAS_ACTIVE: tl.constexpr):
    """Return begin and end of a request's candidates; without candidates the end is 0."""
    begin = tl.maximum(tl.load(lo + req * lo_stride), 0).to(tl.int32)
    end = tl.minimum(tl.load(hi + req * hi_stride), width).to(tl.int32)
    if HAS_ACTIVE:
        end = tl.where(tl.load(active + req) != 0, end, 0)
    return begin, tl.where(end > begin, end, 0)


@triton.jit
def _load_keys(keys, dim, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load rows of keys, each from its address on."""
    if DIM == BLOCK_D:
        return tl.load(keys + dim[None, :], eviction_policy="evict_first")
    else:
        return tl.load(keys + dim[None, :], mask=(dim < DIM)[None, :], other=0.0)


@triton.jit
def _load_scales(head, page, stride, dim, DIM: tl.constexpr):
    """Load the scales of a page's low and high nibbles."""
    at = head + page.to(tl.int64) * stride + dim
    low = tl.load(at, mask=dim < DIM, other=0.0)
    return low, tl.load(at + DIM, mask=dim < DIM, other=0.0)


@triton.jit
def scan_kernel(
    q, k_pool, k_scale, channels, slots, lo, hi, active, out, logits, tile_max, split_lse, zero_dot,
    factor, width, num_heads, num_splits, out_width, scratch_width, scratch_tiles,
    q_stride_b, q_stride_h, q_stride_d, k_stride_s: tl.constexpr, k_stride_h,
    k_stride_n: tl.constexpr, scale_stride_s, scale_stride_h, slots_stride_b, lo_stride, hi_stride,
    KIND: tl.constexpr, POOLING: tl.constexpr, HAS_ACTIVE: tl.constexpr,
    HAS_CHANNELS: tl.constexpr, GROUP: tl.constexpr, PAD_G: tl.constexpr,
    BLOCK_G: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr, ROUND: tl.constexpr, DOT: tl.constexpr, USE_ASM: tl.constexpr,
    PRECISION: tl.constexpr, CODED: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Score one part of one KV head's candidates.

    ``max_logit`` and ``mean_logit`` go to `out`; ``softmax_mean`` leaves relative logits, or
    codes of their exponentials, and the sums that the second pass turns into scores. BLOCK_D
    covers a key, or half of an int4 one, and DIM is how much of it there is.

    A product has eight columns at least. Where a group has four query heads at most, they stand
    there twice, and with HALVES of 2 a tile's second half keeps the second four: what is done for
    each element of a product is done for half as many.
    """
    # Heads run fastest: keys of one token are neighbours in memory.
    head = tl.program_id(0) % num_heads
    split = (tl.program_id(0) // num_heads) % num_splits
    req = tl.program_id(0) // (num_heads * num_splits)
    begin, end = bounds_of(lo, hi, active, req, lo_stride, hi_stride, width, HAS_ACTIVE)
    first_tile = begin // BLOCK_N
    num_tiles = tl.maximum(tl.cdiv(end, BLOCK_N) - first_tile, 0)
    num_tiles = tl.where(end > begin, num_tiles, 0)
    first = first_tile + (split * num_tiles) // num_splits
    last = first_tile + ((split + 1) * num_tiles) // num_splits

    rows: tl.constexpr = BLOCK_N // HALVES
    column, dim, row = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, rows)
    member, begin_row = column, tl.zeros([BLOCK_G], tl.int32)
    if HALVES == 2:
        member, begin_row = column % PAD_G, column // PAD_G * rows
    in_group, is_kept = member < GROUP, column < HALVES * PAD_G
    base = req.to(tl.int64) * num_heads + head
    table = slots + req.to(tl.int64) * slots_stride_b
    k_head = k_pool + head.to(tl.int64) * k_stride_h
    q_rows = q + req.to(tl.int64) * q_stride_b + (head * GROUP + member)[None, :] * q_stride_h
    in_query = in_group[None, :] & (dim < DIM)[:, None]
    low_dim, high_dim = dim, DIM + dim
    if HAS_CHANNELS:
        own = channels + head * (2 * DIM if KIND == "int4" else DIM)
        low_dim = tl.load(own + dim, mask=dim < DIM, other=0)
        if KIND == "int4":
            high_dim = tl.load(own + DIM + dim, mask=dim < DIM, other=0)
    query = tl.load(q_rows + low_dim[:, None] * q_stride_d, mask=in_query, other=0.0).to(tl.float32)
    unit = tl.full([BLOCK_G], 1.0, tl.float32) * factor
    if KIND == "int4":
        high = tl.load(
            q_rows + high_dim[:, None] * q_stride_d, mask=in_query, other=0.0
        ).to(tl.float32)  # fmt: skip
        peak = tl.maximum(tl.max(tl.abs(query), 0), tl.max(tl.abs(high), 0))
        peak = tl.where(peak > 0, peak, 1.0)
        query, high = (query / peak[None, :]).to(ROUND), (high / peak[None, :]).to(ROUND)
        unit = unit * peak
        code_unit = unit * (_SUBNORMAL if USE_ASM else 1.0)
        # The constant of each page, for BLOCK_P pages at a time.
        scale_head = k_scale + head.to(tl.int64) * scale_stride_h
        zeros = scale_head + 2 * DIM
        low_q, high_q = query.to(DOT), high.to(DOT)
        first_page, last_page = first * BLOCK_N // PAGE, tl.cdiv(last * BLOCK_N, PAGE)
        for start in range(first_page, last_page, BLOCK_P):
            index = start + tl.arange(0, BLOCK_P)
            is_page = index < last_page
            page = tl.load(table + index, mask=is_page, other=0).to(tl.int64)
            at = zeros + page[:, None] * scale_stride_s + dim[None, :]
            mask = is_page[:, None] & (dim < DIM)[None, :]
            constant = tl.dot(tl.load(at, mask=mask, other=0.0).to(DOT), low_q)
            constant = tl.dot(tl.load(at + DIM, mask=mask, other=0.0).to(DOT), high_q, constant)
            tl.store(
                zero_dot + (base * scratch_tiles + index)[:, None] * PAD_G + member[None, :],
                constant * unit[None, :], mask=is_page[:, None] & (column < PAD_G)[None, :],
            )  # fmt: skip
        tl.debug_barrier()  # other threads of this program read it below
        high = high * _HIGH
    else:
        if ROUND == tl.float16:  # noqa: SIM300 (a type, not a constant)
            peak = tl.max(tl.abs(query), 0)
            peak = tl.where(peak > 0, peak, 1.0)
            query, unit = query / peak[None, :], unit * peak
        query = query.to(ROUND).to(DOT)

    largest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    # Read one tile ahead: an index in the pipeline would take half of its stages from the keys.
    following = tl.load(table + first * BLOCK_N // PAGE, mask=first < last, other=0)
    if KIND == "int4":
        scales = _load_scales(scale_head, following, scale_stride_s, dim, DIM)
    for tile in tl.range(first, last, num_stages=STAGES):
        start = tile * BLOCK_N
        position = start + row
        seen = (position >= begin) & (position < end)
        if PAGE % BLOCK_N == 0:
            # Any token of the tile being a candidate, its page is there in full.
            page = following.to(tl.int64)
            following = tl.load(table + (start + BLOCK_N) // PAGE, mask=tile + 1 < last, other=0)
            # One address a tile, and offsets that all tiles share.
            if KIND == "int4":
                keys = k_head + page * k_stride_s + start % PAGE * k_stride_n
                keys = keys + row[:, None] * k_stride_n
            else:
                keys = k_head + (page * PAGE + start % PAGE) * k_stride_s
                keys = keys + row[:, None] * k_stride_s
        else:
            pages = tl.load(table + position // PAGE, mask=seen, other=0).to(tl.int64)
            token = pages * PAGE + position % PAGE
            keys = k_head + token[:, None] * k_stride_s
        k = _load_keys(keys, dim, DIM, BLOCK_D)
        if KIND == "int4":
            low_scale, high_scale = scales[0].to(ROUND)[:, None], scales[1].to(ROUND)[:, None]
            constant = tl.load(
                zero_dot + (base * scratch_tiles + start // PAGE) * PAD_G + member,
                mask=member < PAD_G, other=0.0,
            )  # fmt: skip
            low_k, high_k = _widen_int4(k, USE_ASM, DOT)
            low_q = _swap((query * low_scale).to(DOT), BLOCK_D, BLOCK_G, USE_ASM)
            high_q = _swap((high * high_scale).to(DOT), BLOCK_D, BLOCK_G, USE_ASM)
            acc = tl.dot(low_k, low_q)
            acc = tl.dot(high_k, high_q, acc)
            if HALVES == 2:
                k = _load_keys(keys + rows * k_stride_n, dim, DIM, BLOCK_D)
                low_k, high_k = _widen_int4(k, USE_ASM, DOT)
                second = tl.dot(low_k, low_q)
                second = tl.dot(high_k, high_q, second)
                acc = tl.where((begin_row == 0)[None, :], acc, second)
            # For the next tile: words of two bytes are not loaded by the pipeline.
            scales = _load_scales(scale_head, following, scale_stride_s, dim, DIM)
            x = acc * code_unit[None, :] + constant[None, :]
        elif KIND == "int8":
            if PAGE % BLOCK_N == 0:
                token = page * PAGE + start % PAGE + row
            token_scale = tl.load(k_scale + token * scale_stride_s + head * scale_stride_h)
            acc = tl.dot(widen_int8(k, USE_ASM, DOT), query)
            x = acc * unit[None, :] * token_scale.to(tl.float32)[:, None]
        else:
            x = tl.dot(k.to(DOT), query, input_precision=PRECISION) * unit[None, :]
        if POOLING == "softmax_mean":
            if (start < begin) | (start + BLOCK_N > end):
                place = position[:, None] + begin_row[None, :]
                x = tl.where((place >= begin) & (place < end), x, float("-inf"))
            most = tl.max(x, 0)
            # Half a tile may have no candidate.
            top = tl.where(most == float("-inf"), 0.0, most)
            x = x - top[None, :]
            share = tl.exp2(x)
            kept = x.to(tl.float16)
            if CODED:
                kept = encode_share(share, USE_ASM)
            tile_logits = logits + (base * scratch_width + start) * PAD_G
            place = row[:, None] + begin_row[None, :]
            tl.store(tile_logits + (place * PAD_G + member[None, :]), kept, mask=is_kept[None, :])
            tl.store(
                tile_max + (base * scratch_tiles + tile * HALVES) * PAD_G + column, most,
                mask=is_kept,
            )  # fmt: skip
            # Finite where both are -inf: no NaN.
            peak = tl.maximum(tl.maximum(largest, most), -1e30)
            total = total * tl.exp2(largest - peak) + tl.sum(share, 0) * tl.exp2(most - peak)
            largest = peak
        else:
            if POOLING == "max_logit":
                pooled = tl.max(tl.where(in_group[None, :], x, float("-inf")), 1)
            else:
                pooled = tl.sum(tl.where(in_group[None, :], x, 0.0), 1) / GROUP
            tl.store(out + base * out_width + position, pooled, mask=seen)
    if POOLING == "softmax_mean":
        sums = largest + tl.log2(total)
        if HALVES == 2:
            parts = tl.reshape(sums, [HALVES, PAD_G])
            peak = tl.maximum(tl.max(parts, 0), -1e30)  # finite where both are -inf: no NaN
            sums = peak + tl.log2(tl.sum(tl.exp2(parts - peak[None, :]), 0))
            column = tl.arange(0, PAD_G)
        tl.store(
            split_lse + (base * num_splits + split) * PAD_G + column, sums, mask=column < PAD_G
        )


@triton.jit
def pool_kernel(
    lo, hi, active, out, logits, tile_max, split_lse,
    width, num_heads, num_splits, out_width, scratch_width, scratch_tiles, lo_stride, hi_stride,
    HAS_ACTIVE: tl.constexpr, GROUP: tl.constexpr, PAD_G: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Turn relative logits into the mean of the heads' softmax, BLOCK_T tiles at a time."""
    base = tl.program_id(0).to(tl.int64)
    req = base // num_heads
    begin, end = bounds_of(lo, hi, active, req, lo_stride, hi_stride, width, HAS_ACTIVE)
    start = tl.program_id(1) * BLOCK_T
    if (start * BLOCK_N < end) & ((start + BLOCK_T) * BLOCK_N > begin) & (begin < end):
        member, split = tl.arange(0, PAD_G), tl.arange(0, BLOCK_S)
        tile = start + tl.arange(0, BLOCK_T)
        position = tile[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        # What is long on its way is asked for first.
        x = tl.load(
            logits + (base * scratch_width + position)[:, :, None] * PAD_G + member[None, None, :],
            mask=(position < scratch_width)[:, :, None], other=0.0,
        ).to(tl.float32)  # fmt: skip
        top = tl.load(
            tile_max + (base * scratch_tiles + tile)[:, None] * PAD_G + member[None, :],
            mask=(tile < scratch_tiles)[:, None], other=0.0,
        )  # fmt: skip
        parts = tl.load(
            split_lse + (base * num_splits + split)[:, None] * PAD_G + member[None, :],
            mask=(split < num_splits)[:, None], other=float("-inf"),
        )  # fmt: skip
        largest = tl.max(parts, 0)
        lse = largest + tl.log2(tl.sum(tl.exp2(parts - largest[None, :]), 0))
        lse = tl.where(member < GROUP, lse, float("inf"))
        seen = (position >= begin) & (position < end)
        probs = tl.exp2(x + (top - lse[None, :])[:, None, :])
        tl.store(out + base * out_width + position, tl.sum(probs, 2) / GROUP, mask=seen)
