# SPDX-License-Identifier: Apache-2.0
"""Copies of what a step changes per row, so that a step that broke off can be done again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tandemkv.cache_rank.protocol.engine import Allocate
from tandemkv.cache_rank.protocol.memory.shared_region import STAMPS
from tandemkv.kernels.to_device import to_device

_NO_STEP = 0
_STEP = 2
"""Place in a stamp."""
_NUM_COPIES = 3


class RowVersions:
    """Three copies of each row's books, as they were before the latest steps that changed it.

    The engine works on the books in place. Behind each step that changes rows it copies these rows
    over the oldest of their copies, stamped with epoch, generation and the number of the step that
    comes next. The next step but one is announced once the results of a step were used or dropped:
    with SGLang's overlap scheduler one pass is under way while another's results are looked at. So
    a step whose results were not used has at most two copies after it, and the state before it is
    the third.

    `books` are tensors ``[num_layers, num_rows, ...]`` by name; `allocate` makes the copies where
    they outlive the process, or returns those that are there. All is done by kernels of fixed
    shape, which a graph may capture: `name` says beforehand whose rows they are.

    Attributes
    ----------
    stamps : torch.Tensor
        ``[3, num_rows, 3]`` int64: epoch, generation, number of the step that comes next, as
        `record` knows it; 0 is none.
    """

    def __init__(self, books: Mapping[str, torch.Tensor], allocate: Allocate) -> None:
        self._books = dict(books)
        self._copies = {
            name: allocate(f"{name}_versions", (_NUM_COPIES, *book.shape), book.dtype)
            for name, book in self._books.items()
        }
        num_rows = next(iter(self._books.values())).shape[1]
        self.stamps = allocate(STAMPS, (_NUM_COPIES, num_rows, 3), torch.int64)
        self._newest = self.stamps[..., _STEP].argmax(0)
        # What copies of each row are stamped with, and what half a copy is.
        self._next = torch.zeros_like(self.stamps[0])
        self._none = self.stamps.new_full((), _NO_STEP)

    def name(self, rows: Sequence[int], generations: Sequence[int], *, epoch: int) -> None:
        """Say which request is in each of `rows`, for the copies from now on."""
        tenants = [x for each in zip(rows, generations, strict=True) for x in each]
        index, generation = to_device(tenants, self.stamps.device).view(-1, 2).unbind(1)
        self._next[index, 0] = epoch
        self._next[index, 1] = generation

    def record(self, rows: torch.Tensor, *, step: torch.Tensor) -> None:
        """Copy ``rows [n]`` int64 as they are before the step that comes next.

        Each is named once, but row 0, that of padding, of which nothing is ever restored.
        ``step [1]`` is the number of the step that has changed them, on the same device; of int32
        it wraps around.
        """
        side = (self._newest[rows] + 1) % _NUM_COPIES
        self.stamps.index_put_((side, rows), self._none)
        for name, book in self._books.items():
            self._copies[name][side, :, rows] = book[:, rows].transpose(0, 1)
        self._next[:, _STEP] = step + 1
        self.stamps.index_put_((side, rows), self._next[rows])
        self._newest.index_put_((rows,), side)

    def restore(self, rows: Sequence[int], generations: Sequence[int], *, step: int) -> list[bool]:
        """Bring the books of `rows` to what they were before `step`; waits for the device.

        Returns for which rows that was possible. Copies of later steps, and those of rows for which
        it was not, are given up.
        """
        device = self.stamps.device
        index = torch.tensor(list(rows), dtype=torch.int64, device=device)
        wanted = torch.tensor(list(generations), dtype=torch.int64, device=device)
        stamps = self.stamps[:, index]  # [copies, n, 3]
        words = stamps[..., _STEP]
        number = step + (words - step + 2**31) % 2**32 - 2**31  # what wrapped around is near
        is_usable = (stamps[..., 1] == wanted) & (words != _NO_STEP) & (number <= step)
        best = torch.where(is_usable, number, _NO_STEP).argmax(0)
        for side in range(_NUM_COPIES):
            chosen = index[is_usable[side] & (best == side)]
            for name, book in self._books.items():
                book[:, chosen] = self._copies[name][side][:, chosen]
            self.stamps[side, index[~is_usable[side]]] = _NO_STEP
        self._newest[index] = best
        found: list[bool] = is_usable.any(0).tolist()
        return found
