# SPDX-License-Identifier: Apache-2.0
"""Loss of long generation by quarters of the decoded tokens, to see whether it grows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .bootstrap import Interval, block_interval
from .results import Answer

QUARTERS = 4

_Series = list[NDArray[np.float64]]


def by_quarter(
    answers: Sequence[Answer], pairs: Sequence[tuple[Answer, Answer]]
) -> dict[str, float]:
    """Return figures of each quarter of the forced tokens: ``perplexity_1`` to ``perplexity_4``.

    Each of `answers` has `nll`; `pairs`, with dense's answers to the same samples, may be empty.
    With pairs also ``change_N`` with ``_low`` and ``_high`` (per cent against dense),
    ``agreement_N`` (share of tokens whose likeliest is dense's), and ``growth`` with ``_low`` and
    ``_high``: change of the last quarter less that of the first, in per cent of perplexity.
    """
    found = {
        f"perplexity_{i}": float(np.exp(block_interval(part).mean))
        for i, part in enumerate(_quarters([np.asarray(a.nll or []) for a in answers]), 1)
    }
    if not pairs:
        return found
    gaps = _quarters([np.subtract(a.nll or [], b.nll or []) for a, b in pairs])
    for i, part in enumerate(gaps, 1):
        found |= _named(f"change_{i}", block_interval(part))
    size = min(len(values) for part in (gaps[0], gaps[-1]) for values in part)
    growth = [last[:size] - first[:size] for first, last in zip(gaps[0], gaps[-1], strict=True)]
    found |= _named("growth", block_interval(growth))
    same = [np.equal(a.best, b.best) for a, b in pairs if a.best and b.best]
    if same:
        agreement = _quarters([values.astype(np.float64) for values in same])
        found |= {
            f"agreement_{i}": float(np.mean(np.concatenate(part)))
            for i, part in enumerate(agreement, 1)
        }
    return found


def _quarters(series: Sequence[NDArray[np.float64]]) -> list[_Series]:
    parts = [np.array_split(values, QUARTERS) for values in series]
    return [[split[i] for split in parts] for i in range(QUARTERS)]


def _named(name: str, gap: Interval) -> dict[str, float]:
    percent = 100 * np.expm1(gap)
    return dict(zip((name, f"{name}_low", f"{name}_high"), percent.tolist(), strict=True))
