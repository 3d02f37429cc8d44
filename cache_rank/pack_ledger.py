# SPDX-License-Identifier: Apache-2.0
"""Sequence numbers of packs, and how many of them the inference rank has not scattered yet."""

from __future__ import annotations

from collections import deque


class PackLedger:
    """Bounds the outstanding packs per pack position.

    Parameters
    ----------
    max_outstanding : int
        Packs of the same layers that may be on the way.
    """

    def __init__(self, max_outstanding: int) -> None:
        self._max_outstanding = max_outstanding
        self._outstanding: dict[tuple[int, ...], deque[int]] = {}
        self._last_seq = 0

    @property
    def last_seq(self) -> int:
        """Sequence number of the latest pack, 0 before the first."""
        return self._last_seq

    def acknowledge(self, applied_seq: int) -> None:
        """Note that every pack up to `applied_seq` has been scattered."""
        for pending in self._outstanding.values():
            while pending and pending[0] <= applied_seq:
                pending.popleft()

    def next_seq(self, layers: tuple[int, ...]) -> tuple[int, bool]:
        """Return the next sequence number, and whether the pack may carry anything."""
        self._last_seq += 1
        pending = self._outstanding.setdefault(layers, deque())
        is_open = len(pending) < self._max_outstanding
        if is_open:
            pending.append(self._last_seq)
        return self._last_seq, is_open
