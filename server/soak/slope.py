# SPDX-License-Identifier: Apache-2.0
"""Whether a series grows with time, and how well that can be told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_RESAMPLES = 1000
_BLOCKS = 24
_LEAST = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """A straight line through a series, in units of the series."""

    samples: int
    """Length of the series."""
    median: float
    """Of the series."""
    per_hour: float
    """Growth."""
    low: float
    high: float
    """95 % interval of `per_hour`."""
    change: float
    """Growth over the whole series, as a share of the median."""

    @property
    def least_change(self) -> float:
        """`change` at the lower end of the interval."""
        return self.change * self.low / self.per_hour if self.per_hour else 0.0

    @property
    def is_within_noise(self) -> bool:
        """Whether the series may well not grow."""
        return self.low <= 0.0


def slope_of(
    times: Sequence[float],
    values: Sequence[float],
    *,
    beside: Sequence[float] | None = None,
    seed: int = 0,
) -> Slope | None:
    """Fit a line by least squares; its interval is of a bootstrap over blocks of time.

    Neighbours in time are alike, so single values would make the interval too narrow. The series is
    in the order of time, in seconds. `beside` is something else that the values may depend on, such
    as what else the machine computes: the growth is that which this does not explain. `seed` is the
    bootstrap's. Returns None if there are fewer than 16 values, or all are of one moment.
    """
    t = np.asarray(times, dtype=np.float64) / 3600.0
    y = np.asarray(values, dtype=np.float64)
    if len(t) < _LEAST or np.ptp(t) == 0.0:
        return None
    columns = [np.ones_like(t), t - t[0]]
    if beside is not None and np.ptp(np.asarray(beside)) > 0.0:
        columns.append(np.asarray(beside, dtype=np.float64))
    x = np.stack(columns, axis=1)
    low, high = np.percentile(_resampled(x, y, np.random.default_rng(seed)), [2.5, 97.5])
    per_hour, median = _growth(x, y), float(np.median(y))
    return Slope(
        samples=len(t),
        median=median,
        per_hour=per_hour,
        low=float(low),
        high=float(high),
        change=per_hour * float(np.ptp(t)) / median if median else 0.0,
    )


def _resampled(
    x: npt.NDArray[np.float64], y: npt.NDArray[np.float64], rng: np.random.Generator
) -> list[float]:
    """Return the growth of samples that are drawn from blocks of time."""
    blocks = np.array_split(np.arange(len(y)), min(_BLOCKS, len(y) // 2))
    found = []
    for _ in range(_RESAMPLES):
        drawn = rng.integers(len(blocks), size=len(blocks))
        chosen = np.concatenate([blocks[each] for each in drawn])
        found.append(_growth(x[chosen], y[chosen]))
    return found


def _growth(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> float:
    return float(np.linalg.lstsq(x, y, rcond=None)[0][1])
