# SPDX-License-Identifier: Apache-2.0
"""Copies of what a step changes per row, so that a step that broke off can be done again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tandemkv.cache_rank.protocol.engine import Allocate
from tandemkv.cache_rank.protocol.shared_region import STAMPS
from tandemkv.kernels.to_device import to_device

_NO_STEP = 0
_NUM_COPIES = 3


class RowVersions:
    """Three copies of each row's books, as they were before the latest steps that changed it.

    The engine works on the books in place. Behind each step that changes rows it copies these rows
    over the oldest of their copies, stamped with epoch, generation and the number of the step that
    comes next. The next step but one is announced once the results of a step were used or dropped:
    with SGLang's overlap scheduler one pass is under way while another's results are looked at. So
    a step whose results were not used has at most two copies after it, and the state before it is
    the third.

    Parameters
    ----------
    books : Mapping
        Name to tensor ``[num_layers, num_rows, ...]``.
    allocate : Allocate
        Makes the copies where they outlive the process, or returns those that are there.

    Attributes
    ----------
    stamps : torch.Tensor
        ``[3, num_rows, 3]`` int64: epoch, generation, number of the step that comes next; 0 is
        none.
    """

    def __init__(self, books: Mapping[str, torch.Tensor], allocate: Allocate) -> None:
        self._books = dict(books)
        self._copies = {
            name: allocate(f"{name}_versions", (_NUM_COPIES, *book.shape), book.dtype)
            for name, book in self._books.items()
        }
        num_rows = next(iter(self._books.values())).shape[1]
        self.stamps = allocate(STAMPS, (_NUM_COPIES, num_rows, 3), torch.int64)
        # Which copy is the newest, on the host: recording must not wait for the device.
        self._newest: list[int] = self.stamps[..., 2].argmax(0).tolist()

    def record(
        self, rows: Sequence[int], generations: Sequence[int], *, epoch: int, step: int
    ) -> None:
        """Copy `rows`, each of which is named once, as they are before `step`."""
        device = self.stamps.device
        sides = [(self._newest[row] + 1) % _NUM_COPIES for row in rows]
        side, index = to_device([*sides, *rows], device).view(2, -1)
        self.stamps[side, index] = _NO_STEP  # half a copy is none
        for name, book in self._books.items():
            self._copies[name][side, :, index] = book[:, index].transpose(0, 1)
        stamps = [x for generation in generations for x in (epoch, generation, step)]
        self.stamps[side, index] = to_device(stamps, device).view(-1, 3)
        for row, newest in zip(rows, sides, strict=True):
            self._newest[row] = newest

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
        stamps = self.stamps[:, index]  # [copies, n, 3]
        is_usable = (
            (stamps[..., 1] == wanted) & (stamps[..., 2] > _NO_STEP) & (stamps[..., 2] <= step)
        )
        best = torch.where(is_usable, stamps[..., 2], _NO_STEP).argmax(0)
        for side in range(_NUM_COPIES):
            chosen = index[is_usable[side] & (best == side)]
            for name, book in self._books.items():
                book[:, chosen] = self._copies[name][side][:, chosen]
            self.stamps[side, index[~is_usable[side]]] = _NO_STEP
        for row, side in zip(rows, best.tolist(), strict=True):
            self._newest[row] = side
        found: list[bool] = is_usable.any(0).tolist()
        return found
