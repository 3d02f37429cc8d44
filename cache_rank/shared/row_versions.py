# SPDX-License-Identifier: Apache-2.0
"""Copies of what a step changes per row, so that a step that broke off can be done again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tandemkv.cache_rank.protocol.local import Allocate
from tandemkv.kernels.placing import place


class RowVersions:
    """Two copies of each row's books, by the parity of the step that they were valid before.

    The engine works on the books in place. Behind each step that changes rows it copies these rows,
    stamped with epoch, generation and the number of the step that comes next. Two steps may be
    under way, so the state before the first one that is lost is in one of the two copies. The
    inference rank alone says which step was confirmed.

    Parameters
    ----------
    books : Mapping
        Name to tensor ``[num_layers, num_rows, ...]``.
    allocate : Allocate
        Makes the copies where they outlive the process.

    Attributes
    ----------
    stamps : torch.Tensor
        ``[2, num_rows, 3]`` int64: epoch, generation, number of the step that comes next.
    """

    def __init__(self, books: Mapping[str, torch.Tensor], allocate: Allocate) -> None:
        self._books = dict(books)
        self._copies = {
            name: allocate(f"{name}_versions", (2, *book.shape), book.dtype)
            for name, book in self._books.items()
        }
        num_rows = next(iter(self._books.values())).shape[1]
        self.stamps = allocate("row_stamps", (2, num_rows, 3), torch.int64)

    def record(
        self, rows: Sequence[int], generations: Sequence[int], *, epoch: int, step: int
    ) -> None:
        """Copy `rows` as they are before `step`."""
        if not rows:
            return
        device = self.stamps.device
        side, index = step % 2, place(rows, device)
        self.stamps[side, index] = 0  # half a copy is none
        for name, book in self._books.items():
            self._copies[name][side][:, index] = book[:, index]
        stamps = [x for generation in generations for x in (epoch, generation, step)]
        self.stamps[side, index] = place(stamps, device).view(-1, 3)
