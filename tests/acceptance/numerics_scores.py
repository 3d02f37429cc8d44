# SPDX-License-Identifier: Apache-2.0
"""Scores of keys, what is chosen by them, and quantized keys, against float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import in_float64
import torch
from in_python import pooled
from numerics_draw import FLOAT32, FLOATS, INTS, KV_FLOATS, Compared, Draw
from score_inputs import (
    EXACT_LOGITS,
    KINDS,
    ON_GPU,
    Keys,
    expected,
    expected_window,
    magnitude,
    make_keys,
)
from tolerances import EXACT, Tolerance

from tandemkv.kernels.page_bounds import score_pages
from tandemkv.kernels.quantize import append_int4, append_int8, quantize_int4_pages, quantize_int8
from tandemkv.kernels.score import POOLINGS, KeyScan, score_keys, score_window
from tandemkv.kernels.select import score_topk

# Errors are divided by their bound: no more than the rounding of that division.
BOUND = Tolerance(abs_error=1.0001, rel_error=0.0, cosine_gap=1.0)


def _keys(draw: Draw, num_reqs: int, length: int) -> Keys:
    """Draw keys of any kind, for requests of at most `length` tokens."""
    heads, group, dim = draw.heads()
    kind = draw.option("kind", (*KINDS, "float8_e4m3fn"))
    page_size = draw.option("page_size", (16, 64, 128) if kind == "int4" else (1, 16, 64))
    num_pages = num_reqs * -(-length // page_size)
    is_float8 = kind == "float8_e4m3fn"
    keys = make_keys(
        "float16" if is_float8 else kind, num_reqs=num_reqs, heads=heads, group=group, dim=dim,
        page_size=page_size, num_pages=num_pages,
    )  # fmt: skip
    if is_float8:
        k_pool = keys.k_pool.to(torch.float8_e4m3fn)
        keys = replace(keys, k_pool=k_pool, by_slot=k_pool.float().double())
    return keys


def _ranges(draw: Draw, num_reqs: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw candidates of each request; some have none."""
    return draw.integers(0, length - 1, num_reqs), draw.integers(0, length, num_reqs)


def scores(draw: Draw) -> Iterator[Compared]:
    """`score_keys`."""
    num_reqs, length = draw.number("num_reqs", 1, 4, 2), draw.number("length", 2, 6000, 140)
    keys, scale = _keys(draw, num_reqs, length), 0.3
    pooling = draw.option("pooling", POOLINGS)
    lo, hi = _ranges(draw, num_reqs, length)
    active = torch.rand(num_reqs) < 0.8 if draw.flag("active") else None
    scan = KeyScan(
        keys.q, keys.k_pool, keys.table.to(draw.dtype("slots", INTS)), lo, hi, width=length,
        scale=scale, pooling=pooling, k_scale=keys.k_scale, page_size=keys.page_size, active=active,
    )  # fmt: skip
    got = score_keys(scan)
    tolerance = ON_GPU if draw.is_interpreted else EXACT_LOGITS
    for req, (first, last) in enumerate(zip(lo.tolist(), hi.tolist(), strict=True)):
        want = torch.full(got[req].shape, -math.inf, dtype=torch.float64)
        largest = torch.tensor(1.0)
        if first < last and (active is None or active[req]):
            want[:, first:last] = expected(keys, req, first, last, pooling, scale)
            largest = magnitude(keys, req, first, last, pooling, scale)
        yield Compared("scores", got[req] / largest, want / largest, tolerance)


def window_scores(draw: Draw) -> Iterator[Compared]:
    """`score_window`."""
    length = draw.number("length", 2, 6000, 140)
    keys, scale = _keys(draw, 1, length), 0.3
    lo, hi = draw.random.randrange(length), draw.random.randint(1, length)
    size = draw.number("window", 1, 20, 8)
    positions = draw.integers(max(0, lo - 3), length + 9, size).sort().values
    q = torch.randn(size, *keys.q.shape[1:]).to(keys.q.dtype)
    got = score_window(
        q, keys.k_pool, keys.table[0], lo, hi, positions, scale=scale, k_scale=keys.k_scale,
        page_size=keys.page_size,
    )  # fmt: skip
    want = torch.full((keys.by_slot.shape[1], hi), -math.inf, dtype=torch.float64)
    if lo < hi:
        want = expected_window(keys, q, lo, hi, positions.tolist(), scale)
    largest = want.max().clamp(min=1e-30)
    tolerance = ON_GPU if draw.is_interpreted else EXACT_LOGITS
    yield Compared("scores", got / largest, want / largest, tolerance)


def choice(draw: Draw) -> Iterator[Compared]:
    """`score_topk`: what is chosen is as good as the best, and its scores are its own."""
    num_reqs, length = draw.number("num_reqs", 1, 3), draw.number("length", 2, 500)
    keys, k, scale = _keys(draw, num_reqs, length), draw.number("k", 0, 80), 0.3
    pooling = draw.option("pooling", POOLINGS)
    before, after = draw.option("pooled", ((0, 0), (0, 3), (2, 1), (31, 0)))
    lo, hi = _ranges(draw, num_reqs, length)
    scan = KeyScan(
        keys.q, keys.k_pool, keys.table, lo, hi, width=length, scale=scale, pooling=pooling,
        k_scale=keys.k_scale, page_size=keys.page_size,
    )  # fmt: skip
    positions, got = score_topk(scan, k, pooled_positions=(before, after))
    for req, (first, last) in enumerate(zip(lo.tolist(), hi.tolist(), strict=True)):
        heads = got.shape[1]
        of_all = torch.full((heads, length), -math.inf, dtype=torch.float64)
        largest = torch.tensor(1.0)
        if first < last:
            inside = expected(keys, req, first, last, pooling, scale).tolist()
            of_all[:, first:last] = torch.tensor([pooled(row, before, after) for row in inside])
            largest = magnitude(keys, req, first, last, pooling, scale)
        best = torch.cat([of_all, torch.full((heads, k), -math.inf)], 1).topk(k).values
        chosen = positions[req].long()
        of_chosen = of_all.gather(1, chosen.clamp(min=0)).masked_fill(chosen < 0, -math.inf)
        yield Compared("scores", got[req] / largest, of_chosen / largest, EXACT_LOGITS)
        order = of_chosen.sort(descending=True).values
        yield Compared("choice", order / largest, best / largest, EXACT_LOGITS)
        distinct = torch.tensor([len({p for p in row if p >= 0}) for row in chosen.tolist()])
        yield Compared("distinct", distinct, (chosen >= 0).sum(1), EXACT)


