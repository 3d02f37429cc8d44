# SPDX-License-Identifier: Apache-2.0
"""`score_keys` and `score_window` against float64 loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from score_inputs import EXACT_LOGITS, KINDS, expected, magnitude, make_keys, scan_of
from tolerances import TOLERANCES, assert_close

from tandemkv.kernels.quantize import quantize_int8
from tandemkv.kernels.score import (
    POOLINGS,
    KeyScan,
    make_score_scratch,
    score_keys,
    score_window,
)

NUM_SLOTS, NUM_KV_HEADS, HEAD_DIM = 1500, 3, 20
LO = [4, 0, 17, 9]
HI = [701, 1, 17, 3]  # two requests without candidates
SCALE = HEAD_DIM**-0.5


def make_slots(kind: str, num_reqs: int, max_len: int) -> torch.Tensor:
    if kind == "contiguous":
        return torch.stack([torch.arange(max_len) + 7 * i for i in range(num_reqs)])
    if kind == "runs":  # two runs in descending order
        row = torch.cat([torch.arange(900, 900 + max_len // 2), torch.arange(max_len // 2)])
        return row.repeat(num_reqs, 1)
    return torch.stack([torch.randperm(NUM_SLOTS)[:max_len] for _ in range(num_reqs)])


def expected_scores(
    q: torch.Tensor, keys: torch.Tensor, lo: int, hi: int, width: int, pooling: str
) -> torch.Tensor:
    """Score one request in float64: q [Hq, D], keys [width, H, D]."""
    group = q.shape[0] // keys.shape[1]
    scores = torch.full((keys.shape[1], width), float("-inf"), dtype=torch.float64)
    if lo >= hi:
        return scores
    for head in range(keys.shape[1]):
        queries = q[head * group : (head + 1) * group].double()
        logits = queries @ keys[lo:hi, head].double().T * SCALE
        if pooling == "softmax_mean":
            scores[head, lo:hi] = logits.softmax(-1).mean(0)
        else:
            scores[head, lo:hi] = logits.amax(0) if pooling == "max_logit" else logits.mean(0)
    return scores


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("kind", ["contiguous", "runs", "scattered"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_score_keys_equals_float64(pooling: str, kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    k_pool = torch.randn(NUM_SLOTS, NUM_KV_HEADS, HEAD_DIM).to(dtype)
    q = torch.randn(len(LO), 2 * NUM_KV_HEADS, HEAD_DIM).to(dtype)
    slots = make_slots(kind, len(LO), 710)
    scan = KeyScan(
        q, k_pool, slots.int(), torch.tensor(LO), torch.tensor(HI), width=705, scale=SCALE,
        pooling=pooling,
    )  # fmt: skip
    scores = score_keys(scan)
    assert scores.shape == (len(LO), NUM_KV_HEADS, 705)
    for req, (lo, hi) in enumerate(zip(LO, HI, strict=True)):
        want = expected_scores(q[req], k_pool[slots[req]], lo, hi, 705, pooling)
        # The inputs are exact in float64, so even bf16 keys must be scored in float32.
        assert_close(scores[req], want, TOLERANCES[torch.float32])


def test_int8_keys_equal_their_dequantized_values() -> None:
    torch.manual_seed(1)
    quantized, k_scale = quantize_int8(torch.randn(NUM_SLOTS, NUM_KV_HEADS, HEAD_DIM) * 3)
    q = torch.randn(2, NUM_KV_HEADS, HEAD_DIM)
    for kind in ("contiguous", "scattered"):
        slots = make_slots(kind, 2, 300)
        lo, hi = torch.tensor([1, 5]), torch.tensor([300, 250])
        scan = KeyScan(
            q, quantized, slots, lo, hi, width=300, scale=SCALE, pooling="max_logit",
            k_scale=k_scale,
        )  # fmt: skip
        scores = score_keys(scan)
        keys = quantized.double() * k_scale[..., None].double()
        for req in range(2):
            want = expected_scores(
                q[req], keys[slots[req]], int(lo[req]), int(hi[req]), 300, "max_logit"
            )
            assert_close(scores[req], want)


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(KINDS), pooling=st.sampled_from(POOLINGS),
    page_size=st.sampled_from([1, 3, 16, 64]), group=st.integers(1, 4),
    ranges=st.lists(st.tuples(st.integers(0, 127), st.integers(0, 128)), min_size=1, max_size=3),
    is_given=st.booleans(),
)  # fmt: skip
def test_paged_keys_of_every_kind_equal_float64(
    kind: str, pooling: str, page_size: int, group: int, ranges: list[tuple[int, int]],
    is_given: bool,
) -> None:  # fmt: skip
    page_size = max(16, page_size) if kind == "int4" else page_size
    num_reqs = len(ranges)
    keys = make_keys(
        kind, num_reqs=num_reqs, heads=2, group=group, dim=10, page_size=page_size,
        num_pages=num_reqs * -(-128 // page_size),
    )  # fmt: skip
    lo, hi = torch.tensor(ranges).unbind(1)
    out = torch.full((num_reqs, 2, 140), 7.0) if is_given else None
    scores = score_keys(scan_of(keys, lo, hi, width=128, scale=0.3, pooling=pooling), out=out)
    assert (scores is out) == is_given
    for req, (first, last) in enumerate(ranges):
        if not is_given:
            assert (scores[req, :, :first] == float("-inf")).all()
            assert (scores[req, :, max(first, last) :] == float("-inf")).all()
        if first < last:
            want = expected(keys, req, first, last, pooling, 0.3)
            largest = magnitude(keys, req, first, last, pooling, 0.3)
            assert_close(scores[req, :, first:last] / largest, want / largest, EXACT_LOGITS)


@pytest.mark.parametrize("kind", ["float32", "int8", "int4"])
def test_score_window_reads_pages(kind: str) -> None:
    keys = make_keys(kind, num_reqs=1, heads=3, group=2, dim=8, page_size=16, num_pages=9)
    q_window, positions = torch.randn(5, 6, 8), torch.tensor([3, 60, 100, 130, 143])
    scores = score_window(
        q_window, keys.k_pool, keys.table[0], 2, 140, positions, scale=0.4, k_scale=keys.k_scale,
        page_size=16,
    )  # fmt: skip
    want = torch.zeros(3, 138, dtype=torch.float64)
    for query, position in zip(q_window, positions.tolist(), strict=True):
        rows = keys.row(0, 2, min(140, position + 1))
        part = expected_scores(query / SCALE * 0.4, rows, 0, len(rows), len(rows), "softmax_mean")
        want[:, : len(rows)] += part / 5
    assert_close(scores[:, 2:], want, EXACT_LOGITS)


def test_huge_logits_stay_finite() -> None:
    k_pool = torch.zeros(4, 1, 2)
    k_pool[2] = 1e18
    q = torch.full((1, 2, 2), 1e18)
    ends = torch.tensor([1]), torch.tensor([4])
    scores = score_keys(KeyScan(q, k_pool, torch.arange(4)[None], *ends, width=4, scale=1.0))
    assert scores.tolist() == [[[float("-inf"), 0.0, 1.0, 0.0]]]


@pytest.mark.parametrize(("lo", "hi"), [(3, 400), (0, 1), (260, 270), (5, 5), (9, 4)])
@pytest.mark.parametrize("kind", ["contiguous", "scattered"])
def test_score_window_equals_causal_float64(
    lo: int, hi: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(2)
    k_pool = torch.randn(NUM_SLOTS, NUM_KV_HEADS, HEAD_DIM)
    q = torch.randn(7, 2 * NUM_KV_HEADS, HEAD_DIM)
    slots = make_slots(kind, 1, 420)[0]
    positions = torch.tensor([0, 2, 3, 262, 330, 399, 419])
    want = torch.full((NUM_KV_HEADS, hi), float("-inf"), dtype=torch.float64)
    if lo < hi:
        want[:, lo:] = 0
        for query, position in zip(q, positions.tolist(), strict=True):
            end = min(hi, position + 1)
            if end > lo:
                want[:, lo:end] += expected_scores(
                    query, k_pool[slots], lo, end, end, "softmax_mean"
                )[:, lo:]
        want[:, lo:] /= 7
    scores = score_window(q, k_pool, slots, lo, hi, positions, scale=SCALE)
    assert_close(scores, want)
    monkeypatch.setattr("tandemkv.kernels.score._MAX_WINDOW_LOGITS", 5000)
    assert_close(score_window(q, k_pool, slots, lo, hi, positions, scale=SCALE), want)


def test_errors_name_the_argument() -> None:
    k_pool, q = torch.zeros(8, 2, 4), torch.zeros(1, 4, 4)
    slots, lo, hi = torch.arange(6)[None], torch.tensor([0]), torch.tensor([6])
    with pytest.raises(ValueError, match=r"width=7: must be >= 0 and <= 6"):
        score_keys(KeyScan(q, k_pool, slots, lo, hi, width=7, scale=1.0))
    with pytest.raises(ValueError, match=r"\[lo, hi\) of request 0"):
        score_keys(KeyScan(q, k_pool, slots, lo, hi, width=5, scale=1.0))
    with pytest.raises(ValueError, match="slots="):
        score_keys(KeyScan(q, k_pool, slots + 3, lo, hi, width=6, scale=1.0))
    with pytest.raises(ValueError, match="slots="):
        score_keys(KeyScan(q, k_pool, slots - 1, lo, hi, width=6, scale=1.0))
    with pytest.raises(ValueError, match="pooling='mean'"):
        score_keys(KeyScan(q, k_pool, slots, lo, hi, width=6, scale=1.0, pooling="mean"))
    with pytest.raises(ValueError, match="k_scale="):
        score_keys(KeyScan(q, k_pool.to(torch.int8), slots, lo, hi, width=6, scale=1.0))
    with pytest.raises(ValueError, match=r"num_slots=8: must be a multiple of page_size=3"):
        score_keys(KeyScan(q, k_pool, slots, lo, hi, width=6, scale=1.0, page_size=3))
    with pytest.raises(ValueError, match=r"out=\(1, 2, 5\)"):
        score_keys(KeyScan(q, k_pool, slots, lo, hi, width=6, scale=1.0), out=torch.zeros(1, 2, 5))
    scratch = make_score_scratch(1, 8, 2, 6, q.device)
    with pytest.raises(ValueError, match="scratch="):
        score_keys(KeyScan(q, k_pool, slots, lo, hi, width=6, scale=1.0), scratch=scratch)
    codes, scales = torch.zeros(2, 2, 8, 2).byte(), torch.zeros(2, 2, 2, 4).half()
    with pytest.raises(ValueError, match="page_size=8: must be the page size of the int4"):
        score_keys(
            KeyScan(q, codes, slots, lo, hi, width=6, scale=1.0, k_scale=scales, page_size=8)
        )
    codes = torch.zeros(2, 2, 16, 2).byte()
    with pytest.raises(ValueError, match="k_scale=None"):
        score_keys(KeyScan(q, codes, slots, lo, hi, width=6, scale=1.0, page_size=16))
    with pytest.raises(ValueError, match="num_qo_heads=3"):
        score_keys(KeyScan(q[:, :3], k_pool, slots, lo, hi, width=6, scale=1.0))
    with pytest.raises(ValueError, match=r"q\.dtype"):
        score_keys(KeyScan(q.double(), k_pool, slots, lo, hi, width=6, scale=1.0))
