# SPDX-License-Identifier: Apache-2.0
"""Operations that choose, copy and list, each against plain Python: nothing may differ.

Weights of samples, which `mirror_diff` writes beside, are numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from in_python import Limits, best_positions, grown, mirrored, padded, pooled
from numerics_draw import INTS, KV_FLOATS, Compared, Draw
from tolerances import EXACT, TOLERANCES

from tandemkv.kernels.append import SampleMoves, append_tokens
from tandemkv.kernels.exchange import SampleWeights, exchange_rows
from tandemkv.kernels.mirror import make_mirror_scratch, mirror_diff
from tandemkv.kernels.position_pooling import MAX_REACH, pool_positions
from tandemkv.kernels.samples import load_sample_moves, load_sample_slots
from tandemkv.kernels.step_tables import (
    CandidateTables,
    load_attended,
    load_candidates,
    load_ring,
)
from tandemkv.kernels.topk import topk_positions

FLOAT32 = TOLERANCES[torch.float32]


def _contents(draw: Draw, *shape: int) -> torch.Tensor:
    """Scores: all different, with many ties, or with infinities and NaN among them."""
    found = torch.randn(shape)
    kind = draw.option("contents", ("different", "ties", "special"))
    if kind == "ties":
        return found.round()
    if kind == "special":
        special = torch.tensor([-math.inf, math.inf, math.nan, 3e38, -0.0, 0.0])
        chosen = special[torch.randint(0, len(special), shape)]
        return torch.where(torch.rand(shape) < 0.3, chosen, found)
    return found


def topk(draw: Draw) -> Iterator[Compared]:
    """`topk_positions`."""
    shape = draw.number("num_reqs", 1, 4, 2), draw.number("heads", 1, 4, 2)
    width = draw.number("width", 1, 3000, 500)
    k, scores = draw.number("k", 0, width + 10), _contents(draw, *shape, width)
    lo, hi = (
        draw.integers(-2, width + 3, shape[0]).to(draw.dtype(name, INTS)) if given else None
        for name, given in (("lo", draw.flag("has_lo")), ("hi", draw.flag("has_hi")))
    )
    want, got_scores = best_positions(scores, (lo, hi), k), torch.empty(*shape, k)
    is_sorted = draw.flag("sort")
    got = topk_positions(scores, k, lo=lo, hi=hi, sort=is_sorted, out_scores=got_scores)
    of_got = scores.gather(-1, got.clamp(min=0).long()).masked_fill(got < 0, -math.inf)
    yield Compared("scores", got_scores, of_got, EXACT)
    if not is_sorted:
        got, want = got.sort(-1).values, want.sort(-1).values
    yield Compared("positions", got, want, EXACT)


def pooling(draw: Draw) -> Iterator[Compared]:
    """`pool_positions`."""
    shape = draw.number("num_reqs", 1, 3), draw.number("heads", 1, 3)
    scores = _contents(draw, *shape, draw.number("width", 1, 800, 300))
    reach = draw.number("before", 0, MAX_REACH), draw.number("after", 1, MAX_REACH)
    want = [pooled(row, *reach) for row in scores.double().flatten(0, 1).tolist()]
    got = pool_positions(scores, *reach)
    yield Compared("pooled", got, torch.tensor(want).view(scores.shape), EXACT)


def _weights_of(
    resident: list[int], hi: int, num_sink: int, states: list[list[int]]
) -> list[float]:
    """Return the log weights of samples: what is not resident, shared out by their spans.

    `states` is `grown` until a sample comes behind the last: that says what the last stands for.
    """
    count = max(0, hi - num_sink)
    places = states[count - 1] if count else [-1] * len(states[0])
    later = sorted({p for p in places if p >= 0} | {max(state) for state in states[count:]})
    spans = [later[later.index(p) + 1] - p if p >= 0 else 0 for p in places]
    is_free = [p >= 0 and p + num_sink not in resident for p in places]
    total = sum(span for span, free in zip(spans, is_free, strict=True) if free)
    left_out = hi - sum(p >= 0 for p in resident)
    shares = [
        left_out * span / total if free else 0.0 for span, free in zip(spans, is_free, strict=True)
    ]
    return [math.log(share) if share > 0 else -math.inf for share in shares]


@dataclass
class _Books:
    """What `mirror_diff` keeps, done by plain Python beside it."""

    pos: torch.Tensor  # [B, H, R]
    used: torch.Tensor
    hi: torch.Tensor
    target: torch.Tensor
    counted: list[int]

    def update(
        self, at: tuple[int, int], chosen: list[int], limits: Limits, *, is_sorted: bool
    ) -> list[tuple[int, int]]:
        """Do one head of one request; return what is fetched."""
        pos, used = self.pos[at].tolist(), self.used[at].tolist()
        self.counted[0] += sum(p in pos for p in chosen)
        self.counted[1] += len(set(chosen) - set(pos))
        target, end = int(self.target[at[0]]), int(self.hi[at[0]])
        fetched = mirrored(chosen, pos, used, target, end, limits, is_sorted=is_sorted)
        self.counted[2] += len(fetched)
        self.pos[at], self.used[at] = torch.tensor([pos, used])
        return fetched


def _books(draw: Draw, num_reqs: int, heads: int, num_resident: int, context: int) -> _Books:
    """Draw books with holes, of which all positions are below each request's end."""
    pos = torch.rand(num_reqs, heads, context).argsort(-1)[..., :num_resident].int()
    pos[torch.rand(pos.shape) < draw.option("holes", (0.0, 0.3, 0.9))] = -1
    hi = torch.maximum(pos.flatten(1).amax(1) + 1, draw.integers(1, context, num_reqs))
    used = draw.integers(-1, 2, num_reqs, heads, num_resident)
    target = draw.integers(0, num_resident, num_reqs)
    return _Books(pos, used.to(draw.dtype("used", INTS)), hi.int(), target, [0, 0, 0])


