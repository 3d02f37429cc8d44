# SPDX-License-Identifier: Apache-2.0
"""`score_pages`: bounds of logits. `test_numerics` compares it with float64."""

import math

import in_float64
import pytest
import torch

from tandemkv.kernels.page_bounds import score_pages


@pytest.mark.parametrize("size", [1, 3, 16])
def test_every_bound_is_one_and_is_reached_in_pages_of_one(size: int) -> None:
    torch.manual_seed(size)
    keys, q = torch.randn(48, 2, 8), torch.randn(1, 6, 8)
    by_page = keys.view(-1, size, 2, 8)
    bounds = torch.stack([by_page.amin(1), by_page.amax(1)])[:, None]
    (found,) = score_pages(
        q, bounds, torch.tensor([0]), torch.tensor([0]), torch.tensor([48]),
        num_pages=len(by_page), page_tokens=size, scale=0.5, pooling="max_logit",
    )  # fmt: skip
    logits = in_float64.page_scores(q[0], torch.stack([keys, keys]), "max_logit", 0.5)
    largest = logits.view(2, -1, size).amax(-1)
    assert (found >= largest - 1e-5).all()
    if size == 1:
        torch.testing.assert_close(found.double(), largest, rtol=1e-5, atol=1e-5)


def test_pages_without_candidates_have_no_score() -> None:
    bounds, rows = torch.full((2, 3, 4, 1, 8), math.nan), torch.tensor([2, 1])
    bounds[:, 2, 1:3] = 1.0
    scores = score_pages(
        torch.ones(2, 1, 8), bounds, rows, torch.tensor([7, 6]), torch.tensor([9, 6]),
        num_pages=4, page_tokens=4, scale=1.0, pooling="mean_logit",
    )  # fmt: skip
    assert scores.tolist() == [[[-math.inf, 8.0, 8.0, -math.inf]], [[-math.inf] * 4]]


def test_bad_arguments() -> None:
    def call(**changes: object) -> torch.Tensor:
        one = torch.zeros(1, dtype=torch.int64)
        given = {
            "q": torch.zeros(1, 2, 8), "bounds": torch.zeros(2, 3, 4, 1, 8), "rows": one,
            "lo": one, "hi": one + 16, "num_pages": 4, "page_tokens": 4, "scale": 1.0,
        }  # fmt: skip
        return score_pages(**given | changes)

    assert call().shape == (1, 1, 4)
    assert call(num_pages=0, hi=torch.zeros(1).long()).shape == (1, 1, 0)
    for message, changes in (
        ("two, num_rows", {"bounds": torch.zeros(2, 3, 4, 8)}),
        (r"bounds\.shape\[0\]=3", {"bounds": torch.zeros(3, 3, 4, 1, 8)}),
        (r"bounds\.stride\(4\)", {"bounds": torch.zeros(2, 3, 4, 1, 16)[..., ::2]}),
        (r"bounds\.dtype", {"bounds": torch.zeros(2, 3, 4, 1, 8).to(torch.float8_e4m3fn)}),
        ("num_qo_heads=3", {"q": torch.zeros(1, 3, 8), "bounds": torch.zeros(2, 3, 4, 2, 8)}),
        ("num_pages=5", {"num_pages": 5}),
        ("page_tokens=0", {"page_tokens": 0}),
        ("pooling='max'", {"pooling": "max"}),
        (r"hi\.shape=\(2,\)", {"hi": torch.zeros(2).long()}),
        (r"\[lo, hi\) of request 0=\(0, 17\)", {"hi": torch.tensor([17])}),
    ):
        with pytest.raises(ValueError, match=message):
            call(**changes)
