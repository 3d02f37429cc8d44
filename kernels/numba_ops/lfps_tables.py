# SPDX-License-Identifier: Apache-2.0
"""The score tables of LFPS: thresholds, candidates and updates without a pass over a table.

A table entry is ``unit * stored``: decay multiplies `unit` and nothing else. Sums of the first
four powers and the peak of each block of `BLOCK` entries are kept as entries change, so the
kurtosis costs nothing and blocks without a candidate are not looked at.

The vertical table (0) is indexed by candidate, ``x = position - lo``. The slash table (1) is
indexed by distance from the latest candidate, ``n - 1 - x``: as `n` grows by one each step, it
shifts by itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .compile import compiled

BLOCK = 64
_SMALLEST_UNIT = 1e-8


@compiled
def refresh(tables: Any, peaks: Any, sums: Any, unit: Any, head: Any, n: Any) -> None:
    """Apply the unit of `head` to its entries ``[0, n)``, and compute sums and peaks afresh."""
    for t in range(2):
        table, peak = tables[t, head], peaks[t, head]
        sums[t, head, :] = 0.0
        for block in range(peak.shape[0]):
            highest: Any = np.float32(-np.inf)
            for i in range(block * BLOCK, min(n, block * BLOCK + BLOCK)):
                value: Any = np.float32(table[i] * unit[head])
                table[i] = value
                highest = max(highest, value)
                power = 1.0
                for p in range(4):
                    power *= value
                    sums[t, head, p] += power
            # What becomes a candidate later starts at zero.
            if block * BLOCK + BLOCK > n:
                highest = max(highest, np.float32(0.0))
            peak[block] = highest
    unit[head] = 1.0


@compiled
def thresholds(sums: Any, n: Any, a: Any) -> Any:
    """Return mean and ``tau`` (Eq. 8) of stored entries with power sums `sums`, ``[4]``.

    The kurtosis has no unit, so `tau` is in the unit of the entries.
    """
    mean = sums[0] / n
    second = sums[1] - n * mean * mean
    fourth = sums[3] - 4.0 * mean * sums[2] + 6.0 * mean * mean * sums[1] - 3.0 * n * mean**4
    if second <= 0.0 or fourth <= 0.0:
        return mean, a * mean * n  # all entries equal: the least kurtosis there is, 1 / n
    return mean, a * mean * second * second / fourth


@compiled
def initial_candidates(
    tables: Any, peaks: Any, head: Any, n: Any, tau: Any, seen: Any, found: Any
) -> Any:
    """Write the candidates above either threshold (Eq. 7) to `found`, mark them in `seen`."""
    count = 0
    for t in range(2):
        table, peak = tables[t, head], peaks[t, head]
        threshold = np.float32(tau[t])
        for block in range((n + BLOCK - 1) // BLOCK):
            if peak[block] > threshold:
                start, end = block * BLOCK, min(n, block * BLOCK + BLOCK)
                highest = np.float32(0.0) if end < start + BLOCK else np.float32(-np.inf)
                for i in range(start, end):
                    value = table[i]
                    highest = max(highest, value)
                    if value > threshold:
                        x = i if t == 0 else n - 1 - i
                        if seen[x] == 0:
                            seen[x] = 1
                            found[count] = x
                            count += 1
                peak[block] = highest
    return count


@compiled
def expanded_candidates(
    tables: Any, head: Any, n: Any, mean: Any, seen: Any, found: Any, count: Any, out: Any
) -> Any:
    """Write the neighbours of `found` that are above a mean (Eq. 9) to `out`; clears `seen`."""
    vertical, slash = tables[0, head], tables[1, head]
    mean_vertical, mean_slash = np.float32(mean[0]), np.float32(mean[1])
    total = 0
    for i in range(count):
        for x in range(max(0, found[i] - 1), min(n, found[i] + 3)):
            if seen[x] < 2 and (vertical[x] > mean_vertical or slash[n - 1 - x] > mean_slash):
                seen[x] = 2
                out[total] = x
                total += 1
    for i in range(count):
        seen[found[i]] = 0
    for i in range(total):
        seen[out[i]] = 0
    return total


@compiled
def _add(table: Any, peak: Any, sums: Any, i: Any, change: Any) -> None:
    old = np.float64(table[i])
    table[i] = np.float32(old + change)
    new = np.float64(table[i])
    peak[i // BLOCK] = max(peak[i // BLOCK], table[i])
    old_power, new_power = 1.0, 1.0
    for p in range(4):
        old_power *= old
        new_power *= new
        sums[p] += new_power - old_power


@compiled
def update(
    tables: Any,
    peaks: Any,
    sums: Any,
    unit: Any,
    head: Any,
    n: Any,
    chosen: Any,
    weights: Any,
    count: Any,
    decay: Any,
) -> None:
    """Let the tables decay, and enter the weights of the chosen candidates (Eq. 10)."""
    unit[head] *= decay
    if unit[head] < _SMALLEST_UNIT:
        refresh(tables, peaks, sums, unit, head, n)
    half = 0.5 / count
    for i in range(count):
        change = (weights[i] - half) / unit[head]
        _add(tables[0, head], peaks[0, head], sums[0, head], chosen[i], change)
        _add(tables[1, head], peaks[1, head], sums[1, head], n - 1 - chosen[i], change)
