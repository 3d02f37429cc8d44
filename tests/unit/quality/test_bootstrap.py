# SPDX-License-Identifier: Apache-2.0
"""Intervals: against the normal approximation, against autocorrelation, and the same each time."""

from __future__ import annotations

import numpy as np
import pytest

from tandemkv.server.evaluation.quality.bootstrap import block_interval, mean_interval


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
        found = mean_interval(generator.random(40), draws=500)
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


def test_equal_values_have_no_spread_and_equal_seeds_give_equal_intervals() -> None:
    assert mean_interval([0.25, 0.25]) == (0.25, 0.25, 0.25)
    values = np.random.default_rng(4).random(30)
    assert mean_interval(values) == mean_interval(values)
    assert mean_interval(values, seed=1, draws=50) != mean_interval(values, seed=2, draws=50)


def test_nothing_is_refused() -> None:
    for call in (
        lambda: mean_interval([]),
        lambda: block_interval([]),
        lambda: block_interval([[1.0], []]),
    ):
        with pytest.raises(ValueError, match="required"):
            call()
