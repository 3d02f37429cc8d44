# SPDX-License-Identifier: Apache-2.0
"""`score_topk` against scores and then a choice; run by `test_triton_score` in a process."""

import math
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
import triton_score_cases
from score_inputs import make_keys, scan_of

from tandemkv.kernels.dispatch import plain
from tandemkv.kernels.position_pooling import pool_positions
from tandemkv.kernels.score import POOLINGS, KeyScan, make_score_scratch, score_keys
from tandemkv.kernels.select import SelectScratch, make_select_scratch, score_topk
from tandemkv.kernels.triton_ops import score as triton_score
from tandemkv.kernels.triton_ops import select as triton_select
from tandemkv.kernels.triton_ops import topk as triton_topk
from tandemkv.kernels.triton_ops.score_scan import decode_share, encode_share

reference = plain(score_topk)
DEVICE = triton_score_cases.DEVICE
AS_ON_GPUS = {
    triton_topk: ("MIN_CAPACITY", "MIN_SAMPLE"),
    triton_select: ("_BLOCK", "_COLUMNS", "_FILTER_PROGRAMS"),
}
AS_ON_GPUS = {of: {name: getattr(of, name) for name in names} for of, names in AS_ON_GPUS.items()}
CODED = 1 / 16  # the relative error of a code; what is as good as zero beside it apart
tensor = triton_score_cases.tensor


