# SPDX-License-Identifier: Apache-2.0
"""GPU versions of `tandemkv.kernels.score`."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tandemkv.kernels.check import fail
from tandemkv.kernels.score import (
    MAX_SPLITS,
    MIN_TILE,
    PROGRAMS_PER_SM,
    KeyScan,
    ScoreScratch,
    make_score_scratch,
)
from tandemkv.kernels.triton_ops.score_scan import pool_kernel, scan_kernel
from tandemkv.kernels.triton_ops.score_window import rounded_dtype
from tandemkv.kernels.triton_ops.score_window import score_window as score_window

_INTERPRETED = bool(triton.knobs.runtime.interpret)
_TRITON_DTYPE = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
# Tokens and warps of a program of the second pass, measured likewise.
POOL = (512, 2)
_BLOCK_PAGES = 16
# Shared memory that a program of the scan has for other things than tiles of keys, at most.
_BESIDE_TILES = 16 << 10


class Tuning(NamedTuple):
    """Tokens of a tile, pipeline depth, warps, programs per SM and registers of the scan.

    Measured on an H200. One warp a program makes the sums over a tile's tokens cheap; the limit
    of registers is what lets enough of such programs run at once. 16 of them fill an SM; more
    are begun as others end, and let kernels of a higher priority in between. As many as fill the
    GPU are faster alone, 49 us for 51 at 8 x 64K, and slower beside a kernel that waits for a flag,
    62 us: the last of them finds no room.
    """

    block_n: int
    stages: int
    warps: int
    programs: int
    registers: int | None


TUNING = {
    "native": Tuning(block_n=64, stages=4, warps=4, programs=16, registers=None),
    "int8": Tuning(block_n=64, stages=3, warps=1, programs=16, registers=128),
    "int4": Tuning(block_n=64, stages=2, warps=1, programs=32, registers=128),
    "int4 of few channels": Tuning(block_n=128, stages=2, warps=1, programs=32, registers=128),
}
_FEW_CHANNELS, _SMALL_GROUP = 64, 8
"""With as many channels, and query heads of a group, a tile of 128 keys stays in registers."""


def _kind(k_pool: torch.Tensor) -> str:
    return {torch.uint8: "int4", torch.int8: "int8"}.get(k_pool.dtype, "native")


def _stages(tuning: Tuning, tile_bytes: int, device: torch.device) -> int:
    """Return how deep a pipeline is: as `tuning` has it, or what a GPU has shared memory for."""
    if device.type != "cuda":
        return tuning.stages
    # A program may have all of a multiprocessor's but 1 KiB, and the last tile is in registers.
    memory = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor - 1024
    return max(1, min(tuning.stages, 1 + (memory - _BESIDE_TILES) // tile_bytes))


def score_keys(
    keys: KeyScan, *, out: torch.Tensor | None = None, scratch: ScoreScratch | None = None
) -> torch.Tensor:
    """Score candidates; see `tandemkv.kernels.score.score_keys`."""
    (num_reqs, num_qo_heads), num_kv_heads = keys.q.shape[:2], keys.k_pool.shape[1]
    lo, hi, width, device = keys.lo, keys.hi, keys.width, keys.q.device
    if out is None:
        shape = (num_reqs, num_kv_heads, width)
        out = torch.full(shape, float("-inf"), dtype=torch.float32, device=device)
    if not num_reqs or not width:
        return out
    if scratch is None:
        scratch = make_score_scratch(num_reqs, num_qo_heads, num_kv_heads, width, device)
    scanned = scan(keys, out=out, scratch=scratch)
    if keys.pooling == "softmax_mean":
        tiles = max(1, POOL[0] // scanned.block_n)
        pool_kernel[(num_reqs * num_kv_heads, triton.cdiv(width, tiles * scanned.block_n))](
            *ranges_of(keys), out, scratch.logits, scratch.tile_max, scratch.split_lse,
            width, num_kv_heads, scanned.num_splits, out.shape[2],
            scratch.logits.shape[2], scratch.tile_max.shape[2], lo.stride(0), hi.stride(0),
            HAS_ACTIVE=keys.active is not None, GROUP=num_qo_heads // num_kv_heads,
            PAD_G=scratch.logits.shape[3], BLOCK_N=scanned.block_n, BLOCK_T=tiles,
            BLOCK_S=triton.next_power_of_2(scanned.num_splits), num_warps=POOL[1],
        )  # fmt: skip
    return out


def ranges_of(keys: KeyScan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `lo`, `hi` and what kernels take as `active`, which some tensor stands in for."""
    return keys.lo, keys.hi, keys.lo if keys.active is None else keys.active.view(torch.int8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scanned:
    """How a scan's results lie in the scratch."""

    block_n: int
    num_splits: int
    """Tokens of a tile, and programs per head."""
    logits: torch.Tensor
    """The scratch's logits, or uint8 where codes of what they stand for (`encode_share`) are there
    instead; those of a head begin at the same element."""

    @property
    def is_coded(self) -> bool:
        """Whether codes were left."""
        return self.logits.dtype == torch.uint8


def scan(
    keys: KeyScan, *, out: torch.Tensor, scratch: ScoreScratch, may_code: bool = False
) -> Scanned:
    """Launch the pass over the keys; `out` is not written for ``softmax_mean``.

    With `may_code` codes (`encode_share`) are left instead of logits for int4 keys: what they
    lose does not show beside what the keys have lost, and half of the bytes go both ways.
    """
    q, k_pool, k_scale, slots = keys.q, keys.k_pool, keys.k_scale, keys.slots
    width, page_size, channels = keys.width, keys.page_size, keys.channels
    (num_reqs, num_qo_heads), num_kv_heads = q.shape[:2], k_pool.shape[1]
    head_dim = q.shape[2] if channels is None else channels.shape[1]
    kind, group = _kind(k_pool), num_qo_heads // num_kv_heads
    pad_g = scratch.logits.shape[3]
    # Where the choice searches in memory, a token's codes make room for its score.
    is_coded = may_code and kind == "int4" and keys.pooling == "softmax_mean" and pad_g >= 4
    is_narrow = kind == "int4" and head_dim <= _FEW_CHANNELS and group <= _SMALL_GROUP
    tuning = TUNING["int4 of few channels" if is_narrow else kind]
    logits = scratch.logits.view(torch.uint8) if is_coded else scratch.logits
    # A small batch has as many programs as the largest one that the scratch is for.
    num_programs = math.prod(scratch.split_lse.shape[:3]) * tuning.programs // PROGRAMS_PER_SM
    num_splits = max(1, min(MAX_SPLITS, num_programs // (num_reqs * num_kv_heads)))
    scratch_width, scratch_tiles = scratch.logits.shape[2], scratch.tile_max.shape[2]
    factor = keys.scale * (math.log2(math.e) if keys.pooling == "softmax_mean" else 1.0)
    scales = q if k_scale is None else k_scale  # stands in for a pointer that is not read
    kept = keys.lo if channels is None else channels  # likewise
    # Copies of a pool would be made in silence, and in every captured layer.
    if k_pool.stride(-1) != 1 or slots.stride(1) != 1:
        fail("strides of k_pool, slots", (k_pool.stride(), slots.stride()), "1 in the last place")
    if kind == "int4" and scales.stride()[2:] != (head_dim, 1):
        fail("k_scale.stride()", scales.stride(), f"{(head_dim, 1)} in the last two places")
    block_n = min(tuning.block_n, page_size) if kind == "int4" else tuning.block_n
    halves = 2 if is_coded and pad_g == 4 and block_n > MIN_TILE else 1
    rounded = rounded_dtype(k_pool)
    # The interpreter multiplies bfloat16 as if its bits were integers.
    multiplied = torch.float32 if _INTERPRETED else rounded
    dim = head_dim // 2 if kind == "int4" else head_dim
    block_d = max(16, triton.next_power_of_2(dim))  # as wide as a tile is in shared memory
    scan_kernel[(num_reqs * num_splits * num_kv_heads,)](
        q, k_pool, scales, kept, slots, *ranges_of(keys), out,
        logits, scratch.tile_max, scratch.split_lse, scratch.zero_dot,
        factor, width, num_kv_heads, num_splits, out.shape[2], scratch_width, scratch_tiles,
        *q.stride(), *k_pool.stride()[:3], *scales.stride()[:2],
        slots.stride(0), keys.lo.stride(0), keys.hi.stride(0),
        KIND=kind, POOLING=keys.pooling, HAS_ACTIVE=keys.active is not None,
        HAS_CHANNELS=channels is not None, GROUP=group, PAD_G=pad_g, BLOCK_G=max(8, pad_g),
        PAGE=page_size, BLOCK_N=block_n, BLOCK_P=_BLOCK_PAGES,
        DIM=dim, BLOCK_D=block_d,
        STAGES=_stages(tuning, block_n * block_d * k_pool.element_size(), q.device),
        ROUND=_TRITON_DTYPE[rounded], DOT=_TRITON_DTYPE[multiplied],
        USE_ASM=not _INTERPRETED, PRECISION="ieee" if rounded == torch.float32 else "tf32",
        CODED=is_coded, HALVES=halves, num_warps=tuning.warps, maxnreg=tuning.registers,
    )  # fmt: skip
    return Scanned(block_n=block_n // halves, num_splits=num_splits, logits=logits)
