# SPDX-License-Identifier: Apache-2.0
"""Triton selection kernels; run by `test_triton_ops` in a process of its own."""

import math
from functools import partial

import pytest
import torch
from in_python import best_positions
from plain_torch import in_plain_torch
from tolerances import assert_close

from tandemkv.kernels.exchange import SampleWeights
from tandemkv.kernels.mirror import make_mirror_scratch
from tandemkv.kernels.triton_ops import exchange as triton_exchange
from tandemkv.kernels.triton_ops import mirror as triton_mirror
from tandemkv.kernels.triton_ops import position_pooling as triton_pooling
from tandemkv.kernels.triton_ops import topk as triton_topk

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.int32, torch.int64)
exchange, mirror, pooling = (
    in_plain_torch(name) for name in ("exchange", "mirror", "position_pooling")
)


def check_topk(scores: torch.Tensor, k: int, lo: list[int] | None, hi: list[int] | None) -> None:
    bounds = tuple(None if b is None else torch.tensor(b, device=DEVICE) for b in (lo, hi))
    want = best_positions(scores, bounds, k)
    of_best = scores.gather(-1, want.clamp(min=0).long()).where(want >= 0, -math.inf)
    got_scores = torch.full(want.shape, math.nan, device=DEVICE)
    keywords = {"lo": bounds[0], "hi": bounds[1], "out_scores": got_scores}
    got = triton_topk.topk_positions(scores, k, **keywords)
    assert torch.equal(got, want)
    assert torch.equal(got_scores, of_best)
    got = triton_topk.topk_positions(scores, k, **keywords, sort=False)
    found = scores.gather(-1, got.clamp(min=0).long()).where(got >= 0, -math.inf)
    assert torch.equal(got_scores, found)
    padding = got < 0
    assert not bool((padding[..., :-1] & ~padding[..., 1:]).any())
    assert torch.equal(got.sort(-1).values, want.sort(-1).values)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows of some hundred scores go the way of long ones."""
    monkeypatch.setattr(triton_topk, "MIN_CAPACITY", 64)
    monkeypatch.setattr(triton_topk, "_BLOCK", 128)
    monkeypatch.setattr(triton_topk, "MIN_SAMPLE", 64)


@pytest.mark.parametrize(("width", "k"), [(1, 1), (50, 7), (50, 60), (37, 0)])
def test_topk_in_registers(width: int, k: int) -> None:
    check_topk(torch.randn(2, 2, width, device=DEVICE), k, None, None)
    check_topk(torch.randn(2, 2, width, device=DEVICE).round(), k, [width // 3, 5], [width, 2])


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("k", [1, 20])
@pytest.mark.parametrize("memory", [403, 404])
def test_topk_by_sample_and_filter(k: int, memory: int) -> None:
    """What is read in fours needs memory up to a multiple of 4: a sanitizer sees what does not."""
    scores = torch.randn(2, 1, memory, device=DEVICE)[..., :403]
    assert triton_topk._ends_in_fours(scores) == (memory == 404)
    scores[..., :3] = math.nan  # what stands outside the bounds may be anything
    scores[0, :, 390:] = math.inf
    check_topk(scores, k, [3, 130], [390, 460])


@pytest.mark.parametrize(("before", "after"), [(1, 0), (0, 2), (3, 3), (31, 31)])
def test_pooling_over_positions(before: int, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_pooling, "_BLOCK", 64)
    scores = torch.randn(2, 3, 210, device=DEVICE)[..., :203]
    scores[..., :9] = -math.inf
    scores[0, 1, 50:53] = torch.tensor([math.nan, -math.inf, math.inf])
    scores[1, :, 120:] = -math.inf
    want = pooling.pool_positions(scores, before, after)
    assert torch.equal(triton_pooling.pool_positions(scores, before, after), want)
    assert (float(want[0, 1, 53]) == math.inf) == (before > 0)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", ["equal", "tied", "special", "misled"])
def test_topk_where_the_sample_is_of_no_use(kind: str) -> None:
    scores = torch.randn(1, 2, 300, device=DEVICE)
    if kind == "equal":
        scores[0, 0] = 0.0
        scores[0, 0, ::2] = -0.0
        scores[0, 1] = -math.inf
    elif kind == "tied":
        scores = (scores > 0.2).float()
    elif kind == "special":
        scores[..., ::3] = -math.inf
        scores[..., 1::3] = math.nan
        scores[..., 7:40:8] = math.inf
    else:
        scores = scores.abs() * 1e-30 - 1e30
        scores[..., :9] = 3e38
    check_topk(scores, 17, None, [290])


@pytest.mark.usefixtures("small_blocks")
def test_topk_of_strided_scores() -> None:
    scores = torch.randn(2, 300, 2, device=DEVICE).permute(0, 2, 1)
    check_topk(scores, 5, [0, 1], None)


def test_topk_refuses_the_scratch_of_a_smaller_k() -> None:
    scratch = torch.zeros((2, 2 + 2 * triton_topk.capacity_of(2048)), dtype=torch.int32)
    with pytest.raises(ValueError, match="make_topk_scratch"):
        triton_topk.topk_positions(torch.zeros(1, 2, 5), 2049, scratch=scratch)


def mirror_call(generator: torch.Generator, sizes: tuple[int, ...], step: int) -> dict[str, object]:
    """Draw the arguments of one call: ``sizes`` are reqs, heads, k, resident slots, context."""
    num_reqs, heads, k, num_resident, context = sizes

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high + 1, shape, generator=generator).to(DEVICE)

    selected = draw(-1, context - 1, num_reqs, heads, k).int()
    scores = None
    if int(draw(0, 1)):
        order = torch.rand(num_reqs, heads, context, generator=generator).argsort(-1)
        selected = order[..., :k].int().to(DEVICE)
        selected[draw(0, 5, *selected.shape) == 0] = -1
        scores = draw(-2, 2, *selected.shape).float()
        scores[scores == -2] = -math.inf
        scores[draw(0, 9, *selected.shape) == 0] = math.nan
    return {
        "selected": selected, "selected_scores": scores,
        "active": (None, draw(0, 1, num_reqs) > 0, draw(0, 1, num_reqs).to(torch.int8))[
            int(draw(0, 2))
        ],
        "step": torch.tensor(step, dtype=DTYPES[int(draw(0, 1))], device=DEVICE),
        "num_protected": int(draw(0, 3)), "num_target": draw(0, num_resident, num_reqs),
        "hi": draw(0, context, num_reqs).int(),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("cap", "max_words"), [(0, 8192), (1, 8192), (7, 1), (30, 8192)])
@pytest.mark.parametrize("holes", [True, False])
def test_mirror_over_many_steps(
    dtype: torch.dtype, cap: int, max_words: int, holes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More words than that, as of more than 256K positions, are looked up in memory.
    monkeypatch.setattr(triton_mirror, "_MAX_WORDS", max_words)
    generator = torch.Generator().manual_seed(cap)
    for trial in range(4):
        sizes = (2, 2, (5, 20, 0, 9)[trial], (18, 17, 6, 0)[trial], 60)
        shape = (*sizes[:2], sizes[3])
        order = torch.rand(*shape[:2], 60, generator=generator).argsort(-1)
        start = order[..., : shape[-1]].int().to(DEVICE)
        if holes:
            start[torch.rand(shape, generator=generator).to(DEVICE) < 0.4] = -1
        else:
            start[..., trial + 1 :] = -1
        want_pos, want_used = start, torch.full(shape, -1, dtype=dtype, device=DEVICE)
        got_pos, got_used = start.clone(), want_used.clone()
        rows, counts = None, torch.zeros((2, 4), dtype=torch.int64, device=DEVICE)
        if trial % 2:  # whole books, of which the requests have some rows
            rows = torch.tensor([3, 1], device=DEVICE)
            books = [torch.full((5, *t.shape[1:]), 7, dtype=t.dtype, device=DEVICE) for t in
                     (want_pos, want_used)]  # fmt: skip
            for book, part in zip(books, (want_pos, want_used), strict=True):
                book[rows] = part
            want_pos, want_used = books
            got_pos, got_used = want_pos.clone(), want_used.clone()
        weights = torch.full((2, len(want_pos), 2, 6), 7.0, device=DEVICE)
        scratch = make_mirror_scratch(3, 2, 60, DEVICE)
        for part in scratch:  # what other calls left
            part.random_(-3, 50)
        for step in range(1, 6):
            call = mirror_call(generator, sizes, step)
            selected = call.pop("selected")
            want = mirror.mirror_diff(
                selected, want_pos, want_used, fetch_cap=cap, rows=rows, counters=counts[0],
                log_weight=weights[0], **call,
            )  # fmt: skip
            got = triton_mirror.mirror_diff(
                selected, got_pos, got_used, fetch_cap=cap, rows=rows, counters=counts[1],
                log_weight=weights[1], scratch=scratch, **call,
            )  # fmt: skip
            assert_close(weights[1], weights[0].double())
            assert torch.equal(got[0], want[0])
            assert torch.equal(got[1], want[1])
            assert torch.equal(got_pos, want_pos)
            assert torch.equal(got_used, want_used)
            assert torch.equal(counts[0], counts[1])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("first", [2**31 - 3, 2**32 - 3])
def test_mirror_where_steps_wrap_around(dtype: torch.dtype, first: int) -> None:
    """The oldest slots go, those of seeds and of more than half a turn before among them."""
    generator, num_resident, cap = torch.Generator().manual_seed(first), 40, 12
    used = torch.arange(first - num_resident, first).expand(2, 2, -1).clone()
    used[..., 3:9] = -torch.arange(6)  # as a seed leaves them
    used[0, ..., 20] = first - 2**31 + 2  # an age that becomes the largest, and more
    used[1, ..., 30] = first - 2**31 - 5
    pos = torch.arange(num_resident).int().expand_as(used).clone().to(DEVICE)
    want_state = (pos, used.to(DEVICE, dtype))
    got_state = tuple(part.clone() for part in want_state)
    scratch = make_mirror_scratch(2, 2, 400, DEVICE)
    for step in range(first, first + 8):
        call = {
            "step": torch.tensor(step, device=DEVICE).to(dtype), "num_protected": 2,
            "num_target": torch.full((2,), num_resident, device=DEVICE), "fetch_cap": cap,
            "hi": torch.full((2,), 400, device=DEVICE),
        }  # fmt: skip
        selected = torch.rand(2, 2, 400, generator=generator).argsort(-1)[..., :20].int().to(DEVICE)
        is_hit = (want_state[0][..., None] == selected[..., None, :]).any(-1)
        ages = (call["step"] - want_state[1]).long()  # type: ignore[operator]
        ages = torch.where((ages < 0) | (ages >= 2**31), 2**31 - 2, ages)
        want = mirror.mirror_diff(selected, *want_state, **call)
        got = triton_mirror.mirror_diff(selected, *got_state, **call, scratch=scratch)
        for a, b in zip((*got, *got_state), (*want, *want_state), strict=True):
            assert torch.equal(a, b)
        for each in torch.cartesian_prod(torch.arange(2), torch.arange(2)).tolist():
            place = tuple(each)
            slots = got[1][place][got[1][place] >= 0].long()
            assert len(slots.unique()) == len(slots) == cap
            left = torch.ones(num_resident, dtype=torch.bool, device=DEVICE)
            left[slots], left[:2] = False, False
            left &= ~is_hit[place]
            assert not is_hit[place][slots].any()
            assert ages[place][slots].min() >= ages[place][left].max()


@pytest.mark.parametrize("context", [98304, 300000])
def test_mirror_as_it_is_served(context: int) -> None:
    """Of 2048 chosen positions 128 at most are fetched; ties, empty slots, samples, one row of two.

    Bits of the longer context are looked up in memory.
    """
    torch.manual_seed(context)
    heads, k, num_resident, cap, samples = 2, 2048, 4100, 128, 128
    rows = torch.tensor([1], device=DEVICE)
    hi = torch.full((1,), context - 64, dtype=torch.int32, device=DEVICE)
    target = torch.full_like(hi, num_resident)
    pos = torch.arange(num_resident, device=DEVICE).int().expand(2, heads, -1).clone()
    pos[..., -100:] = -1
    used, weights = torch.full_like(pos, -1), torch.zeros(2, heads, samples, device=DEVICE)
    counts = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    want_state = (pos, used, counts, weights)
    got_state = tuple(part.clone() for part in want_state)
    scratch = make_mirror_scratch(1, heads, context, DEVICE, may_repeat=False)
    scratch.bits.random_(-9, 9)
    with_scratch = partial(triton_mirror.mirror_diff, scratch=scratch)
    base = torch.rand(1, heads, context)
    for step in range(4):
        score = base + 0.2 * torch.rand_like(base)
        score[..., context - 64 :] = -1
        if step % 2:
            score = (score * 256).round() / 256
        best = score.topk(k, -1)
        order = torch.randperm(k)
        selected, scores = best.indices[..., order].int(), best.values[..., order]
        options = {
            "step": torch.tensor(step, device=DEVICE), "num_protected": 4, "num_target": target,
            "hi": hi,
            "fetch_cap": cap, "rows": rows, "selected_scores": scores.to(DEVICE).contiguous(),
        }  # fmt: skip
        fetched = []
        for diff, state in ((mirror.mirror_diff, want_state), (with_scratch, got_state)):
            own = {"counters": state[2], "log_weight": state[3]}
            fetched.append(diff(selected.to(DEVICE), *state[:2], **options, **own))
        assert all(map(torch.equal, *fetched))
        assert all(map(torch.equal, got_state[:3], want_state[:3]))
        assert_close(got_state[3], want_state[3].double())
    assert int(counts[1]) > int(counts[2]) > 0, "more is missing than is fetched"


def test_mirror_needs_scratch_and_few_slots() -> None:
    state = torch.zeros(1, 1, 4, dtype=torch.int32, device=DEVICE)
    end = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    keywords = {
        "step": end[0], "num_protected": 0, "num_target": end, "hi": end, "fetch_cap": 1
    }  # fmt: skip
    with pytest.raises(ValueError, match="make_mirror_scratch"):
        triton_mirror.mirror_diff(state, state, state.clone(), **keywords)
    many = torch.zeros(1, 1, 40000, dtype=torch.int32, device=DEVICE)
    scratch = make_mirror_scratch(1, 1, 4, DEVICE)
    with pytest.raises(ValueError, match="num_resident=40000"):
        triton_mirror.mirror_diff(state, many, many.clone(), scratch=scratch, **keywords)


def random_bits(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    size = torch.empty((), dtype=dtype).element_size()
    bits = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8)
    return bits.view(dtype).to(DEVICE)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize(("cap", "num_samples"), [(40, 6), (3, 16), (0, 10)])
def test_exchange_with_weights(cap: int, num_samples: int) -> None:
    """One program of a head carries them, whatever rows there are; others' stay as they are."""
    num_reqs, heads, dim, num_slots = 5, 3, 4, 64
    pools = random_bits(2, 300, heads, dim, dtype=torch.bfloat16)
    table = torch.stack([torch.randperm(300) for _ in range(num_reqs)]).int().to(DEVICE)
    fetch = torch.randint(-30, 300, (num_reqs, heads, cap), dtype=torch.int32).to(DEVICE)
    order = [torch.randperm(num_slots)[:cap] for _ in range(num_reqs * heads)]
    to = torch.stack(order).view(num_reqs, heads, cap).int().to(DEVICE)
    rows = torch.tensor([4, 0, 6, 0, 1], device=DEVICE)
    active = torch.tensor([True, True, False, False, True], device=DEVICE)
    fetch[~active] = -1
    want = random_bits(2, 7, num_slots, heads, dim, dtype=torch.bfloat16)
    got = want.clone()
    # Neither need be contiguous, and any bits are copied.
    source = random_bits(7, heads + 1, num_samples, dtype=torch.float32)[:, 1:]
    kept = random_bits(2, 7, heads, num_samples + 3, dtype=torch.float32)[..., :num_samples]
    before = kept.clone()
    weights = [SampleWeights(source=source, target=target, active=active) for target in kept]
    kept[1] = kept[0]
    exchange.exchange_rows(*pools, table, fetch, to, *want, rows, weights=weights[0])
    triton_exchange.exchange_rows(*pools, table, fetch, to, *got, rows, weights=weights[1])
    assert same_bits(got, want)
    assert same_bits(kept[1], kept[0])
    assert same_bits(kept[1, [0, 1, 4]], source[[0, 1, 4]])
    assert same_bits(kept[1, [2, 3, 5, 6]], before[0, [2, 3, 5, 6]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("page_size", "cap", "dim"), [(1, 5, 7), (4, 18, 16), (3, 1, 32)])
def test_exchange(dtype: torch.dtype, page_size: int, cap: int, dim: int) -> None:
    heads, pages, num_slots = 2, 8, 20
    pools = random_bits(2, 2 * pages * page_size, heads, dim, dtype=dtype)
    table = torch.stack([torch.randperm(2 * pages)[:pages] for _ in range(2)]).int().to(DEVICE)
    fetch = torch.randint(-3, pages * page_size, (2, heads, cap), dtype=torch.int32).to(DEVICE)
    order = [torch.randperm(num_slots)[:cap] for _ in range(2 * heads)]
    to = torch.stack(order).view(2, heads, cap).int().to(DEVICE)
    to[0, :, 0] = -1
    rows = torch.tensor([2, 0], device=DEVICE)
    want = random_bits(2, 3, num_slots, heads, dim, dtype=dtype)
    got = want.clone()
    for run, res in ((exchange.exchange_rows, want), (triton_exchange.exchange_rows, got)):
        run(*pools, table, fetch, to, *res, rows, page_size=page_size)
    assert same_bits(got, want)
