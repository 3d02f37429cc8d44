# SPDX-License-Identifier: Apache-2.0
"""Rows that are copied and tables that are filled, against plain Python: nothing may differ."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from in_python import grown
from numerics_draw import INTS, KV_FLOATS, Compared, Draw
from tolerances import EXACT

from tandemkv.kernels.append import SampleMoves, append_tokens
from tandemkv.kernels.exchange import SampleWeights, exchange_rows
from tandemkv.kernels.samples import load_sample_moves, load_sample_slots
from tandemkv.kernels.step_tables import (
    CandidateTables,
    load_attended,
    load_candidates,
    load_ring,
)


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
    cold = torch.tensor(options.pop("num_cold"), dtype=torch.int32)
    load_candidates(
        rows, lengths, page_slots, CandidateTables(**given), page_size=page_size, num_cold=cold,
        **options,
    )  # fmt: skip
    for name, tensor in want.items():
        yield Compared(name, given[name].long(), tensor.long(), EXACT)
