# SPDX-License-Identifier: Apache-2.0
"""What operations on integers choose and write, in plain Python."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

Bounds = tuple[torch.Tensor | None, torch.Tensor | None]


def best_positions(scores: torch.Tensor, bounds: Bounds, k: int) -> torch.Tensor:
    """Choose by sorting: best first, of equal scores the lower position."""
    num_reqs, heads, width = scores.shape
    lo = [0] * num_reqs if bounds[0] is None else bounds[0].tolist()
    hi = [width] * num_reqs if bounds[1] is None else bounds[1].tolist()
    rows = []
    for req, row in enumerate(scores.double().tolist()):
        for values in row:
            places = range(max(lo[req], 0), min(hi[req], width))
            usable = [p for p in places if values[p] > -math.inf]
            best = sorted(usable, key=lambda p, values=values: (-values[p], p))[:k]  # type: ignore[misc]
            rows.append(best + [-1] * (k - len(best)))
    return torch.tensor(rows, dtype=torch.int32).view(num_reqs, heads, k).to(scores.device)


def pooled(row: list[float], before: int, after: int) -> list[float]:
    """Give each candidate the best score of its neighbourhood."""
    found = []
    for place, score in enumerate(row):
        near = row[max(0, place - before) : place + after + 1]
        best = max((s for s in near if s > -math.inf), default=-math.inf)
        found.append(best if score > -math.inf else -math.inf)
    return found


def grown(num_samples: int, upto: int) -> list[list[int]]:
    """Give samples away one candidate after the other; return them after each."""
    slots, states = list(range(num_samples)), []
    for offset in range(upto):
        stride = 1
        while num_samples * stride * 2 <= offset:
            stride *= 2
        if offset >= num_samples and offset % (2 * stride) == 0:
            slots[slots.index(offset - (num_samples - 1) * stride)] = offset
        states.append([x if x <= offset else -1 for x in slots])
    return states


@dataclass(frozen=True)
class Limits:
    """Host arguments of one call of `mirror_diff`."""

    step: int
    num_protected: int
    fetch_cap: int


def mirrored(
    selected: list[int],
    pos: list[int],
    used: list[int],
    target: int,
    hi: int,
    limits: Limits,
    *,
    is_sorted: bool = False,
) -> list[tuple[int, int]]:
    """Do one head of `mirror_diff`; update `pos` and `used`, return (position, slot)."""
    for slot, position in enumerate(pos):
        if position >= 0 and position in selected:
            used[slot] = limits.step
    missing = [p for p in dict.fromkeys(selected) if p >= 0 and p not in pos]
    num_filled = sum(p >= 0 for p in pos)
    empty = [slot for slot, position in enumerate(pos) if position < 0]
    may_fill = empty[: max(0, target - num_filled)]
    victims = sorted(
        (used[slot], slot)
        for slot in range(limits.num_protected, len(pos))
        if pos[slot] >= 0 and used[slot] != limits.step
    )
    num_taken = min(len(missing), limits.fetch_cap, len(may_fill) + len(victims))
    num_evicted = max(0, num_taken - len(may_fill))
    slots = may_fill[: num_taken - num_evicted] + sorted(slot for _, slot in victims[:num_evicted])
    positions = sorted(missing[:num_taken]) if is_sorted else missing[:num_taken]
    for position in range(hi - 1, -1, -1):
        if len(slots) == min(len(may_fill), limits.fetch_cap) or num_evicted:
            break
        if position not in pos and position not in positions:
            positions.append(position)
            slots.append(may_fill[len(slots)])
    fetched = list(zip(positions, slots, strict=True))
    for position, slot in fetched:
        pos[slot], used[slot] = position, limits.step
    return fetched


def padded(values: list[int], size: int) -> list[int]:
    """Append -1 up to `size` values."""
    return values + [-1] * (size - len(values))
