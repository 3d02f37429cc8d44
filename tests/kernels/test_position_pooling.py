# SPDX-License-Identifier: Apache-2.0
"""`pool_positions` against Python."""

import math

import in_python
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandemkv.kernels.position_pooling import MAX_REACH, pool_positions

SCORES = st.sampled_from([-math.inf, math.nan, -2.5, -0.0, 0.5, 3e38, math.inf])
REACH = st.sampled_from([0, 1, 2, 5, MAX_REACH])


@given(st.lists(SCORES, max_size=12), REACH, REACH)
def test_each_candidate_has_the_best_of_its_neighbourhood(
    scores: list[float], before: int, after: int
) -> None:
    own = torch.tensor([scores, scores[::-1]], dtype=torch.float32).view(1, 2, -1)
    pooled = pool_positions(own, before, after)
    assert pooled.shape == own.shape
    if not (before or after):
        assert pooled is own
        return
    for row, got in zip(own[0].tolist(), pooled[0].tolist(), strict=True):
        assert got == in_python.pooled(row, before, after)


def test_bad_arguments() -> None:
    scores = torch.zeros(1, 2, 8)
    for reach in (-1, MAX_REACH + 1):
        with pytest.raises(ValueError, match=f"before={reach}"):
            pool_positions(scores, reach, 0)
        with pytest.raises(ValueError, match=f"after={reach}"):
            pool_positions(scores, 0, reach)
    with pytest.raises(ValueError, match=r"scores\.dtype"):
        pool_positions(scores.double(), 1, 0)
    with pytest.raises(ValueError, match=r"scores\.stride\(2\)"):
        pool_positions(torch.zeros(1, 8, 2).transpose(1, 2), 1, 0)
