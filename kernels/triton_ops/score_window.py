# SPDX-License-Identifier: Apache-2.0
"""`score_window` on a GPU: two launches, no host sync."""

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from tandemkv.kernels.check import fail
from tandemkv.kernels.triton_ops.score_window_kernels import lse_kernel, weigh_kernel

_INTERPRETED = bool(triton.knobs.runtime.interpret)
_TRITON_DTYPE = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
# Whole 256 bytes a row: Triton compiles a kernel again for strides that 16 does not divide.
_ROW = 64
_MIN_DOT = 16  # the smallest extent that tensor cores multiply
# Shorter windows, of prompts whose beginning was in the radix cache, take the kernels of this one:
# to compile others would hold up the server for a second.
_USUAL_WINDOW = 64
# Programs of the first pass: what runs at once. The second pass reads a result of each part.
PROGRAMS_PER_SM = 2
MAX_SPLITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Rows and tokens of a tile, pipeline depth, warps and registers of a pass.

    Powers of two; the second pass has no more rows a tile than the first.
    """

    rows: int
    tokens: int
    stages: int
    warps: int
    registers: int | None


# Both passes, by keys: what compiles without spills such that two programs run on an SM, one
# multiplying while the other takes exponentials. Of other shapes that were tried with int4 none
# gained more than 2 % (H200, docs/decisions/0024). Wide heads leave less room for tiles, and
# float32 has no tensor cores.
TUNING = {
    "half": (
        Tuning(rows=128, tokens=128, stages=2, warps=8, registers=128),
        Tuning(rows=64, tokens=128, stages=2, warps=8, registers=128),
    ),
    "int8": (
        Tuning(rows=128, tokens=64, stages=2, warps=8, registers=128),
        Tuning(rows=64, tokens=128, stages=2, warps=8, registers=128),
    ),
    "int4": (
        Tuning(rows=128, tokens=128, stages=2, warps=8, registers=128),
        Tuning(rows=64, tokens=128, stages=2, warps=8, registers=128),
    ),
    "wide": (
        Tuning(rows=128, tokens=64, stages=2, warps=8, registers=None),
        Tuning(rows=64, tokens=64, stages=2, warps=8, registers=None),
    ),
    "float32": (
        Tuning(rows=32, tokens=32, stages=1, warps=4, registers=None),
        Tuning(rows=32, tokens=32, stages=1, warps=8, registers=None),
    ),
}


def rounded_dtype(k_pool: torch.Tensor) -> torch.dtype:
    """Return the dtype that keys and queries are multiplied in; it holds every key exactly."""
    return torch.float16 if k_pool.dtype.itemsize == 1 else k_pool.dtype


@cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def score_window(
    q_window: torch.Tensor,
    k_pool: torch.Tensor,
    slots_row: torch.Tensor,
    lo: int,
    hi: int,
    q_positions: torch.Tensor,
    *,
    scale: float,
    k_scale: torch.Tensor | None = None,
    page_size: int = 1,
) -> torch.Tensor:
    """Score one request for seeding; see `tandemkv.kernels.score.score_window`."""
    window_len, num_qo_heads, head_dim = q_window.shape
    num_kv_heads, device = k_pool.shape[1], q_window.device
    width = -(-hi // _ROW) * _ROW
    scores = torch.empty((num_kv_heads, width), dtype=torch.float32, device=device)[:, :hi]
    if lo >= hi:
        return scores.fill_(float("-inf"))
    scales = q_window if k_scale is None else k_scale  # stands in for a pointer that is not read
    if k_pool.stride(-1) != 1:
        fail("k_pool.stride()", k_pool.stride(), "1 in the last place")
    kind = {torch.uint8: "int4", torch.int8: "int8"}.get(k_pool.dtype, "native")
    if kind == "int4" and scales.stride()[2:] != (head_dim, 1):
        fail("k_scale.stride()", scales.stride(), f"{(head_dim, 1)} in the last two places")
    rounded = rounded_dtype(k_pool)
    # The interpreter multiplies bfloat16 as if its bits were integers.
    multiplied = torch.float32 if _INTERPRETED else rounded
    dim = head_dim // 2 if kind == "int4" else head_dim
    block_d = max(_MIN_DOT, triton.next_power_of_2(dim))
    num_parts = 2 if kind == "int4" else 1
    if rounded == torch.float32:
        sums, weighs = TUNING["float32"]
    elif block_d * num_parts > 128:
        sums, weighs = TUNING["wide"]
    else:
        sums, weighs = TUNING["half" if kind == "native" else kind]
    # Pages of int4 keys have a scale each: a tile of the first pass takes one.
    tokens = min(sums.tokens, page_size) if kind == "int4" else sums.tokens
    group = num_qo_heads // num_kv_heads
    num_rows = window_len * group
    num_blocks = -(-num_rows // sums.rows)
    padded_rows = num_blocks * sums.rows
    num_programs = _num_sms(device) * PROGRAMS_PER_SM
    block_w = triton.next_power_of_2(max(window_len, _USUAL_WINDOW))
    most_blocks = -(-block_w * group // sums.rows)
    most_splits = max(1, min(MAX_SPLITS, num_programs // (num_kv_heads * most_blocks)))
    num_splits = min(most_splits, -(-hi // tokens) - lo // tokens)
    queries = torch.empty(
        (num_kv_heads, padded_rows, num_parts * block_d), dtype=multiplied, device=device
    )
    # Behind the parts, what the rows' products are in units of.
    part_lse = torch.empty(
        (num_kv_heads, num_splits + 1, padded_rows), dtype=torch.float32, device=device
    )
    strides = (*k_pool.stride()[:3], *scales.stride()[:2], slots_row.stride(0))
    options = {
        "KIND": kind, "GROUP": group, "PAGE": page_size, "DIM": dim, "BLOCK_D": block_d,
        "DOT": _TRITON_DTYPE[multiplied], "USE_ASM": not _INTERPRETED,
        "PRECISION": "ieee" if rounded == torch.float32 else "tf32",
    }  # fmt: skip
    lse_kernel[(num_kv_heads * num_blocks * num_splits,)](
        q_window, k_pool, scales, slots_row, q_positions, queries, part_lse,
        scale * math.log2(math.e), lo, hi, num_rows, padded_rows, num_kv_heads, num_splits,
        *q_window.stride(), *strides, q_positions.stride(0),
        BLOCK_M=sums.rows, BLOCK_N=tokens, STAGES=sums.stages, ROUND=_TRITON_DTYPE[rounded],
        num_warps=sums.warps, maxnreg=sums.registers, **options,
    )  # fmt: skip
    weigh_kernel[(num_kv_heads * triton.cdiv(hi, weighs.tokens),)](
        k_pool, scales, slots_row, q_positions, queries, part_lse, scores,
        lo, hi, num_rows, padded_rows, num_kv_heads, num_splits, scores.stride(0),
        *strides, q_positions.stride(0),
        BLOCK_M=weighs.rows, BLOCK_N=weighs.tokens, BLOCK_S=triton.next_power_of_2(most_splits),
        BLOCK_W=block_w, STAGES=weighs.stages,
        num_warps=weighs.warps, maxnreg=weighs.registers, **options,
    )  # fmt: skip
    return scores
