# SPDX-License-Identifier: Apache-2.0
"""What a run of decode steps gives, whichever program ran them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from .report import BenchError


def percentile(samples: Sequence[float], fraction: float) -> float:
    """Return a percentile by linear interpolation, as ``numpy.percentile`` does.

    Raises
    ------
    BenchError
        If there is no sample.
    """
    if not samples:
        raise BenchError("no sample was measured; raise the number of repetitions")
    ordered = sorted(samples)
    position = fraction * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """A batch of requests of one context length."""

    batch: int
    context: int

    @property
    def label(self) -> str:
        """Return e.g. ``8x64k``; contexts that are no multiple of 1024 in full."""
        whole, rest = divmod(self.context, 1024)
        return f"{self.batch}x{self.context if rest else f'{whole}k'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median and percentiles, ms per step; `n` samples where they are known."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    n: int | None = None

    @classmethod
    def of_seconds(cls, samples: Sequence[float], *, median_s: float | None = None) -> Self:
        """Summarise `samples`; `median_s` replaces their median where it is known better."""
        middle = percentile(samples, 0.5) if median_s is None else median_s
        return cls(
            median_ms=middle * 1e3,
            p10_ms=percentile(samples, 0.1) * 1e3,
            p90_ms=percentile(samples, 0.9) * 1e3,
            n=len(samples),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Decode steps of one point.

    `waited` are steps each of which was waited for; `queued` steps that were queued one behind
    another, as SGLang's overlap scheduler runs them, where that was measured.
    """

    point: Point
    waited: Spread
    queued: Spread | None = None
    prefill_s: float | None = None
