# SPDX-License-Identifier: Apache-2.0
"""Some combinations of a test's parameters that have every pair of them."""

from __future__ import annotations

from itertools import combinations

import pytest

Pair = tuple[tuple[str, str], ...]


def with_every_pair(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return some of a test's `items`: each pair of parameters that any of them has is there."""
    left = {item: pairs_of(item) for item in items}
    chosen = []
    while any(left.values()):
        best = max(left, key=lambda item: len(left[item]))
        chosen.append(best)
        found = left.pop(best)
        for pairs in left.values():
            pairs -= found
    return chosen or items


def pairs_of(item: pytest.Item) -> set[Pair]:
    """Return all pairs of its parameters; of a single one, that."""
    callspec = getattr(item, "callspec", None)
    values = [] if callspec is None else [(k, repr(v)) for k, v in sorted(callspec.params.items())]
    return set(combinations(values, min(2, len(values)))) if values else set()
