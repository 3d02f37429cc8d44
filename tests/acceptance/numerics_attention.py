# SPDX-License-Identifier: Apache-2.0
"""Attention and the merge of its parts, against float64."""

from __future__ import annotations

import math
from collections.abc import Iterator

import in_float64
import torch
from numerics_draw import FLOAT32, FLOATS, INTS, KV_FLOATS, MULTIPLIED, Compared, Draw
from tolerances import EXACT, TOLERANCES

from tandemkv.kernels.attention import attend_paged
from tandemkv.kernels.merge import merge_attention
from tandemkv.kernels.samples import attend_samples, make_sample_scratch
from tandemkv.kernels.step_flags import send_rows


def _kv_types(draw: Draw) -> tuple[torch.dtype, torch.dtype]:
    """Draw the types of K and V and of queries; the interpreter knows few pairs."""
    if not draw.is_interpreted:
        return draw.dtype("kv", KV_FLOATS), draw.dtype("query", FLOATS)
    kv = draw.dtype("kv", (*MULTIPLIED, "float8_e4m3fn"))
    return kv, torch.float32 if kv == torch.float32 else torch.float16


def attention(draw: Draw) -> Iterator[Compared]:
    """`attend_paged`."""
    heads, group, dim = draw.heads()
    kv, query = _kv_types(draw)
    num_reqs = draw.number("num_reqs", 1, 4, 2)
    page_size = draw.option("page_size", (1, 16, 64) if draw.is_interpreted else (1, 3, 16, 64))
    max_pages = draw.number("max_pages", 1, max(1, 9000 // page_size), max(1, 130 // page_size))
    pages = torch.arange(num_reqs * max_pages + 2)
    if draw.flag("scattered"):
        pages = pages[torch.randperm(len(pages))]
    table = pages[: num_reqs * max_pages].view(num_reqs, max_pages)
    k, v = torch.randn(2, len(pages) * page_size, heads, dim).to(kv)
    q = torch.randn(num_reqs, heads * group, dim).to(query)
    scale = draw.option("scale", (0.1, 1.0, 3.0)) * dim**-0.5
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
    heads, group, dim = draw.heads()
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
    scratch = make_sample_scratch(num_reqs, q.shape[1], num_samples, dim, q.device)
    options = {"scale": scale, "lse_unit": unit, "scratch": scratch}
    slots_given = slots.to(draw.dtype("slots", INTS))
    attend_samples(q, k, v, slots_given, rows, weight, active, out, (lse / unit).float(), **options)
    chosen = k.float()[slots], v.float()[slots]
    want = in_float64.with_samples(q, tuple(others), chosen, weight[rows], scale)
    yield Compared("active", out[active], want[active].nan_to_num(0.0), TOLERANCES[query])
    yield Compared("others", out[~active], before[~active], EXACT)


def sent_rows(draw: Draw) -> Iterator[Compared]:
    """`send_rows`."""
    shape = draw.number("rows", 0, 9), draw.number("width", 1, 5000, 500)
    dtype = draw.dtype("dtype", FLOATS)
    rows, out = torch.randn(2, *shape).to(dtype)
    word = torch.tensor([[7], [0]], dtype=torch.int32)
    flags = torch.zeros(shape[0], dtype=torch.int32)
    send_rows(rows, out, flags, step=word[0], lost=word[1])
    yield Compared("rows", out, rows, EXACT)
    yield Compared("flags", flags, torch.full_like(flags, 7), EXACT)
