# SPDX-License-Identifier: Apache-2.0
"""Scores of pages in Triton against float64; run by `test_triton_ops` in a process of its own."""

import math

import in_float64
import pytest
import torch
from plain_torch import in_plain_torch
from score_inputs import EXACT_LOGITS, ON_GPU
from tolerances import assert_close

from tandemkv.kernels.score import POOLINGS
from tandemkv.kernels.topk import topk_positions
from tandemkv.kernels.triton_ops import page_bounds as triton_page_bounds

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
reference = in_plain_torch("page_bounds")
LO = [4, 0, 17, 9, 250, 31]
HI = [331, 64, 17, 3, 251, 370]  # two without candidates, one with one
ROWS = [3, 1, 0, 0, 2, 6]


def tensor(values: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def make_bounds(num_pages: int, heads: int, dim: int, size: int) -> torch.Tensor:
    """Bounds of seven rows; what belongs to no candidate is no number."""
    bounds = torch.randn(2, 7, num_pages, heads, dim).sort(0).values
    is_used = torch.zeros(7, num_pages, dtype=torch.bool)
    for row, lo, hi in zip(ROWS, LO, HI, strict=True):
        if lo < hi:
            is_used[row, lo // size : (hi - 1) // size + 1] = True
    bounds[:, ~is_used] = math.nan
    return bounds


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 16])
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (3, 80), (4, 128), (12, 16)])
def test_score_pages(dtype: torch.dtype, size: int, group: int, dim: int) -> None:
    torch.manual_seed(group * dim + size)
    index = torch.int32 if dtype == torch.float16 else torch.int64
    heads, num_pages = 2, -(-370 // size)
    # Heads of a wider tensor, and more pages than are asked for.
    wide = make_bounds(num_pages + 2, heads + 1, dim, size).to(DEVICE, dtype)
    bounds = wide[:, :, :, 1:]
    q = torch.randn(6, dim, heads * group, device=DEVICE).to(dtype).transpose(1, 2)
    rows, lo, hi = (tensor(values, index) for values in (ROWS, LO, HI))
    for pooling in POOLINGS:
        options = {"num_pages": num_pages, "page_tokens": size, "scale": 0.2, "pooling": pooling}
        got = triton_page_bounds.score_pages(q, bounds, rows, lo, hi, **options)
        tolerance = ON_GPU if pooling == "softmax_mean" else EXACT_LOGITS
        for i, (row, first, last) in enumerate(zip(ROWS, LO, HI, strict=True)):
            want = torch.full((heads, num_pages), -math.inf, dtype=torch.float64, device=DEVICE)
            largest = torch.ones((), device=DEVICE)
            if first < last:
                used = slice(first // size, (last - 1) // size + 1)
                want[:, used] = in_float64.page_scores(q[i], bounds[:, row, used], pooling, 0.2)
                largest = in_float64.page_magnitude(q[i], bounds[:, row, used], pooling, 0.2)
            assert_close(got[i] / largest, want / largest, tolerance)


def test_the_choice_is_that_of_plain_torch() -> None:
    """Of more blocks than the second kernel adds up at a time; queries are rounded to bounds."""
    torch.manual_seed(5)
    size, num_pages, heads = 2, 9000, 1
    bounds = torch.randn(2, 3, num_pages, heads, 16).sort(0).values.half().to(DEVICE)
    q = torch.randn(2, 2, 16, device=DEVICE).half()
    rows, lo, hi = (tensor(x, torch.int64) for x in ([1, 2], [5, 0], [17999, 40]))
    options = {"num_pages": num_pages, "page_tokens": size, "scale": 0.3}
    options["pooling"] = "softmax_mean"
    almost = q.float() * (1 + 1e-5)
    got = triton_page_bounds.score_pages(almost, bounds, rows, lo, hi, **options)
    want = reference.score_pages(q, bounds, rows, lo, hi, **options)
    assert torch.equal(got.isneginf(), want.isneginf())
    assert torch.equal(topk_positions(got, 9).cpu(), topk_positions(want, 9).cpu())
    largest = want.amax(-1, keepdim=True)
    assert_close(got / largest, want / largest, ON_GPU)


def test_what_is_no_number_has_no_score() -> None:
    bounds, q = torch.ones(2, 1, 4, 1, 16, device=DEVICE), torch.ones(1, 2, 16, device=DEVICE)
    q[0, 1, 3] = math.nan
    one = tensor([0], torch.int64)
    for pooling in ("softmax_mean", "mean_logit"):
        scores = triton_page_bounds.score_pages(
            q, bounds, one, one, one + 5, num_pages=4, page_tokens=2, scale=1.0, pooling=pooling
        )
        assert scores[0, 0, :3].isnan().all()
        assert (topk_positions(scores, 2) == -1).all()
