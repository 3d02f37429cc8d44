# SPDX-License-Identifier: Apache-2.0
"""Percentile bootstrap intervals (Efron & Tibshirani, *An Introduction to the Bootstrap*, 1993)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

DRAWS = 4000
BLOCK_TOKENS = 16
LEVEL = 0.95


class Interval(NamedTuple):
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


def mean_interval(values: ArrayLike, *, draws: int = DRAWS, seed: int = 0) -> Interval:
    """Return the mean of independent values, e.g. of samples.

    Parameters
    ----------
    values : array_like
        ``[N]``, N > 0. With one value the interval is that value: it says nothing.
    draws, seed : int
        Number of resamples, and the state they are drawn from.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"values of shape {array.shape}: a non-empty vector is required")
    chosen = np.random.default_rng(seed).integers(0, array.size, size=(draws, array.size))
    return _interval(float(array.mean()), array[chosen].mean(axis=1))


def block_interval(
    series: Sequence[ArrayLike], *, block: int = BLOCK_TOKENS, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """Return the mean over series of their means, where neighbours of a series depend on another.

    Each series is resampled in blocks of neighbours and stays in every draw: the interval is for
    other continuations of these texts, not for other texts.

    Parameters
    ----------
    series : sequence of array_like
        Each ``[T_i]``, T_i > 0, e.g. the log-likelihoods of one text's tokens.
    block : int
        Neighbours that stay together; the last block of a series may be shorter and counts by
        its length.
    draws, seed : int
        As in `mean_interval`.
    """
    if not series:
        raise ValueError("no series: at least one is required")
    generator = np.random.default_rng(seed)
    total: NDArray[np.float64] = np.zeros(draws)
    means = []
    for values in series:
        array = np.asarray(values, dtype=np.float64)
        if array.ndim != 1 or array.size == 0:
            raise ValueError(f"series of shape {array.shape}: a non-empty vector is required")
        starts = np.arange(0, array.size, block)
        sums = np.add.reduceat(array, starts)
        sizes = np.diff(np.append(starts, array.size))
        chosen = generator.integers(0, starts.size, size=(draws, starts.size))
        total += sums[chosen].sum(axis=1) / sizes[chosen].sum(axis=1)
        means.append(float(array.mean()))
    return _interval(float(np.mean(means)), total / len(series))


def _interval(mean: float, draws: NDArray[np.float64]) -> Interval:
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(mean, float(low), float(high))
