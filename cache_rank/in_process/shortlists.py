# SPDX-License-Identifier: Apache-2.0
"""What the last scan of each layer ranked best, and choices among it."""

from __future__ import annotations

import torch

from tandemkv.cache_rank.protocol.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings import NUM_NEW, SelectionSettings
from tandemkv.kernels.shortlist import (
    ShortlistScratch,
    choose_shortlisted,
    make_shortlist_scratch,
    store_shortlist,
)

from .batch import DecodeBatch


class Shortlists:
    """Shortlists of the selecting layers; see `tandemkv.kernels.shortlist`.

    Layers are scanned in turn, so that no step has all the scans.

    Parameters
    ----------
    selection : SelectionSettings
        With `scan_every` of at least 1.
    model : ModelSpec
        As this rank has it.
    num_layers, num_rows, max_batch, num_lanes : int
        Selecting layers; rows of the request table; requests of a step; layers worked on at once.
    device : torch.device
        Where.
    """

    def __init__(
        self,
        selection: SelectionSettings,
        model: ModelSpec,
        *,
        num_layers: int,
        num_rows: int,
        max_batch: int,
        num_lanes: int,
        device: torch.device,
    ) -> None:
        self._selection, self._model = selection, model
        heads, self.num_listed = model.num_kv_heads, selection.num_shortlisted
        shape = (num_layers, num_rows, heads, self.num_listed)
        self._positions = torch.full(shape, -1, dtype=torch.int32, device=device)
        self._covered = torch.zeros((num_layers, num_rows), dtype=torch.int32, device=device)
        self._due = torch.zeros((num_lanes, max_batch), dtype=torch.bool, device=device)
        self._scratch: list[ShortlistScratch] = [
            make_shortlist_scratch(
                max_batch, model.num_qo_heads, heads, self.num_listed + NUM_NEW, device
            )
            for _ in range(num_lanes)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of the lists."""
        return self._positions.nbytes + self._covered.nbytes

    def seed(self, book: int, row: int, found: torch.Tensor, hi: int) -> None:
        """Begin a request with ``found [H, num_listed]``, the best of the candidates to `hi`."""
        self._positions[book, row] = found
        self._covered[book, row] = hi

    def seed_identity(self, rows: torch.Tensor) -> None:
        """Begin requests, of ``rows [n]``, with their first candidates."""
        first = self._selection.num_sink_tokens
        last = first + self.num_listed
        everything = torch.arange(first, last, dtype=torch.int32, device=rows.device)
        self._positions[:, rows] = everything
        self._covered[:, rows] = last

    def choose(
        self,
        book: int,
        lane: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        batch: DecodeBatch,
        *,
        refresh_every: int,
        page_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose under ``query [B, Hq, D]``; returns positions and scores ``[B, H, K]``."""
        size, selection = len(query), self._selection
        # Steps that select are counted: each `refresh_every`-th is one.
        return choose_shortlisted(
            query,
            keys,
            batch.pages[:size],
            self._positions[book],
            self._covered[book],
            batch.rows[:size],
            batch.lo[:size],
            batch.hi[:size],
            selection.budget_tokens,
            num_new=NUM_NEW,
            active=batch.active[:size],
            step=batch.step,
            every=selection.scan_steps * refresh_every,
            phase=book * refresh_every,
            due=self._due[lane, :size],
            scale=self._model.scale,
            pooling=selection.pooling,
            page_size=page_size,
            scratch=self._scratch[lane],
        )

    def due(self, lane: int, size: int) -> torch.Tensor:
        """Return whose list has to be made anew, ``[size]`` bool, after `choose` in `lane`."""
        return self._due[lane, :size]

    def store(self, book: int, lane: int, found: torch.Tensor, batch: DecodeBatch) -> None:
        """Take over ``found [B, H, num_listed]`` for those that are due."""
        size = len(found)
        store_shortlist(
            found,
            batch.hi[:size],
            self._due[lane, :size],
            batch.rows[:size],
            self._positions[book],
            self._covered[book],
        )
