# SPDX-License-Identifier: Apache-2.0
"""Loss by quarters, on series whose quarters are known."""

from __future__ import annotations

import math

import pytest

from tandemkv.server.evaluation.quality.results import Answer
from tandemkv.server.evaluation.quality.summary import by_quarter


def answer(levels: list[float], best: list[int] | None = None) -> Answer:
    return Answer(name="0", nll=[level for level in levels for _ in range(32)], best=best)


def test_each_quarter_is_compared_with_dense() -> None:
    dense = answer([1.0, 1.0, 1.0, 1.0], [7] * 128)
    ours = answer([1.0, 1.01, 1.02, 1.04], [7] * 64 + [8] * 32 + [7] * 32)
    found = by_quarter([ours], [(ours, dense)])
    for i, level in enumerate((1.0, 1.01, 1.02, 1.04), 1):
        assert found[f"perplexity_{i}"] == pytest.approx(math.exp(level))
        change = 100 * math.expm1(level - 1.0)
        assert found[f"change_{i}"] == pytest.approx(change)
        assert found[f"change_{i}_low"] == pytest.approx(change)
    assert [found[f"agreement_{i}"] for i in (1, 2, 3, 4)] == [1.0, 1.0, 0.0, 1.0]
    assert found["growth"] == pytest.approx(100 * math.expm1(0.04))


def test_quarters_of_unequal_length_and_no_reference() -> None:
    odd = Answer(name="0", nll=[1.0] * 30 + [2.0] * 13)
    found = by_quarter([odd], [])
    assert set(found) == {f"perplexity_{i}" for i in (1, 2, 3, 4)}
    assert found["perplexity_1"] == pytest.approx(math.e)
    assert by_quarter([odd], [(odd, odd)])["growth"] == 0.0
