# SPDX-License-Identifier: Apache-2.0
"""`topk_positions` against sorting in Python."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandemkv.kernels.topk import best_scored, topk_positions

SCORES = st.sampled_from([-math.inf, math.nan, -2.5, 0.0, 1.0, 1.5, 3e38, math.inf])


@given(st.lists(SCORES, min_size=0, max_size=12), st.integers(0, 14))
def test_scores_of_the_positions_are_the_best(scores: list[float], k: int) -> None:
    scores = torch.tensor(scores).tolist()  # as float32 has them
    result = topk_positions(torch.tensor(scores).reshape(1, 1, -1), k)
    assert result.dtype == torch.int32
    assert result.shape == (1, 1, k)
    positions = result[0, 0].tolist()
    best = sorted((s for s in scores if s > -math.inf), reverse=True)[:k]
    found, padding = positions[: len(best)], positions[len(best) :]
    assert [scores[p] for p in found] == best
    assert len(set(found)) == len(found)
    assert padding == [-1] * (k - len(best))
    again, found_scores = best_scored(torch.tensor(scores).reshape(1, 1, -1), k)
    assert torch.equal(again, result)
    assert found_scores[0, 0].tolist() == best + [-math.inf] * len(padding)


def test_heads_are_independent_and_ties_deterministic() -> None:
    torch.manual_seed(0)
    scores = torch.randn(3, 4, 1001).round()  # many ties
    result = topk_positions(scores, 257)
    assert torch.equal(result, topk_positions(scores.clone(), 257))
    for req in range(3):
        for head in range(4):
            alone = topk_positions(scores[req : req + 1, head : head + 1], 257)
            assert torch.equal(alone[0, 0], result[req, head])


def test_of_equal_scores_the_lowest_positions() -> None:
    scores = torch.tensor([0.0, 2.0, 1.0, -0.0, 2.0, 1.0, 0.0, 1.0]).view(1, 1, -1)
    for k, want in ((1, [1]), (3, [1, 4, 2]), (6, [1, 4, 2, 5, 7, 0]), (7, [1, 4, 2, 5, 7, 0, 3])):
        assert topk_positions(scores, k)[0, 0].tolist() == want


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="k=-1"):
        topk_positions(torch.zeros(1, 1, 1), -1)
    with pytest.raises(ValueError, match=r"scores\.dtype"):
        topk_positions(torch.zeros(1, 1, 1, dtype=torch.bfloat16), 1)
    with pytest.raises(ValueError, match=r"scores\.shape"):
        topk_positions(torch.zeros(1, 1), 1)
