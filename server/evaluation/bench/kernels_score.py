# SPDX-License-Identifier: Apache-2.0
"""Scoring every key of one layer, for each precision of the key index.

The shape is that of Qwen3-8B: 32 query heads, 8 KV heads, head_dim 128; 8 requests. The result is
compared with the reference before it is timed.
"""

from __future__ import annotations

from functools import partial

import torch

from tandemkv.kernels.reference.score import score_keys as reference
from tandemkv.kernels.score import make_score_scratch, score_keys
from tandemkv.server.evaluation.provenance import BenchError
from tandemkv.server.evaluation.timing import num_rotations, require_cuda, time_graph

from .report import Row

NUM_REQS, QO_HEADS, KV_HEADS, HEAD_DIM, PAGE = 8, 32, 8, 128, 64
LENGTHS = (32768, 65536)
NUM_SINK, NUM_RECENT = 4, 64
TOLERANCE = 2e-2
"""Of the largest score; bf16 products, and int4 scales in float16."""


def rows() -> list[Row]:
    """Time `score_keys` with native, int8 and int4 keys at 8 x 32K and 8 x 64K."""
    device = require_cuda()
    torch.manual_seed(0)
    return [
        row
        for index_dtype in ("native", "int8", "int4")
        for length in LENGTHS
        for row in _measure(index_dtype, length, device)
    ]


def make_index(
    index_dtype: str, num_pages: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return keys of one layer and their scales; random bits do for quantised keys.

    Returns
    -------
    keys, scales : torch.Tensor, torch.Tensor or None
        ``[num_pages * page, heads, dim]`` bf16 or int8 with ``[num_pages * page, heads]``
        float32; ``[num_pages, heads, page, dim / 2]`` uint8 with
        ``[num_pages, heads, 2, dim]`` float16 for int4.
    """
    shape = (num_pages * PAGE, KV_HEADS, HEAD_DIM)
    if index_dtype == "native":
        return torch.randn(shape, device=device, dtype=torch.bfloat16), None
    if index_dtype == "int8":
        codes = torch.randint(-127, 128, shape, device=device, dtype=torch.int8)
        return codes, torch.rand(shape[:2], device=device) * 0.02 + 0.01
    packed = (num_pages, KV_HEADS, PAGE, HEAD_DIM // 2)
    codes = torch.randint(0, 256, packed, device=device, dtype=torch.uint8)
    scales = torch.rand(num_pages, KV_HEADS, 2, HEAD_DIM, device=device, dtype=torch.float16)
    scales[:, :, 0].mul_(0.2).add_(0.1)
    scales[:, :, 1].add_(-2.5)
    return codes, scales


def _measure(index_dtype: str, length: int, device: torch.device) -> list[Row]:
    num_pages = NUM_REQS * length // PAGE + 1
    first = make_index(index_dtype, num_pages, device)
    num_bytes = sum(part.nbytes for part in first if part is not None)
    pools = [first]
    pools += [make_index(index_dtype, num_pages, device) for _ in range(num_rotations(num_bytes))]
    table = (torch.randperm(num_pages - 1, device=device).int() + 1).view(NUM_REQS, -1)
    q = torch.randn(NUM_REQS, QO_HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
    lo = torch.full((NUM_REQS,), NUM_SINK, dtype=torch.int32, device=device)
    hi = torch.full((NUM_REQS,), length - NUM_RECENT, dtype=torch.int32, device=device)
    out = torch.zeros(NUM_REQS, KV_HEADS, length, device=device)
    scratch = make_score_scratch(NUM_REQS, QO_HEADS, KV_HEADS, length, device)
    scale = HEAD_DIM**-0.5

    def run(keys: torch.Tensor, k_scale: torch.Tensor | None) -> None:
        score_keys(
            q, keys, table, lo, hi, k_scale=k_scale, out=out, scratch=scratch, width=length,
            scale=scale, pooling="softmax_mean", page_size=PAGE,
        )  # fmt: skip

    name = f"score_keys_{index_dtype}_{NUM_REQS}x{length // 1024}k"
    run(*first)
    want = reference(
        q[:1], first[0], table, lo[:1], hi[:1], k_scale=first[1], width=length, scale=scale,
        pooling="softmax_mean", page_size=PAGE,
    )  # fmt: skip
    inner = slice(NUM_SINK, length - NUM_RECENT)
    got, want = out[0, :, inner], want[0, :, inner]
    error = float((got - want).abs().max() / want.abs().max())
    if not error < TOLERANCE:
        raise BenchError(f"{name}: off by {error:.3g} of the largest score; not timed")
    timing = time_graph([partial(run, *pool) for pool in pools])
    return [
        Row.of(f"{name}_us", timing, "us"),
        Row.bandwidth(f"{name}_bandwidth", timing, num_bytes, note="keys and scales read"),
    ]