@pytest.fixture(autouse=True)
def small_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let some hundred candidates go the way of many."""
    monkeypatch.setattr(triton_topk, "MIN_CAPACITY", 64)
    monkeypatch.setattr(triton_topk, "MIN_SAMPLE", 64)
    monkeypatch.setattr(triton_select, "_BLOCK", 64)
    monkeypatch.setattr(triton_select, "_COLUMNS", 8)
    monkeypatch.setattr(triton_select, "_FILTER_PROGRAMS", 6)
    monkeypatch.setattr(triton_select, "_SPLITS", 1)


def filled_scratch(num_reqs: int, group: int, heads: int, width: int, k: int) -> SelectScratch:
    """Return buffers as large as on a GPU, with nothing useful in them."""
    score = make_score_scratch(num_reqs, group * heads, heads, width, torch.device(DEVICE))
    for buffer in (score.logits, score.tile_max, score.zero_dot, score.split_lse):
        buffer.fill_(float("nan"))
    size = 2 + 2 * triton_topk.capacity_of(k)
    return SelectScratch(
        score=score,
        lists=torch.full((num_reqs * heads, size), 7, dtype=torch.int32, device=DEVICE),
        head_lse=torch.full((num_reqs, heads, score.logits.shape[3]), torch.nan, device=DEVICE),
    )


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize(
    ("group", "k", "page_size"), [(1, 5, 16), (4, 20, 16), (3, 40, 32), (4, 20, 128), (6, 20, 64)]
)
def test_equals_scores_and_choice(
    pooling: str, kind: str, group: int, k: int, page_size: int
) -> None:
    """Both take the same scan's results through the same formula, in another order of sums.

    A scan of int4 keys for a choice takes tiles of at least 32 tokens by halves, where a group has
    three or four query heads; requests begin and end in either half.
    """
    torch.manual_seed(group)
    keys = make_keys(
        kind, num_reqs=5, heads=2, group=group, dim=64, page_size=page_size,
        num_pages=5 * -(-400 // page_size), device=DEVICE,
    )  # fmt: skip
    lo, hi = tensor([4, 0, 17, 9, 3]), tensor([391, 30, 17, 9 + k, 400])
    active = torch.tensor([1, 1, 1, 1, int(k != 5)], dtype=torch.bool, device=DEVICE)
    options = {
        "width": 400, "scale": 0.2, "pooling": pooling, "k_scale": keys.k_scale,
        "page_size": page_size, "active": active,
    }  # fmt: skip
    arguments = (keys.q, keys.k_pool, keys.table, lo, hi)
    for scratch in (filled_scratch(6, group, 2, 400, k), None):
        if scratch is None and DEVICE == "cpu":
            continue  # without a GPU no lists are allocated
        got, got_scores = triton_select.score_topk(
            KeyScan(*arguments, **options), k, scratch=scratch
        )
        scores = triton_score.score_keys(KeyScan(*arguments, **options))
        want_scores = torch.full(got.shape, torch.nan, device=DEVICE)
        want = triton_topk.topk_positions(scores, k, sort=False, out_scores=want_scores)
        is_coded = kind == "int4" and pooling == "softmax_mean" and group > 2
        if DEVICE == "cpu" and not is_coded:
            assert torch.equal(got.sort(-1).values, want.sort(-1).values)
        # On a GPU sums of the members of a group may differ in their last bit.
        close = {"rtol": CODED if is_coded else 1e-6, "atol": 0}
        torch.testing.assert_close(got_scores.sort(-1).values, want_scores.sort(-1).values, **close)
        found = scores.gather(-1, got.clamp(min=0).long()).where(got >= 0, -torch.inf)
        torch.testing.assert_close(got_scores, found, **close)
        chosen = got.sort(-1).values
        assert not bool(((chosen[..., 1:] == chosen[..., :-1]) & (chosen[..., 1:] >= 0)).any())
        assert not bool(((got < 0)[..., :-1] & (got >= 0)[..., 1:]).any())
        assert torch.equal(got < 0, got_scores == -torch.inf)
        _, far_scores = reference(KeyScan(*arguments, **options), k)
        far_scores, near_scores = (s.sort(-1).values for s in (far_scores, got_scores))
        assert torch.equal(far_scores == -torch.inf, near_scores == -torch.inf)
        gap = torch.where(far_scores > -torch.inf, near_scores - far_scores, 0.0).abs()
        limit = 2e-2 + (CODED if is_coded else 0)
        assert float(gap.max()) <= limit * float(far_scores.abs()[far_scores > -torch.inf].max())


@pytest.mark.parametrize(("begin", "end"), [(0, 400), (40, 400), (0, 130), (100, 230)])
def test_half_a_tile_without_candidates_takes_nothing_from_the_others(begin: int, end: int) -> None:
    """Of logits so far below zero that nothing is left of them beside a zero."""
    torch.manual_seed(3)
    keys = make_keys(
        "int4", num_reqs=1, heads=2, group=4, dim=64, page_size=64, num_pages=7, device=DEVICE
    )
    keys.k_scale[:, :, 1] -= 8.0
    q, k = keys.q.abs(), 20
    arguments = (q, keys.k_pool, keys.table, tensor([begin]), tensor([end]))
    options = {"width": 448, "scale": 0.3, "k_scale": keys.k_scale, "page_size": 64}
    of_logits = KeyScan(*arguments, **options, pooling="max_logit")
    assert float(plain(score_keys)(of_logits)[..., begin:end].max()) < -95
    got, got_scores = triton_select.score_topk(
        KeyScan(*arguments, **options),
        k,
        scratch=filled_scratch(1, 4, 2, 448, k),
    )
    _, want_scores = reference(KeyScan(*arguments, **options), k)
    assert int(got.min()) >= begin
    assert int(got.max()) < end
    close = {"rtol": 2e-2 + CODED, "atol": 0}
    torch.testing.assert_close(got_scores.sort(-1).values, want_scores.sort(-1).values, **close)


def test_heads_of_few_candidates_take_smaller_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound is that of a context which asks for the same sample itself."""
    torch.manual_seed(0)
    keys = make_keys(
        "int4", num_reqs=3, heads=2, group=4, dim=64, page_size=16, num_pages=3 * 40, device=DEVICE
    )
    lo, hi = tensor([4, 4, 4]), tensor([604, 304, 204])

    def bounds(per_sample: int, least: int) -> torch.Tensor:
        monkeypatch.setattr(triton_topk, "POSITIONS_PER_SAMPLE", (0, per_sample))
        monkeypatch.setattr(triton_topk, "MIN_SAMPLE", least)
        monkeypatch.setattr(triton_select, "_LEAST_SAMPLE", least)
        scratch = filled_scratch(3, 4, 2, 640, 20)
        triton_select.score_topk(scan_of(keys, lo, hi, width=640, scale=0.2), 20, scratch=scratch)
        return scratch.lists.view(3, 2, -1)[..., 1]

    got = bounds(4, 64)  # 640 candidates ask for 256, and 600, 300 and 200 for 256, 128 and 64
    of_one = [bounds(10**6, sample) for sample in (256, 128, 64)]
    for request, want in enumerate(of_one):
        assert torch.equal(got[request], want[request])
        assert not any(torch.equal(got[request], x[request]) for x in of_one if x is not want)


