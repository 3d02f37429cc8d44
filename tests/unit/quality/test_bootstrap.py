# SPDX-License-Identifier: Apache-2.0
"""Intervals: against the normal approximation, against autocorrelation, and the same each time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tandemkv.server.evaluation.quality.bootstrap import (
    block_interval,
    mean_interval,
    paired_interval,
    score_interval,
)


def test_interval_of_independent_values_is_the_normal_one() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, size=400)
    found = mean_interval(values)
    half = 1.96 * values.std() / np.sqrt(400)
    assert found.mean == pytest.approx(values.mean(), rel=1e-12)
    assert found.high - found.mean == pytest.approx(half, rel=0.1)
    assert found.mean - found.low == pytest.approx(half, rel=0.1)


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(2)
    hits = 0
    for _ in range(200):
        found = mean_interval(generator.random(40))
        hits += found.low <= 0.5 <= found.high
    assert 0.88 <= hits / 200 <= 0.99


def test_blocks_widen_the_interval_of_dependent_neighbours() -> None:
    steps = np.repeat(np.random.default_rng(3).normal(size=25), 16)
    blocks, single = block_interval([steps], block=16), block_interval([steps], block=1)
    assert blocks.high - blocks.low > 3 * (single.high - single.low)


def test_series_count_alike_whatever_their_length() -> None:
    found = block_interval([np.zeros(160), np.ones(16)])
    assert (found.mean, found.low, found.high) == (0.5, 0.5, 0.5)


def test_a_short_last_block_counts_by_its_length() -> None:
    found = block_interval([np.arange(33.0)], block=16)
    assert found.mean == pytest.approx(16.0)
    assert 7.5 <= found.low <= found.high <= 32.0


def test_equal_values_have_no_spread_and_an_interval_is_the_same_each_time() -> None:
    assert mean_interval([0.25, 0.25]) == (0.25, 0.25, 0.25)
    values = np.random.default_rng(4).random(30)
    assert mean_interval(values) == mean_interval(values)


def test_nothing_is_refused() -> None:
    for call in (
        lambda: mean_interval([]),
        lambda: block_interval([]),
        lambda: block_interval([[1.0], []]),
    ):
        with pytest.raises(ValueError, match="required"):
            call()


def test_right_and_wrong_answers_have_wilson_s_interval() -> None:
    """10 of 10 and 8 of 10: the textbook's figures."""
    found = score_interval([1.0] * 10)
    assert (found.mean, found.high) == (1.0, pytest.approx(1.0))
    assert found.low == pytest.approx(0.7225, abs=1e-4)
    found = score_interval([1.0] * 8 + [0.0] * 2)
    assert (found.low, found.high) == (
        pytest.approx(0.4902, abs=1e-4),
        pytest.approx(0.9433, abs=1e-4),
    )
    assert score_interval([0.5, 1.0]) == mean_interval([0.5, 1.0])


def test_equal_answers_leave_a_difference_possible() -> None:
    """Of 200 pairs without a difference: less than one point."""
    ones = [1.0] * 200
    found = paired_interval(ones, ones)
    assert (found.mean, found.low, found.high) == (
        0.0,
        pytest.approx(-0.0097, abs=1e-4),
        -found.low,
    )
    lost = paired_interval([0.0] * 6 + ones[6:], ones)
    assert lost.mean == pytest.approx(-0.03)
    assert -0.06 < lost.low < -0.03 < lost.high < 0.0
    assert paired_interval([0.5] * 4, [1.0] * 4) == mean_interval([-0.5] * 4)


def test_the_paired_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(4)
    hits = 0
    for _ in range(400):
        dense = generator.random(100) < 0.9
        ours = np.where(generator.random(100) < 0.05, generator.random(100) < 0.5, dense)
        # In 5 % of the pairs the answer is drawn anew: right in half of them.
        found = paired_interval(ours.astype(float), dense.astype(float))
        hits += found.low <= 0.05 * (0.5 - 0.9) <= found.high
    assert 0.91 <= hits / 400 <= 0.995


@pytest.mark.parametrize("function", [score_interval, lambda x: paired_interval(x, x)])
def test_no_answers_are_an_error(function: Callable[[list[float]], object]) -> None:
    with pytest.raises(ValueError, match="non-empty"):
        function([])
