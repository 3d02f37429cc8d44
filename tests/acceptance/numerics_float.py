# SPDX-License-Identifier: Apache-2.0
"""Operations on floating-point numbers, each against its definition in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import in_float64
import torch
from in_python import pooled
from numerics_draw import FLOATS, INTS, KV_FLOATS, MULTIPLIED, Compared, Draw
from query_inputs import FORMS, predict_in_float64, query_inputs, tolerance_of, with_int8
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
from tolerances import EXACT, TOLERANCES, Tolerance

from tandemkv.kernels.attention import attend_paged
from tandemkv.kernels.merge import merge_attention
from tandemkv.kernels.quantize import append_int4, append_int8, quantize_int4_pages, quantize_int8
from tandemkv.kernels.query import predict_query
from tandemkv.kernels.query_window import mean_predict, push_and_predict, ridge_predict
from tandemkv.kernels.rope import apply_rope, unapply_rope
from tandemkv.kernels.samples import attend_samples
from tandemkv.kernels.score import POOLINGS, score_keys, score_window
from tandemkv.kernels.select import score_topk
from tandemkv.kernels.step_flags import send_rows

FLOAT32 = TOLERANCES[torch.float32]
# The weights come out of linear systems: their condition multiplies the rounding of float32.
SOLVED = Tolerance(abs_error=3e-4, rel_error=3e-4, cosine_gap=1e-7)
# Of a bound that errors are divided by, and no more than the rounding of that division.
BOUND = Tolerance(abs_error=1.0001, rel_error=0.0, cosine_gap=1.0)


def _heads(draw: Draw) -> tuple[int, int, int]:
    """Draw KV heads, query heads of each, and an even head dimension."""
    heads, group = draw.number("heads", 1, 4, 2), draw.number("group", 1, 8, 4)
    return heads, group, 2 * draw.number("half_dim", 1, 64, 32)


def _kv_types(draw: Draw) -> tuple[torch.dtype, torch.dtype]:
    """Draw the types of K and V and of queries; the interpreter knows few pairs."""
    if not draw.is_interpreted:
        return draw.dtype("kv", KV_FLOATS), draw.dtype("query", FLOATS)
    kv = draw.dtype("kv", (*MULTIPLIED, "float8_e4m3fn"))
    return kv, torch.float32 if kv == torch.float32 else torch.float16


def attention(draw: Draw) -> Iterator[Compared]:
    """`attend_paged`."""
    heads, group, dim = _heads(draw)
    kv, query = _kv_types(draw)
    num_reqs = draw.number("num_reqs", 1, 4, 2)
    page_size = draw.option("page_size", (1, 16, 64) if draw.is_interpreted else (1, 3, 16, 64))
    max_pages = draw.number("max_pages", 1, max(1, 900 // page_size), max(1, 130 // page_size))
    pages = torch.arange(num_reqs * max_pages + 2)
    if draw.flag("scattered"):
        pages = pages[torch.randperm(len(pages))]
    table = pages[: num_reqs * max_pages].view(num_reqs, max_pages)
    k, v = torch.randn(2, len(pages) * page_size, heads, dim).to(kv)
    q, scale = torch.randn(num_reqs, heads * group, dim).to(query), dim**-0.5
    hi = draw.integers(0, max_pages * page_size, num_reqs)
    got = attend_paged(
        q, k, v, table.to(draw.dtype("slots", INTS)), hi, scale=scale, page_size=page_size
    )
    slots = (table[..., None] * page_size + torch.arange(page_size)).flatten(1)
    wide = k.float(), v.float()
    parts = [
        in_float64.attended(q[req], *(pool[slots[req, :end]] for pool in wide), scale)
        for req, end in enumerate(hi.tolist())
    ]
    tolerance = TOLERANCES[query] if draw.is_interpreted else FLOAT32
    for what, actual, want in zip(("out", "lse"), got, zip(*parts, strict=True), strict=True):
        yield Compared(what, actual, torch.stack(want), tolerance)


def merge(draw: Draw) -> Iterator[Compared]:
    """`merge_attention`, with empty parts and parts that are far apart."""
    shape = draw.number("num_reqs", 1, 9), draw.number("heads", 1, 9), draw.number("dim", 1, 130)
    lse = torch.randn(2, *shape[:2]) * 4
    extreme = torch.tensor([-math.inf, 1e38, -1e38])[torch.randint(0, 3, lse.shape)]
    lse = torch.where(torch.rand(lse.shape) < 0.3, extreme, lse)
    empty = lse.isneginf()[..., None]
    outs = [torch.randn(shape).to(draw.dtype(name, FLOATS)) for name in ("first", "second")]
    given = [out.masked_fill(none, math.nan) for out, none in zip(outs, empty, strict=True)]
    out, total = merge_attention(given[0], lse[0], given[1], lse[1])
    wide = lse.double()
    shares = wide.softmax(0).nan_to_num(0.0)  # of two empty parts
    want = sum(share[..., None] * part.double() for share, part in zip(shares, outs, strict=True))
    yield Compared("out", out, want, TOLERANCES[outs[0].dtype])
    yield Compared("lse", total, wide.logsumexp(0), FLOAT32)


def samples(draw: Draw) -> Iterator[Compared]:
    """`attend_samples`: one softmax over samples and other tokens, of which there may be none."""
    heads, group, dim = _heads(draw)
    kv, query = _kv_types(draw)
    num_reqs, num_slots = draw.number("num_reqs", 1, 4, 2), draw.number("num_slots", 1, 400, 100)
    num_samples = 2 * draw.number("half_samples", 1, 100, 20)
    num_others, unit = draw.number("num_others", 0, 40), draw.option("unit", (1.0, math.log(2.0)))
    scale = dim**-0.5
    q, k, v = (
        torch.randn(num_reqs, heads * group, dim).to(query),
        *torch.randn(2, num_slots, heads, dim).to(kv),
    )
    others = torch.randn(2, num_reqs, num_others, heads, dim)
    weight = 2 * torch.randn(num_reqs + 2, heads, num_samples)
    weight[torch.rand(weight.shape) < 0.3] = -math.inf
    weight[0] = -math.inf
    rows = torch.randperm(num_reqs + 2)[:num_reqs]
    slots = torch.randint(0, num_slots, (num_reqs, num_samples))
    active = torch.rand(num_reqs) < 0.8
    parts = [in_float64.attended(q[r], *others[:, r], scale) for r in range(num_reqs)]
    alone, lse = (torch.stack(part) for part in zip(*parts, strict=True))
    out = alone.to(query) if num_others else torch.full_like(q, math.nan)
    before = out.clone()
    options = {"scale": scale, "lse_unit": unit}
    slots_given = slots.to(draw.dtype("slots", INTS))
    attend_samples(q, k, v, slots_given, rows, weight, active, out, (lse / unit).float(), **options)
    chosen = k.float()[slots], v.float()[slots]
    want = in_float64.with_samples(q, tuple(others), chosen, weight[rows], scale)
    yield Compared("active", out[active], want[active].nan_to_num(0.0), TOLERANCES[query])
    yield Compared("others", out[~active], before[~active], EXACT)


def _keys(draw: Draw, num_reqs: int, length: int) -> Keys:
    """Draw keys of any kind, for requests of at most `length` tokens."""
    heads, group, dim = _heads(draw)
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
    num_reqs, length = draw.number("num_reqs", 1, 4, 2), draw.number("length", 2, 600, 140)
    keys, scale = _keys(draw, num_reqs, length), 0.3
    pooling = draw.option("pooling", POOLINGS)
    lo, hi = _ranges(draw, num_reqs, length)
    active = torch.rand(num_reqs) < 0.8 if draw.flag("active") else None
    got = score_keys(
        keys.q, keys.k_pool, keys.table.to(draw.dtype("slots", INTS)), lo, hi, width=length,
        scale=scale, pooling=pooling, k_scale=keys.k_scale, page_size=keys.page_size, active=active,
    )  # fmt: skip
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
    length = draw.number("length", 2, 600, 140)
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
    positions, got = score_topk(
        keys.q, keys.k_pool, keys.table, lo, hi, k, width=length, scale=scale, pooling=pooling,
        k_scale=keys.k_scale, page_size=keys.page_size, pooled_positions=(before, after),
    )  # fmt: skip
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


def query(draw: Draw) -> Iterator[Compared]:
    """`predict_query`."""
    heads, dim = draw.number("heads", 1, 12, 4), 8 * draw.number("dim", 1, 16, 6)
    sizes = draw.number("tokens", 1, 12, 5), draw.number("hidden", 8, 900, 200), heads, dim
    dtype = draw.dtype("dtype", FLOATS)
    given = query_inputs(
        sizes, dtype, "cpu", has_bias=draw.flag("bias"), has_norm=draw.flag("norm"),
        form=draw.option("form", ("", *FORMS)),
    )  # fmt: skip
    given = with_int8(given) if draw.flag("int8") else given
    yield Compared("query", predict_query(*given), predict_in_float64(*given), tolerance_of(dtype))


def rope(draw: Draw) -> Iterator[Compared]:
    """`apply_rope` and `unapply_rope`."""
    shape = draw.number("tokens", 1, 9), draw.number("heads", 1, 6), 2 * draw.number("half", 1, 64)
    dtype = draw.dtype("dtype", MULTIPLIED if draw.is_interpreted else FLOATS)
    last, scaling = draw.number("last", 0, 32768), draw.option("scaling", (1.0, 0.8, 1.3))
    x, positions = torch.randn(shape).to(dtype), draw.integers(0, last, shape[0])
    inv_freq = draw.option("base", (1e4, 5e5)) ** (-torch.arange(shape[2] // 2) / (shape[2] // 2))
    # Angles are products in float32: off by half a last place each, so a pair by that much of its
    # length, which hardly is above 6.
    angle = 6 * 1.3 * last * 2.0**-24
    least = TOLERANCES[dtype]
    tolerance = replace(
        least, abs_error=least.abs_error + angle, cosine_gap=least.cosine_gap + angle**2
    )
    for what, turn, factor, by in (
        ("rotated", apply_rope, scaling, positions),
        ("back", unapply_rope, 1 / scaling, -positions),
    ):
        got = turn(x, positions, inv_freq, scaling=scaling)
        yield Compared(what, got, in_float64.rotated(x, by, inv_freq, factor), tolerance)


def _settings(draw: Draw) -> dict[str, object]:
    return {
        "eps": draw.option("eps", (0.01, 0.03, 0.2)),
        "sign": draw.option("sign", (1, -1)),
        "normalise": draw.option("normalise", ("softmax", "none")),
    }


def ridge(draw: Draw) -> Iterator[Compared]:
    """`ridge_predict` and `mean_predict` of windows, some of which are not full."""
    num, size = draw.number("num", 1, 6, 3), draw.number("size", 1, 16)
    window = torch.randn(num, size + 1, draw.number("dim", 1, 128, 64))
    window = torch.cat([window[:, :1], 0.7 * window[:, :-1] + 0.7 * window[:, 1:]], 1)
    counts = draw.integers(1, size + 1, num)
    settings, there = _settings(draw), [slice(size + 1 - n, None) for n in counts.tolist()]
    spoiled = torch.full_like(window, math.nan)
    for row, part in enumerate(there):
        spoiled[row, part] = window[row, part]
    kept = [window[row, part].double() for row, part in enumerate(there)]
    want = torch.stack([in_float64.ridge(queries, **settings) for queries in kept])
    yield Compared("ridge", ridge_predict(spoiled, counts, **settings), want, SOLVED)
    if not draw.is_interpreted:  # which has no version in Triton
        want = torch.stack([queries.mean(0) for queries in kept])
        yield Compared("mean", mean_predict(spoiled, counts), want, FLOAT32)


def query_windows(draw: Draw) -> Iterator[Compared]:
    """`push_and_predict` over some steps, by queries that are turned to the place of their use."""
    num_reqs, heads, half = draw.number("num_reqs", 1, 3), draw.number("heads", 1, 4), 4
    half *= draw.number("dim", 1, 16, 6)
    prediction = draw.option("prediction", ("ridge", "mean"))
    size = draw.number("size", 1, 16 if prediction == "ridge" else 30) + 1
    dtype = draw.dtype("dtype", MULTIPLIED if draw.is_interpreted else FLOATS)
    settings, turns = _settings(draw), draw.flag("turns")
    windows = torch.randn(num_reqs + 2, size, heads, 2 * half).to(dtype)
    rows = torch.randperm(num_reqs + 2)[:num_reqs]
    first = torch.randint(0, 200, (num_reqs,))
    starts = torch.full((num_reqs + 2,), 1 << 62)
    starts[rows] = first
    angles = torch.rand(size, half) * 6
    tables = {"cos": angles.cos(), "sin": angles.sin()} if turns else {}
    kept: list[list[torch.Tensor]] = [[] for _ in range(num_reqs)]
    for step in range(draw.number("steps", 1, 2 * size, 3)):
        pushed = torch.randn(num_reqs, heads, 2 * half).to(dtype)
        got = push_and_predict(
            pushed, rows, first + step, windows, starts, prediction=prediction, **tables, **settings
        )
        want = torch.empty(got.shape, dtype=torch.float64)
        for req, queries in enumerate(kept):
            queries.append(pushed[req].double())
            window = torch.stack(queries[-size:])
            if turns:
                cos, sin = (t.double().flip(0)[-len(window) :, None] for t in tables.values())
                a, b = window.chunk(2, -1)
                window = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
            for head in range(heads):
                seen = window[:, head]
                is_mean = prediction == "mean"
                want[req, head] = seen.mean(0) if is_mean else in_float64.ridge(seen, **settings)
        yield Compared("prediction", got, want, SOLVED)


def sent_rows(draw: Draw) -> Iterator[Compared]:
    """`send_rows`."""
    shape = draw.number("rows", 0, 9), draw.number("width", 1, 5000, 500)
    dtype, has_residual = draw.dtype("dtype", FLOATS), draw.flag("residual")
    hidden, residual, out = torch.randn(3, *shape).to(dtype)
    word = torch.tensor([[7], [0]], dtype=torch.int32)
    flags = torch.zeros(shape[0], dtype=torch.int32)
    send_rows(hidden, residual if has_residual else None, out, flags, step=word[0], lost=word[1])
    want = hidden.double() + (residual.double() if has_residual else 0)
    yield Compared("rows", out, want, TOLERANCES[dtype])
    yield Compared("flags", flags, torch.full_like(flags, 7), EXACT)
