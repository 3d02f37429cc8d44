# SPDX-License-Identifier: Apache-2.0
"""Median and percentiles of repeated measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from .provenance import BenchError


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median, 10th and 90th percentile; `n` samples where they are known.

    The unit is the caller's.
    """

    median: float
    p10: float
    p90: float
    n: int | None = None

    @classmethod
    def of(cls, samples: Sequence[float]) -> Self:
        """Summarise `samples`; raises `BenchError` if there is none."""
        if not samples:
            raise BenchError("no sample was measured; raise the number of repetitions")
        low, middle, high = np.percentile(samples, (10, 50, 90)).tolist()
        return cls(median=middle, p10=low, p90=high, n=len(samples))