def pages(draw: Draw) -> Iterator[Compared]:
    """`score_pages`."""
    num_reqs, num_pages = draw.number("num_reqs", 1, 4, 2), draw.number("num_pages", 1, 600, 90)
    size, pooling = draw.option("page_tokens", (1, 7, 16)), draw.option("pooling", POOLINGS)
    (heads, group, dim), dtype, scale = draw.heads(), draw.dtype("dtype", FLOATS), 0.3
    bounds = torch.randn(2, num_reqs + 2, num_pages + 3, heads, dim).sort(0).values.to(dtype)
    q, rows = torch.randn(num_reqs, heads * group, dim).to(dtype), torch.randperm(num_reqs + 2)
    rows = rows[:num_reqs].to(draw.dtype("rows", INTS))
    lo, hi = _ranges(draw, num_reqs, num_pages * size)
    got = score_pages(
        q, bounds, rows, lo, hi, num_pages=num_pages, page_tokens=size, scale=scale,
        pooling=pooling,
    )  # fmt: skip
    tolerance = ON_GPU if draw.is_interpreted else EXACT_LOGITS
    for req, (first, last) in enumerate(zip(lo.tolist(), hi.tolist(), strict=True)):
        want = torch.full(got[req].shape, -math.inf, dtype=torch.float64)
        largest = torch.tensor(1.0)
        if first < last:
            used = slice(first // size, (last - 1) // size + 1)
            of_pages = q[req], bounds[:, rows[req], used], pooling, scale
            want[:, used] = in_float64.page_scores(*of_pages)
            largest = in_float64.page_magnitude(*of_pages)
        yield Compared("scores", got[req] / largest, want / largest, tolerance)


def _quantizable(draw: Draw, num_slots: int) -> torch.Tensor:
    """Keys of unequal channels, in any type that they are kept in."""
    heads, dim = draw.number("heads", 1, 4, 2), 2 * draw.number("half_dim", 1, 64, 32)
    spread, offset = draw.random.uniform(0, 20), draw.random.uniform(-50, 50)
    keys = torch.randn(num_slots, heads, dim) * spread + torch.randn(dim) * offset
    return keys.to(draw.dtype("dtype", KV_FLOATS))


def int8_index(draw: Draw) -> Iterator[Compared]:
    """`quantize_int8` and `append_int8`: within half a scale, which is the largest by 127."""
    keys = _quantizable(draw, draw.number("num_slots", 1, 200, 40))
    wide, slots = keys.float().double(), torch.arange(len(keys))
    codes, scale = torch.zeros(keys.shape, dtype=torch.int8), torch.zeros(keys.shape[:2])
    if draw.is_interpreted or draw.flag("appended"):
        chosen = torch.rand(len(keys)) < 0.5
        append_int8(keys, torch.where(chosen, slots, -1), codes, scale)
        yield Compared("others", codes[~chosen], torch.zeros_like(codes[~chosen]), EXACT)
        codes, scale, wide = codes[chosen], scale[chosen], wide[chosen]
    else:
        codes, scale = quantize_int8(keys)
    yield Compared("scale", scale, wide.abs().amax(-1) / 127, FLOAT32)
    error = (codes.double() * scale.double()[..., None] - wide) / (scale.double()[..., None] / 2)
    yield Compared("codes", error, torch.zeros_like(error), BOUND)


def int4_index(draw: Draw) -> Iterator[Compared]:
    """`quantize_int4_pages` and `append_int4`: within the bound that they document."""
    num_pages = draw.number("num_pages", 1, 6, 3)
    page_size = draw.option("page_size", (16, 32, 64) if draw.is_interpreted else (1, 5, 16, 64))
    keys = _quantizable(draw, num_pages * page_size)
    heads, dim = keys.shape[1:]
    codes = torch.zeros(num_pages, heads, page_size, dim // 2, dtype=torch.uint8)
    scales = torch.zeros(num_pages, heads, 2, dim, dtype=torch.float16)
    chosen = torch.rand(num_pages) < 0.6
    if draw.flag("appended"):  # a request of one page each, of which some are not complete
        lengths = torch.where(chosen, page_size, page_size + 1 if page_size > 1 else 0)
        table = torch.arange(num_pages)[:, None].repeat(1, 2)
        append_int4(keys, table, lengths, codes, scales)
    else:
        quantize_int4_pages(keys, torch.where(chosen, torch.arange(num_pages), -1), codes, scales)
    by_page = keys.float().view(num_pages, page_size, heads, dim)
    found = in_float64.dequantized(codes, scales).view(by_page.shape)
    bound = in_float64.int4_bound(by_page, scales)[:, None]
    error = ((found - by_page.double()) / bound)[chosen]
    yield Compared("codes", error, torch.zeros_like(error), BOUND)
    yield Compared("others", found[~chosen], torch.zeros_like(found[~chosen]), EXACT)
