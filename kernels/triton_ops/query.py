# SPDX-License-Identifier: Apache-2.0
"""Triton version of `tandemkv.kernels.query`: project in parts, then add up and rotate.

1. Several programs per block of outputs each multiply a part of the hidden dimension, and leave
   float32 sums. A norm before is a factor of a row: its sum of squares comes beside.
2. One program per token and head adds the parts up, normalises and rotates.

Programs are small: beside a scan of all keys, which fills the registers of a GPU, a program waits
until as many as it needs are free on one multiprocessor. Weights of int8 are widened in registers,
exactly, and the second launch multiplies by their scales.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tandemkv.kernels.query import QueryWeights
from tandemkv.kernels.triton_ops.chained import follow, is_chained

_INTERPRETED = bool(triton.knobs.runtime.interpret)


class Tiles(NamedTuple):
    """How the product is cut up.

    `programs` is about how many there are in all, `registers` limits those of a thread where
    there are few tokens.
    """

    block_out: int
    block_k: int
    warps: int
    stages: int
    programs: int
    registers: int | None


# About two programs on each multiprocessor. Four leave no room for a program of the mirror, which
# is due at the same time (H200, Qwen3-8B's W_q, 1 + 1, 8 x 96K: 8.41 ms a step instead of 8.12).
# An int8 tile has twice the rows, and so as many bytes on their way. Widening takes instructions;
# that what is made of the tokens serves twice the rows makes up for most of them: compiled for
# sm_90 with 8 tokens, 8192 weights take 551 of each warp, and 504 natively, with 96 and 95
# registers. Larger tiles take 8.9 us instead of 10.3 where little else runs (H200, 8 tokens, both
# launches), as on a GPU that does nothing but select; a mirror does not fit beside two of them.
TILES = {
    "native": Tiles(32, 128, 2, 4, 256, None),
    "int8": Tiles(64, 128, 2, 4, 256, 96),
    "int8 alone": Tiles(64, 256, 4, 4, 256, 96),
}
_MAX_PARTS = 32
# Tokens of a program up to which nothing spills under the limit of registers.
_LIMITED_TOKENS = 8
# Keeps products of large hidden values and norm weights inside float16 (beyond 4 million they
# are cut off); a power of two.
_FLOAT16_FACTOR = 1 / 64
# Elements of a layer's query whose squares are added up at once, where one norm is over all heads.
_LAYER_BLOCK = 256


@triton.jit
def _project_kernel(
    hidden, norm, weight, parts, squares, num_tokens, hidden_size, width, factor,
    hidden_stride, weight_stride,
    BLOCK_OUT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    PART_SIZE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, NORMED: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    row = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    part = tl.program_id(1)
    token = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_row, is_token = row < width, token < num_tokens
    rows = weight + row.to(tl.int64)[:, None] * weight_stride
    tokens = hidden + token.to(tl.int64)[None, :] * hidden_stride
    total = tl.zeros([BLOCK_T], tl.float32)
    acc = tl.zeros([BLOCK_OUT, BLOCK_T], tl.float32)
    for start in range(0, PART_SIZE, BLOCK_K):
        at = part * PART_SIZE + start + tl.arange(0, BLOCK_K)
        w = tl.load(
            rows + at[None, :], mask=is_row[:, None] & (at < hidden_size)[None, :], other=0.0
        )
        x = tl.load(
            tokens + at[:, None], mask=(at < hidden_size)[:, None] & is_token[None, :], other=0.0
        ).to(tl.float32)  # fmt: skip
        if NORMED:
            scaled = tl.load(norm + at, mask=at < hidden_size, other=0.0).to(tl.float32) * factor
            total += tl.sum(x * x, 0)
            x = x * scaled[:, None]
        if hidden.dtype.element_ty == tl.float16:
            x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
        x = x.to(hidden.dtype.element_ty)
        acc = tl.dot(w.to(DOT), x.to(DOT), acc, input_precision=PRECISION)
    base = part * num_tokens
    tl.store(
        parts + (base + token).to(tl.int64)[None, :] * width + row[:, None], acc,
        mask=is_row[:, None] & is_token[None, :],
    )  # fmt: skip
    if NORMED and tl.program_id(0) == 0:
        tl.store(squares + base + token, total, mask=is_token)


@triton.jit
def _rotate_kernel(
    parts, squares, weight_scale, bias, query_norm, positions, cos_sin, out,
    num_tokens, num_heads, hidden_size, num_parts, num_positions, width, factor, eps, query_eps,
    cos_sin_stride,
    NORMED: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr,
    LAYER_WIDTH: tl.constexpr, NEIGHBOURS: tl.constexpr, TURNED: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_W: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    token, head = tl.program_id(0) // num_heads, tl.program_id(0) % num_heads
    at, part = tl.arange(0, BLOCK), tl.arange(0, BLOCK_S)
    inside, is_part = at < HALF, part < num_parts
    # Pairs of elements of a head. Those that are not turned come behind the TURNED that are.
    if NEIGHBOURS:
        low, high = 2 * at, 2 * at + 1
    elif TURNED == HALF:
        low, high = at, HALF + at
    else:
        low = tl.where(at < TURNED, at, 2 * at)
        high = tl.where(at < TURNED, TURNED + at, 2 * at + 1)
    # What is long on its way is asked for first.
    position = tl.load(positions + token).to(tl.int64)
    sums = parts + (part * num_tokens + token).to(tl.int64)[:, None] * width
    rows = sums + head * 2 * HALF
    mask = is_part[:, None] & inside[None, :]
    first = tl.sum(tl.load(rows + low[None, :], mask=mask, other=0.0), 0)
    second = tl.sum(tl.load(rows + high[None, :], mask=mask, other=0.0), 0)
    # A row that nobody reads may have any position.
    position = tl.minimum(tl.maximum(position, 0), num_positions - 1)
    angles = cos_sin + position * cos_sin_stride
    is_turned = inside & (at < TURNED)
    cos = tl.load(angles + at, mask=is_turned, other=1.0).to(tl.float32)
    sin = tl.load(angles + TURNED + at, mask=is_turned, other=0.0).to(tl.float32)
    unit = 1.0
    if NORMED:
        total = tl.sum(tl.load(squares + part * num_tokens + token, mask=is_part, other=0.0), 0)
        unit = 1.0 / (tl.sqrt(total / hidden_size + eps) * factor)
    first, second = first * unit, second * unit
    if HAS_SCALE:
        own = weight_scale + head * 2 * HALF
        first *= tl.load(own + low, mask=inside, other=0.0)
        second *= tl.load(own + high, mask=inside, other=0.0)
    if HAS_BIAS:
        own = bias + head * 2 * HALF
        first += tl.load(own + low, mask=inside, other=0.0).to(tl.float32)
        second += tl.load(own + high, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        own = query_norm
        if LAYER_WIDTH > 0:
            own += head * 2 * HALF
            # Each head's program adds up the squares of all heads: no third launch.
            squared = tl.zeros([BLOCK_W], tl.float32)
            for start in range(0, LAYER_WIDTH, BLOCK_W):
                column = start + tl.arange(0, BLOCK_W)
                is_column = column < LAYER_WIDTH
                block = is_part[:, None] & is_column[None, :]
                value = tl.sum(tl.load(sums + column[None, :], mask=block, other=0.0), 0) * unit
                if HAS_SCALE:
                    value *= tl.load(weight_scale + column, mask=is_column, other=0.0)
                if HAS_BIAS:
                    value += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
                squared += value * value
            square = tl.sum(squared, 0) / LAYER_WIDTH
        else:
            square = tl.sum(first * first + second * second, 0) / (2 * HALF)
        unit = 1.0 / tl.sqrt(square + query_eps)
        first *= unit * tl.load(own + low, mask=inside, other=0.0).to(tl.float32)
        second *= unit * tl.load(own + high, mask=inside, other=0.0).to(tl.float32)
    target = out + tl.program_id(0).to(tl.int64) * 2 * HALF
    kind = out.dtype.element_ty
    tl.store(target + low, (first * cos - second * sin).to(kind), mask=inside)
    tl.store(target + high, (second * cos + first * sin).to(kind), mask=inside)


def predict_query(
    hidden: torch.Tensor,
    positions: torch.Tensor,
    weights: QueryWeights,
    cos_sin: torch.Tensor,
) -> torch.Tensor:
    """Predict; see `tandemkv.kernels.query.predict_query`."""
    num_tokens, hidden_size = hidden.shape
    width, head_dim = len(weights.weight), weights.head_dim
    num_heads = width // head_dim
    out = hidden.new_empty((num_tokens, num_heads, head_dim))
    if not out.numel():
        return out
    _check_dense(hidden, positions, weights, cos_sin)
    parts, squares, factor = _project(hidden, weights)
    num_parts, scale = len(parts), weights.weight_scale
    has_bias, has_norm = weights.bias is not None, weights.query_norm is not None
    chained = is_chained(hidden.device)
    _rotate_kernel[(num_tokens * num_heads,)](
        parts, squares, hidden if scale is None else scale, weights.bias if has_bias else hidden,
        weights.query_norm if has_norm else hidden, positions, cos_sin, out,
        num_tokens, num_heads, hidden_size, num_parts, len(cos_sin), width, factor,
        float(weights.norm_eps), float(weights.query_norm_eps), cos_sin.stride(0),
        NORMED=weights.norm is not None, HAS_SCALE=scale is not None, HAS_BIAS=has_bias,
        HAS_NORM=has_norm, LAYER_WIDTH=_layer_width(weights),
        NEIGHBOURS=weights.rotates_neighbours, TURNED=cos_sin.shape[1] // 2, HALF=head_dim // 2,
        BLOCK=triton.next_power_of_2(head_dim // 2), BLOCK_S=triton.next_power_of_2(num_parts),
        BLOCK_W=_LAYER_BLOCK, CHAINED=chained, launch_pdl=chained, num_warps=1,
    )  # fmt: skip
    return out


def _project(
    hidden: torch.Tensor, weights: QueryWeights
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return sums of parts ``[parts, B, width]``, their squares ``[parts, B]``, and their factor.

    Float32. The squares are those of the hidden states, and not written where nothing normalises.
    """
    (num_tokens, hidden_size), width = hidden.shape, len(weights.weight)
    block_t = min(64, max(8, triton.next_power_of_2(num_tokens)))
    chained, is_int8 = is_chained(hidden.device), weights.weight_scale is not None
    is_alone = chained and num_tokens <= _LIMITED_TOKENS
    tiles = TILES["native" if not is_int8 else "int8 alone" if is_alone else "int8"]
    blocks = triton.cdiv(width, tiles.block_out)
    num_steps = triton.cdiv(hidden_size, tiles.block_k)
    num_parts = min(_MAX_PARTS, max(1, round(tiles.programs / blocks)), num_steps)
    part_size = triton.cdiv(num_steps, num_parts) * tiles.block_k
    num_parts = triton.cdiv(hidden_size, part_size)
    parts = torch.empty((num_parts, num_tokens, width), device=hidden.device)
    squares = torch.empty((num_parts, num_tokens), device=hidden.device)
    norm = weights.norm
    factor = _FLOAT16_FACTOR if hidden.dtype == torch.float16 and norm is not None else 1.0
    dtypes = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
    # The interpreter multiplies bfloat16 as if its bits were integers.
    multiplied = torch.float32 if _INTERPRETED else hidden.dtype
    _project_kernel[(blocks, num_parts, triton.cdiv(num_tokens, block_t))](
        hidden, hidden if norm is None else norm, weights.weight, parts, squares,
        num_tokens, hidden_size, width, factor,
        hidden.stride(0), weights.weight.stride(0),
        BLOCK_OUT=tiles.block_out, BLOCK_T=block_t, BLOCK_K=tiles.block_k, PART_SIZE=part_size,
        DOT=dtypes[multiplied], PRECISION="ieee" if hidden.dtype == torch.float32 else "tf32",
        NORMED=norm is not None, CHAINED=chained, launch_pdl=chained, num_warps=tiles.warps,
        num_stages=tiles.stages if hidden.dtype != torch.float32 else 2,
        maxnreg=tiles.registers if block_t <= _LIMITED_TOKENS else None,
    )  # fmt: skip
    return parts, squares, factor


def _layer_width(weights: QueryWeights) -> int:
    """Return over how many elements a layer's query is normalised; 0 for each head by itself."""
    norm = weights.query_norm
    return 0 if norm is None or len(norm) == weights.head_dim else len(norm)


def _check_dense(
    hidden: torch.Tensor, positions: torch.Tensor, weights: QueryWeights, cos_sin: torch.Tensor
) -> None:
    vectors = (weights.norm, weights.weight_scale, weights.bias, weights.query_norm, positions)
    dense = (hidden, weights.weight, cos_sin, *vectors)
    if any(tensor is not None and tensor.stride(-1) != 1 for tensor in dense):
        message = "hidden, weights, cos_sin and positions must be dense in their last dimension"
        raise ValueError(message)