@pytest.mark.parametrize("part", [1, 2, 8])
def test_sums_of_a_scan_come_in_parts(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the second request's nine programs (on CPU) some have nothing to sum up."""
    torch.manual_seed(0)
    keys = make_keys(
        "int4", num_reqs=2, heads=2, group=4, dim=64, page_size=16, num_pages=2 * 40, device=DEVICE
    )
    kernel, launched, found = triton_select.bound_kernel, [], []

    class Launched:
        """The kernel, which notes how many sums it was given, and how many at once."""

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def run(*arguments: Any, **options: Any) -> None:
                launched.append((options["BLOCK_P"], options["BLOCK_S"]))
                kernel[grid](*arguments, **options)

            return run

    monkeypatch.setattr(triton_select, "bound_kernel", Launched())
    for width in (64, part):
        monkeypatch.setattr(triton_select, "_SPLITS", width)
        scratch = filled_scratch(13, 4, 2, 640, 20)
        chosen = triton_select.score_topk(
            scan_of(keys, tensor([4, 9]), tensor([611, 79]), width=640, scale=0.2),
            20,
            scratch=scratch,
        )
        found.append((*chosen, scratch.head_lse[:2]))
    assert launched[0][0] == launched[0][1] == launched[1][1]
    assert launched[1][0] == part < launched[1][1]
    (places, scores, sums), (part_places, part_scores, part_sums) = found
    torch.testing.assert_close(part_sums, sums, rtol=1e-5, atol=1e-5)
    assert torch.equal(part_places.sort(-1).values, places.sort(-1).values)
    torch.testing.assert_close(part_scores.sort(-1).values, scores.sort(-1).values)


@triton.jit
def _code_kernel(share, codes, decoded, SIZE: tl.constexpr, USE_ASM: tl.constexpr):
    at = tl.arange(0, SIZE)
    code = encode_share(tl.load(share + at), USE_ASM)
    tl.store(codes + at, code)
    tl.store(decoded + at, decode_share(code))


def test_codes_of_all_shares() -> None:
    """Every float16 in [0, 1], and NaN."""
    bits = torch.arange(1 << 14, dtype=torch.int32, device=DEVICE)
    share = bits.clamp(max=0x3C01).to(torch.int16).view(torch.float16).float()
    share[share > 1] = torch.nan
    codes = torch.zeros_like(share, dtype=torch.uint8)
    decoded = torch.full_like(share, torch.nan)
    _code_kernel[(1,)](share, codes, decoded, SIZE=len(share), USE_ASM=DEVICE == "cuda")
    is_number = ~share.isnan()
    assert torch.equal(codes.int()[is_number], ((bits + 64) >> 7)[is_number])
    assert not bool((decoded[~is_number].abs() > 0).any())  # zero or NaN: of no weight
    error = (decoded - share).abs()[is_number]
    share = share[is_number]
    assert bool((error <= torch.where(share >= 2**-14, share / 16, 2**-18)).all())
    assert bool((decoded[is_number][share < 2**-18] == 0).all())


@pytest.mark.parametrize(
    ("group", "k", "page_size", "length"),
    [
        *((group, k, 16, 480) for group, k in ((3, 7), (4, 40), (7, 40), (4, 300))),
        (4, 300, 64, 4800),
        (7, 300, 64, 4800),
        (4, 300, 128, 4864),  # tiles of 128 keys, for there are few channels
    ],
)
def test_codes_of_whole_numbers_are_exact(
    group: int, k: int, page_size: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Powers of two have codes of their own: what is chosen is what the reference chooses."""
    if page_size >= 64:  # blocks and lists of the size that GPUs have
        for of, values in AS_ON_GPUS.items():
            for name, value in values.items():
                monkeypatch.setattr(of, name, value)
    torch.manual_seed(k)
    keys = make_keys(
        "int4", num_reqs=2, heads=2, group=group, dim=64, page_size=page_size,
        num_pages=2 * length // page_size, device=DEVICE,
    )  # fmt: skip
    # In base 2 a token's logits are the code of channel 0; each page has a 0 and a 15.
    keys.k_scale.zero_()
    keys.k_scale[:, :, 0, 0] = 1
    numbers = torch.randint(0, 16, keys.k_pool.shape[:3], device=DEVICE)
    numbers[..., 3], numbers[..., 11] = 0, 15
    keys.k_pool.zero_()
    keys.k_pool[..., 0] = numbers.to(torch.uint8)
    keys.q.fill_(1.0)
    keys.q[:, ::group] = 0
    lo, hi = tensor([0, page_size]), tensor([length, length - page_size])
    options = {"width": length, "scale": math.log(2), "k_scale": keys.k_scale}
    options["page_size"] = page_size
    arguments = (keys.q, keys.k_pool, keys.table, lo, hi)
    scratch = filled_scratch(2, group, 2, length, k)
    got, got_scores = triton_select.score_topk(KeyScan(*arguments, **options), k, scratch=scratch)
    _, want_scores = reference(KeyScan(*arguments, **options), k)
    close = {"rtol": 1e-5, "atol": 0}
    torch.testing.assert_close(got_scores.sort(-1).values, want_scores.sort(-1).values, **close)
    page = keys.table.long().gather(1, (got.flatten(1) // page_size).long()).view_as(got)
    heads = torch.arange(2, device=DEVICE)[None, :, None]
    of_got = numbers[page, heads, (got % page_size).long()]
    # Of equal scores the lowest positions count.
    worst = of_got.min(-1, keepdim=True).values
    for req, head in ((0, 0), (0, 1), (1, 0), (1, 1)):
        row, least = numbers[keys.table[req].long(), head].flatten(), int(worst[req, head])
        ties = [p for p in range(int(lo[req]), int(hi[req])) if int(row[p]) == least]
        chosen = sorted(p for p in got[req, head].tolist() if int(row[p]) == least)
        assert chosen == ties[: len(chosen)]


@pytest.mark.parametrize("group", [3, 7])
def test_equal_codes_do_not_fit_a_list(group: int) -> None:
    """All candidates reach the bound: scores take the room of their codes, and are searched."""
    keys = make_keys(
        "int4", num_reqs=1, heads=2, group=group, dim=64, page_size=16, num_pages=20, device=DEVICE
    )
    keys.k_scale.zero_()
    scratch = filled_scratch(1, group, 2, 320, 20)
    got, scores = triton_select.score_topk(
        scan_of(keys, tensor([2]), tensor([301]), width=320, scale=1.0), 20, scratch=scratch
    )
    assert got.sort(-1).values.tolist() == [[list(range(2, 22))] * 2]
    torch.testing.assert_close(scores, torch.full_like(scores, 1 / 299), rtol=1e-5, atol=0)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_chooses_neighbourhoods(pooling: str) -> None:
    """Of equal scores, which neighbours have, the lowest positions count."""
    torch.manual_seed(6)
    keys = make_keys(
        "bfloat16", num_reqs=3, heads=2, group=3, dim=64, page_size=16, num_pages=75, device=DEVICE
    )  # fmt: skip
    lo, hi = tensor([4, 0, 9]), tensor([391, 30, 400])
    active = torch.tensor([True, True, False], device=DEVICE)
    options = {"width": 400, "scale": 0.2, "pooling": pooling, "page_size": 16, "active": active}
    arguments = (keys.q, keys.k_pool, keys.table, lo, hi)
    scores = pool_positions(triton_score.score_keys(KeyScan(*arguments, **options)), 3, 2)
    scratch = filled_scratch(3, 3, 2, 400, 33)
    got, got_scores = triton_select.score_topk(
        KeyScan(*arguments, **options), 33, scratch=scratch, pooled_positions=(3, 2)
    )
    found = scores.gather(-1, got.clamp(min=0).long()).where(got >= 0, -torch.inf)
    assert torch.equal(got_scores, found)
    order = scores.sort(dim=-1, descending=True, stable=True)
    want = torch.where(order.values > -torch.inf, order.indices, -1)[..., :33]
    assert torch.equal(got.sort(-1).values, want.sort(-1).values.int())


def sampled(begin: int, num: int, size: int) -> list[int]:
    """Positions of the sample of `size` that a bound is derived from."""
    part = torch.arange(size)
    whole, rest = num // size, num % size
    left = part * whole + part * rest // size
    width = (part + 1) * whole + (part + 1) * rest // size - left
    noise = ((part * 40503) ^ ((part * 30011) >> 7)) & 0xFFFF
    return (begin + left + ((noise * width) >> 16)).tolist()


@pytest.mark.parametrize(
    ("kind", "best"),
    [("equal", []), ("two_values", [7, 250, 290]), ("all_seen", sampled(2, 299, 64)[5:62:3])],
)
def test_where_the_sample_is_of_no_use(kind: str, best: list[int]) -> None:
    """Of many equal scores, more than fit into a list, the lowest positions count.

    Of `all_seen` each high score is in the sample: fewer than are wanted reach the bound, and
    none has the score next to it. Only then a head is searched in memory, over its logits.
    """
    keys = make_keys(
        "float32", num_reqs=1, heads=2, group=2, dim=16, page_size=16, num_pages=20, device=DEVICE
    )
    keys.k_pool.zero_()
    if best:
        keys.q.fill_(1.0)
        at = torch.tensor(best, device=DEVICE)
        keys.k_pool[keys.table[0].long()[at // 16] * 16 + at % 16] = 0.5
    assert len(best) < 20
    scratch = filled_scratch(1, 2, 2, 320, 20)
    got, scores = triton_select.score_topk(
        scan_of(keys, tensor([2]), tensor([301]), width=320, scale=1.0), 20, scratch=scratch
    )
    want = sorted([*best, *[p for p in range(2, 40) if p not in best][: 20 - len(best)]])
    assert got.sort(-1).values.tolist() == [[want, want]]
    assert bool(scores.isfinite().all())
    high = [score for score in scores[0, 0].tolist() if score > min(scores[0, 0].tolist())]
    assert len(high) == len(best)
    relative = scratch.score.logits[0, :, 2:301]
    assert bool((relative <= 0).all()) == (kind != "all_seen")


def test_more_than_fit_and_fewer_than_wanted_reach_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A list that is shorter than k is none to add to: the head is searched in memory."""
    monkeypatch.setattr(triton_topk, "MAX_CAPACITY", 64)
    keys = make_keys(
        "float32", num_reqs=1, heads=2, group=2, dim=16, page_size=16, num_pages=20, device=DEVICE
    )
    keys.k_pool.zero_()
    keys.q.fill_(1.0)
    best = list(range(20, 100))
    at = torch.tensor(best, device=DEVICE)
    keys.k_pool[keys.table[0].long()[at // 16] * 16 + at % 16] = 50.0
    got, _ = triton_select.score_topk(
        scan_of(keys, tensor([2]), tensor([301]), width=320, scale=1.0),
        100,
        scratch=filled_scratch(1, 2, 2, 320, 100),
    )
    for row in got[0].tolist():
        assert len(set(row)) == 100
        assert set(best) <= set(row) <= set(range(2, 301))


def test_fewer_codes_than_wanted_are_not_zero() -> None:
    """Beside the best of a tile its other codes are zero; the lowest positions of other tiles."""
    keys = make_keys(
        "int4", num_reqs=1, heads=2, group=4, dim=64, page_size=16, num_pages=20, device=DEVICE
    )
    keys.k_scale.zero_()
    keys.k_scale[:, :, 0, 0] = 2
    keys.k_pool.zero_()
    best = [150, 290]
    at = torch.tensor(best, device=DEVICE)
    keys.k_pool[keys.table[0].long()[at // 16], :, at % 16, 0] = 15
    keys.q.fill_(1.0)
    arguments = (keys.q, keys.k_pool, keys.table, tensor([2]), tensor([301]))
    options = {"width": 320, "scale": math.log(2), "k_scale": keys.k_scale, "page_size": 16}
    got, scores = triton_select.score_topk(
        KeyScan(*arguments, **options), 20, scratch=filled_scratch(1, 4, 2, 320, 20)
    )
    assert got.sort(-1).values.tolist() == [[sorted([*range(2, 20), *best])] * 2]
    want = reference(KeyScan(*arguments, **options), 20)[1]
    torch.testing.assert_close(scores.sort(-1).values, want.sort(-1).values, rtol=1e-5, atol=0)


def test_refuses_lists_for_a_smaller_k() -> None:
    keys = make_keys(
        "float32", num_reqs=1, heads=1, group=1, dim=16, page_size=16, num_pages=4, device=DEVICE
    )
    with pytest.raises(ValueError, match="make_select_scratch"):
        triton_select.score_topk(
            scan_of(keys, tensor([0]), tensor([9]), width=9, scale=1.0),
            300,
            scratch=filled_scratch(1, 1, 1, 64, 5),
        )


def test_scratch_fits_what_is_asked_for() -> None:
    scratch = make_select_scratch(3, 8, 2, 500, 40, torch.device(DEVICE))
    assert scratch.head_lse.shape == (3, 2, 4)
    assert scratch.lists.shape[0] == 6
