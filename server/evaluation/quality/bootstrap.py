# SPDX-License-Identifier: Apache-2.0
"""Intervals: percentile bootstrap (Efron & Tibshirani, 1993), and those of right and wrong answers.

A bootstrap of answers that are all right has no width. Answers that are right or wrong get the
intervals of proportions instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

DRAWS = 4000
BLOCK_TOKENS = 16
LEVEL = 0.95
_Z = NormalDist().inv_cdf((1 + LEVEL) / 2)


class Interval(NamedTuple):
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float

    def signed(self, digits: int = 2, unit: str = "") -> str:
        """Return a difference as text, e.g. ``+1.20 % (+0.90 to +1.50)`` for the unit `` %``."""
        low, high = f"{self.low:+.{digits}f}", f"{self.high:+.{digits}f}"
        return f"{self.mean:+.{digits}f}{unit} ({low} to {high})"


def mean_interval(values: ArrayLike) -> Interval:
    """Return the mean of independent values ``[N]``, N > 0, e.g. of samples.

    With one value the interval is that value: it says nothing.
    """
    array = _vector(values)
    chosen = np.random.default_rng(0).integers(0, array.size, size=(DRAWS, array.size))
    return _interval(float(array.mean()), array[chosen].mean(axis=1))


def score_interval(scores: ArrayLike) -> Interval:
    """Return the mean of scores ``[N]``, N > 0.

    The interval is Wilson's (1927) if all are 0 or 1, else the bootstrap's.
    """
    array = np.asarray(scores, dtype=np.float64)
    if array.size == 0 or not _are_binary(array):
        return mean_interval(array)
    count, mean = array.size, float(array.mean())
    middle = (mean + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    half = _Z * np.sqrt(mean * (1 - mean) / count + _Z**2 / (4 * count**2)) / (1 + _Z**2 / count)
    return Interval(mean, max(0.0, float(middle - half)), min(1.0, float(middle + half)))


def paired_interval(scores: ArrayLike, reference: ArrayLike) -> Interval:
    """Return the mean of `scores` less that of `reference`, ``[N]`` each, N > 0.

    If all are 0 or 1, the interval is that of Agresti & Min (2005), which adds half a sample to
    each of the four outcomes of a pair; else the bootstrap's of the differences.
    """
    ours, theirs = np.asarray(scores, np.float64), np.asarray(reference, np.float64)
    gaps = ours - theirs
    if gaps.size == 0 or not (_are_binary(ours) and _are_binary(theirs)):
        return mean_interval(gaps)
    gained, lost = float((gaps > 0).sum()) + 0.5, float((gaps < 0).sum()) + 0.5
    count = gaps.size + 2
    middle = (gained - lost) / count
    half = _Z * np.sqrt(gained + lost - (gained - lost) ** 2 / count) / count
    return Interval(
        float(gaps.mean()), max(-1.0, float(middle - half)), min(1.0, float(middle + half))
    )


def _vector(values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"values of shape {array.shape}: a non-empty vector is required")
    return array


def _are_binary(values: NDArray[np.float64]) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())


def block_interval(series: Sequence[ArrayLike], *, block: int = BLOCK_TOKENS) -> Interval:
    """Return the mean over series of their means, where neighbours of a series depend on another.

    Each series ``[T_i]``, T_i > 0, e.g. the log-likelihoods of one text's tokens, is resampled in
    blocks of `block` neighbours and stays in every draw: the interval is for other continuations of
    these texts, not for other texts. Its last block may be shorter and counts by its length.
    """
    if not series:
        raise ValueError("no series: at least one is required")
    generator = np.random.default_rng(0)
    total: NDArray[np.float64] = np.zeros(DRAWS)
    means = []
    for values in series:
        array = _vector(values)
        starts = np.arange(0, array.size, block)
        sums = np.add.reduceat(array, starts)
        sizes = np.diff(np.append(starts, array.size))
        chosen = generator.integers(0, starts.size, size=(DRAWS, starts.size))
        total += sums[chosen].sum(axis=1) / sizes[chosen].sum(axis=1)
        means.append(float(array.mean()))
    return _interval(float(np.mean(means)), total / len(series))


def _interval(mean: float, draws: NDArray[np.float64]) -> Interval:
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(mean, float(low), float(high))
