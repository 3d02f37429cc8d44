# SPDX-License-Identifier: Apache-2.0
"""Copies of what a step changes per row, so that a step that broke off can be done again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tandemkv.cache_rank.protocol.engine import Allocate
from tandemkv.cache_rank.protocol.shared_region import STAMPS
from tandemkv.kernels.to_device import to_device

_NO_STEP = 0


class RowVersions:
    """Two copies of each row's books, as they were before the two latest steps that changed it.

    The engine works on the books in place. Behind each step that changes rows it copies these rows
    over the older of their two copies, stamped with epoch, generation and the number of the step
    that comes next. A step ends after its copies were made, and its results are used once it has
    ended. So a step whose results were not used has at most one copy after it, and the state before
    it is the other one.

    Parameters
    ----------
    books : Mapping
        Name to tensor ``[num_layers, num_rows, ...]``.
    allocate : Allocate
        Makes the copies where they outlive the process, or returns those that are there.

    Attributes
    ----------
    stamps : torch.Tensor
        ``[2, num_rows, 3]`` int64: epoch, generation, number of the step that comes next; 0 is
        none.
    """

    def __init__(self, books: Mapping[str, torch.Tensor], allocate: Allocate) -> None:
        self._books = dict(books)
        self._copies = {
            name: allocate(f"{name}_versions", (2, *book.shape), book.dtype)
            for name, book in self._books.items()
        }
        num_rows = next(iter(self._books.values())).shape[1]
        self.stamps = allocate(STAMPS, (2, num_rows, 3), torch.int64)
        # Which copy is the newer one, on the host: recording must not wait for the device.
        is_second = self.stamps[1, :, 2] > self.stamps[0, :, 2]
        self._newest: list[int] = is_second.long().tolist()

    def record(
        self, rows: Sequence[int], generations: Sequence[int], *, epoch: int, step: int
    ) -> None:
        """Copy `rows` as they are before `step`."""
        device = self.stamps.device
        for side in (0, 1):
            chosen = [i for i, row in enumerate(rows) if self._newest[row] != side]
            if not chosen:
                continue
            index = to_device([rows[i] for i in chosen], device)
            self.stamps[side, index] = _NO_STEP  # half a copy is none
            for name, book in self._books.items():
                self._copies[name][side][:, index] = book[:, index]
            stamps = [x for i in chosen for x in (epoch, generations[i], step)]
            self.stamps[side, index] = to_device(stamps, device).view(-1, 3)
        for row in rows:
            self._newest[row] = 1 - self._newest[row]

    def restore(self, rows: Sequence[int], generations: Sequence[int], *, step: int) -> list[bool]:
        """Bring the books of `rows` to what they were before `step`; waits for the device.

        Returns
        -------
        list of bool
            For which rows that was possible. Copies of later steps, and those of rows for which it
            was not, are given up.
        """
        device = self.stamps.device
        index = torch.tensor(list(rows), dtype=torch.int64, device=device)
        wanted = torch.tensor(list(generations), dtype=torch.int64, device=device)
        stamps = self.stamps[:, index]  # [2, n, 3]
        is_usable = (
            (stamps[..., 1] == wanted) & (stamps[..., 2] > _NO_STEP) & (stamps[..., 2] <= step)
        )
        best = torch.where(is_usable, stamps[..., 2], _NO_STEP).argmax(0)
        for side in (0, 1):
            chosen = index[is_usable[side] & (best == side)]
            for name, book in self._books.items():
                book[:, chosen] = self._copies[name][side][:, chosen]
            self.stamps[side, index[~is_usable[side]]] = _NO_STEP
        for row, side in zip(rows, best.tolist(), strict=True):
            self._newest[row] = side
        found: list[bool] = is_usable.any(0).tolist()
        return found