def _selection(
    draw: Draw, hi: torch.Tensor, heads: int, k: int, *, is_scored: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Draw positions of each head below `hi`, padded; distinct ones with scores, or repeated."""
    rows: list[list[int]] = []
    for end in hi.tolist():
        for _ in range(heads):
            size = draw.random.randint(0, min(k, end) if is_scored else k)
            one = draw.random.sample(range(end), size) if is_scored else None
            rows.append(padded(one or [draw.random.randrange(-1, end) for _ in range(size)], k))
    selected = torch.tensor(rows, dtype=torch.int32).view(len(hi), heads, k)
    if not is_scored:
        return selected, None
    scores = torch.randint(-3, 4, selected.shape).float()
    scores[torch.rand(scores.shape) < 0.1] = math.nan
    return selected, torch.where(scores == -3, -math.inf, scores)


def mirror(draw: Draw) -> Iterator[Compared]:
    """`mirror_diff` over three steps."""
    num_reqs, heads = draw.number("num_reqs", 1, 3, 2), draw.number("heads", 1, 3, 2)
    num_resident, k = draw.number("num_resident", 1, 90, 20), draw.number("k", 0, 60, 16)
    context, cap = num_resident + draw.number("more", 1, 300, 40), draw.number("cap", 0, 40, 12)
    is_scored, has_idle = draw.flag("scored"), draw.flag("idle")
    num_sink, lo = draw.number("sink", 0, 5), draw.number("lo", 0, 6)
    num_samples = 2 * draw.number("half_samples", 1, 16, 4)
    want = _books(draw, num_reqs, heads, num_resident, context)
    rows, got = None, (want.pos.clone(), want.used.clone())
    if draw.flag("rows"):
        rows = torch.randperm(num_reqs + 2)[:num_reqs]
        got = tuple(part.new_full((num_reqs + 2, *part.shape[1:]), 5) for part in got)
        got[0][rows], got[1][rows] = want.pos, want.used
    weight, counters = torch.full((len(got[0]), heads, num_samples), 7.0), torch.zeros(3).long()
    scratch = make_mirror_scratch(num_reqs, heads, context, "cpu")
    states = grown(num_samples, 2 * (context + num_samples))
    places = list(range(num_reqs)) if rows is None else rows.tolist()
    for step in (3, 4, 5):
        selected, scores = _selection(draw, want.hi, heads, k, is_scored=is_scored)
        active = torch.rand(num_reqs) < 0.7 if has_idle else None
        fetch = mirror_diff(
            selected, *got, step=step, num_protected=num_sink, num_target=want.target, hi=want.hi,
            lo=lo, fetch_cap=cap, selected_scores=scores, active=active, rows=rows,
            counters=counters, log_weight=weight, scratch=scratch,
        )  # fmt: skip
        limits = Limits(step, num_sink, lo, cap)
        for at in product(range(num_reqs), range(heads)):
            fetched: list[tuple[int, int]] = []
            if active is None or active[at[0]]:
                chosen = _in_order(selected[at].tolist(), None if scores is None else scores[at])
                fetched = want.update(at, chosen, limits, is_sorted=is_scored)
                shared = _weights_of(want.pos[at].tolist(), int(want.hi[at[0]]), num_sink, states)
                of_head = weight[places[at[0]], at[1]]
                yield Compared("weights", of_head, torch.tensor(shared), FLOAT32)
            for what, part, side in (("positions", fetch[0], 0), ("slots", fetch[1], 1)):
                of_side = torch.tensor(padded([pair[side] for pair in fetched], cap))
                yield Compared(what, part[at], of_side, EXACT)
        yield Compared("resident", got[0][places], want.pos, EXACT)
        yield Compared("last used", got[1][places], want.used, EXACT)
    yield Compared("counters", counters, torch.tensor(want.counted), EXACT)


def _in_order(selected: list[int], scores: torch.Tensor | None) -> list[int]:
    """Return selected positions best first, without padding."""
    if scores is None:
        return [p for p in selected if p >= 0]
    ranked = [
        (math.inf if math.isnan(score) else -score, p)
        for score, p in zip(scores.tolist(), selected, strict=True)
    ]
    return [p for _, p in sorted(ranked) if p >= 0]


def _bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bits, NaN of all kinds among them."""
    size = torch.empty((), dtype=dtype).element_size()
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8).view(dtype)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def exchange(draw: Draw) -> Iterator[Compared]:
    """`exchange_rows`, bit by bit."""
    num_reqs, heads = draw.number("num_reqs", 1, 4), draw.number("heads", 1, 4)
    dim, num_slots = draw.number("dim", 1, 130, 40), draw.number("num_slots", 1, 60, 20)
    page_size, max_pages = draw.option("page_size", (1, 3, 16)), draw.number("pages", 1, 12)
    cap = draw.number("cap", 0, num_slots)
    dtype = draw.dtype("dtype", (*KV_FLOATS, "int8"))
    table = torch.randperm(num_reqs * max_pages).view(num_reqs, max_pages)
    pools = _bits(dtype, 2, table.numel() * page_size, heads, dim)
    fetch = draw.integers(-2, max_pages * page_size - 1, num_reqs, heads, cap).int()
    to = torch.rand(num_reqs, heads, num_slots).argsort(-1)[..., :cap].int()
    to[torch.rand(to.shape) < 0.1] = -1
    rows = torch.randperm(num_reqs + 2)[:num_reqs]
    got = _bits(dtype, 2, num_reqs + 2, num_slots, heads, dim)
    want, options = got.clone(), {}
    if draw.flag("weights"):
        shape = num_reqs + 2, heads, 2 * draw.number("half_samples", 1, 20)
        source, target = _bits(torch.float32, 2, *shape)
        active, carried = torch.rand(num_reqs) < 0.6, target.clone()
        fetch[~active] = -1
        options["weights"] = SampleWeights(source=source, target=target, active=active)
        for req in active.nonzero()[:, 0].tolist():
            carried[rows[req]] = source[rows[req]]
    exchange_rows(
        *pools, table.to(draw.dtype("slots", INTS)), fetch, to, *got, rows, page_size=page_size,
        **options,
    )  # fmt: skip
    for req, head, place in torch.cartesian_prod(*map(torch.arange, fetch.shape)).tolist():
        position, slot = int(fetch[req, head, place]), int(to[req, head, place])
        if position >= 0 <= slot:
            page = int(table[req, position // page_size])
            at = page * page_size + position % page_size
            want[:, rows[req], slot, head] = pools[:, at, head]
    yield Compared("rows", _bytes(got), _bytes(want), EXACT)
    if options:
        yield Compared("weights", _bytes(target), _bytes(carried), EXACT)


def appended(draw: Draw) -> Iterator[Compared]:
    """`append_tokens`, bit by bit; a token becomes a sample before it is overwritten."""
    num_reqs, heads = draw.number("num_reqs", 1, 6), draw.number("heads", 1, 4)
    dim, num_slots = draw.number("dim", 1, 130, 40), draw.number("num_slots", 1, 40)
    dtype, num_samples = draw.dtype("dtype", KV_FLOATS), 2 * draw.number("half_samples", 1, 9)
    k, v = _bits(dtype, 2, num_reqs, heads, dim)
    got = _bits(dtype, 2, num_reqs + 2, num_slots, heads, dim)
    kept = _bits(dtype, 2, num_reqs + 2, num_samples, heads, dim)
    rows, slots = torch.randperm(num_reqs + 2)[:num_reqs], draw.integers(0, num_slots - 1, num_reqs)
    want, want_kept, moves = got.clone(), kept.clone(), None
    if draw.flag("moves"):
        samples = draw.integers(-1, num_samples - 1, num_reqs)
        sources = draw.integers(0, num_slots - 1, num_reqs)
        moves = SampleMoves(k=kept[0], v=kept[1], samples=samples, sources=sources)
        for row, sample, source in zip(rows, samples, sources, strict=True):
            if sample >= 0:
                want_kept[:, row, sample] = want[:, row, source]
    for req, (row, slot) in enumerate(zip(rows, slots, strict=True)):
        want[0, row, slot], want[1, row, slot] = k[req], v[req]
    append_tokens(k, v, rows, slots.to(draw.dtype("slots", INTS)), *got, moves=moves)
    yield Compared("sets", _bytes(got), _bytes(want), EXACT)
    yield Compared("samples", _bytes(kept), _bytes(want_kept), EXACT)


def _requests(draw: Draw, edges: list[int], longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw rows, 0 among them, and lengths, near `edges` among them."""
    num_reqs = draw.number("num_reqs", 1, 8)
    near = torch.tensor(edges)[torch.randint(0, len(edges), (num_reqs,))]
    near = (near + torch.randint(-1, 3, (num_reqs,))).clamp(1, longest)
    lengths = torch.where(torch.rand(num_reqs) < 0.5, near, draw.integers(1, longest, num_reqs))
    rows = torch.randint(0, 9, (num_reqs,))
    return rows.to(draw.dtype("rows", INTS)), lengths.to(draw.dtype("lengths", INTS))


def _set_sizes(draw: Draw) -> tuple[dict[str, int], int]:
    """Draw resident, recent and dense tokens, and the width of what is attended to."""
    sizes = {
        "num_resident": draw.number("resident", 0, 400, 100),
        "num_recent": draw.number("recent", 1, 60),
        "num_dense": draw.number("dense", 0, 600, 200),
    }
    return sizes, max(sizes["num_resident"] + sizes["num_recent"], sizes["num_dense"])


def _place(position: int, sizes: dict[str, int], *, is_whole: bool) -> int:
    """Return the slot of a token in a resident set with a ring behind it."""
    num_resident = sizes["num_resident"]
    if is_whole and position < num_resident:
        return position
    return num_resident + (position - num_resident) % sizes["num_recent"]


def attended_slots(draw: Draw) -> Iterator[Compared]:
    """`load_attended` and `load_ring`."""
    sizes, width = _set_sizes(draw)
    num_resident, num_recent, num_dense = sizes.values()
    longest = 2 * width + 3
    rows, lengths = _requests(draw, [num_recent, width, num_dense + 1, num_resident + 1], longest)
    table, first = torch.randint(0, 2**31 - 1, (9, longest)), draw.number("first", 0, 10_000)
    in_pool, in_sets = torch.full((2, len(rows) + 1, width), -7, dtype=torch.int32)
    want_pool, want_sets = in_pool.clone(), in_sets.clone()
    counts, of_rows, newest = torch.full((3, len(rows) + 1), -7)
    want_counts, want_newest = counts.clone(), newest.clone()
    for req, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        is_long = length > num_dense
        count = min(length, num_resident + num_recent) if is_long else length
        is_sparse = is_long and row != 0
        filled = min(num_resident, max(0, length - num_recent)) if is_sparse else 0
        latest = range(length - count + filled, length)
        want_counts[req] = count
        want_newest[req] = _place(length - 1, sizes, is_whole=not is_sparse)
        own = [first + row * num_resident + slot for slot in range(filled)]
        want_pool[req, :count] = torch.tensor(own + [int(table[row, p]) for p in latest])
        own = [*range(filled), *(_place(p, sizes, is_whole=not is_sparse) for p in latest)]
        want_sets[req, :count] = row * width + torch.tensor(own)
    load_attended(
        rows, lengths, table.to(draw.dtype("table", INTS)), in_pool, counts, first_slot=first,
        **sizes,
    )  # fmt: skip
    yield Compared("slots in the pool", in_pool, want_pool, EXACT)
    yield Compared("counts", counts, want_counts, EXACT)
    load_ring(rows, lengths, in_sets, counts, of_rows, newest, **sizes)
    yield Compared("slots in sets", in_sets, want_sets, EXACT)
    yield Compared("newest", newest, want_newest, EXACT)
    yield Compared("rows", of_rows[: len(rows)], rows, EXACT)


def sample_tables(draw: Draw) -> Iterator[Compared]:
    """`load_sample_slots` and `load_sample_moves`."""
    sizes, width = _set_sizes(draw)
    num_recent, num_sink = sizes["num_recent"], draw.number("sink", 0, 5)
    num_samples, longest = 2 * draw.number("half_samples", 1, 40, 10), width + 60
    edges = [num_sink + num_recent, sizes["num_dense"], num_sink + num_recent + num_samples]
    rows, lengths = _requests(draw, edges, longest)
    states = grown(num_samples, longest)
    table = torch.randint(0, 9999, (9, longest))
    slots = torch.full((len(rows) + 1, num_samples), -7, dtype=torch.int32)
    moves, sources = torch.full((2, len(rows) + 1), -7)
    want_slots, want_moves, want_sources = slots.clone(), moves.clone(), sources.clone()
    for req, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        count = max(0, length - num_recent - num_sink)
        places = states[count - 1] if count else [-1] * num_samples
        found = [int(table[row, num_sink + p]) if p >= 0 else 0 for p in places]
        want_slots[req] = torch.tensor(found)
        want_moves[req] = places.index(count - 1) if count and count - 1 in places else -1
        want_sources[req] = _place(
            length - num_recent - 1, sizes, is_whole=length <= sizes["num_dense"]
        )
    pages = table.to(draw.dtype("table", INTS))
    load_sample_slots(rows, lengths, pages, slots, num_sink=num_sink, num_recent=num_recent)
    load_sample_moves(lengths, moves, sources, num_samples=num_samples, num_sink=num_sink, **sizes)
    yield Compared("slots", slots, want_slots, EXACT)
    yield Compared("moves", moves, want_moves, EXACT)
    moved = want_moves >= 0
    yield Compared("sources", sources[moved], want_sources[moved], EXACT)


def candidates(draw: Draw) -> Iterator[Compared]:
    """`load_candidates`."""
    page_size = draw.option("page_size", (1, 16, 48, 64))
    longest, max_pages = draw.number("longest", 1, 3000), draw.number("max_pages", 1, 60)
    options = {
        "num_sink": draw.number("sink", 0, 5), "num_excluded": draw.number("excluded", 0, 70),
        "num_resident": draw.number("resident", 0, 400), "num_cold": draw.number("cold", 0, 600),
        "num_layers": draw.number("layers", 0, 40),
    }  # fmt: skip
    edges = [options["num_excluded"], options["num_cold"], page_size]
    rows, lengths = _requests(draw, edges, longest)
    batch = len(rows) + 1
    table = torch.randint(-5000, 90_000, (9, draw.number("num_pages", 1, 60)))
    given: dict[str, torch.Tensor] = {
        name: torch.full((batch,), 5, dtype=torch.int32)
        for name in ("lengths", "lo", "hi", "num_target")
    }
    given |= {name: torch.full((batch,), 5) for name in ("rows", "positions")}
    given["active"] = torch.ones(batch, dtype=torch.bool)
    given["pages"] = torch.full((batch, max_pages), 5, dtype=torch.int32)
    given |= {"step": torch.tensor(5, dtype=torch.int32), "selections": torch.tensor(5)}
    want = {name: tensor.clone() for name, tensor in given.items()}
    want["step"] += 1
    for req, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        hi = max(0, length - options["num_excluded"])
        is_active = length > options["num_cold"] and row != 0
        of_request = {
            "rows": row, "positions": length - 1, "lengths": length, "lo": options["num_sink"],
            "hi": hi, "num_target": min(hi, options["num_resident"]), "active": is_active,
        }  # fmt: skip
        for name, value in of_request.items():
            want[name][req] = value
        pages = [slot // page_size for slot in table[row, :max_pages].tolist()]
        want["pages"][req, : len(pages)] = torch.tensor(pages)
        want["selections"] += options["num_layers"] * is_active
    page_slots = table.to(draw.dtype("table", INTS))
    load_candidates(
        rows, lengths, page_slots, CandidateTables(**given), page_size=page_size, **options
    )
    for name, tensor in want.items():
        yield Compared(name, given[name].long(), tensor.long(), EXACT)
