# SPDX-License-Identifier: Apache-2.0
"""The requests of a decode step, in buffers whose addresses never change."""

from __future__ import annotations

import torch

from tandemkv.cache_rank.protocol.local import DenseLengths
from tandemkv.cache_rank.protocol.settings import SelectionSettings


class DecodeBatch:
    """What the kernels of a step read. Filled before the step, so that a graph can replay it.

    Attributes
    ----------
    rows, positions : torch.Tensor
        ``[max_batch]`` int64; the position is that of the newest token.
    lengths, lo, hi, num_target : torch.Tensor
        ``[max_batch]`` int32: tokens after the step, candidates ``[lo, hi)``, resident slots
        that have to be filled.
    active : torch.Tensor
        ``[max_batch]`` bool: the policy selects for the request; not for padding (row 0), and
        not for requests that are dense and will be for a while.
    pages : torch.Tensor
        ``[max_batch, max_pages]`` int32: page that each run of `page_size` positions lies in.
    step : torch.Tensor
        ``[]`` int32, counts the steps.
    """

    def __init__(
        self,
        selection: SelectionSettings,
        *,
        num_resident: int,
        max_batch: int,
        max_context: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        self._page_size = page_size
        self._num_resident = num_resident
        self._num_recent = selection.num_recent_tokens
        self._lengths = DenseLengths.of(selection, num_resident)
        # As of the step that uses the selection.
        self._sink = selection.num_sink_tokens

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.rows = zeros(max_batch, dtype=torch.int64)
        self.positions = zeros(max_batch, dtype=torch.int64)
        self.lengths = zeros(max_batch)
        self.lo, self.hi, self.num_target = zeros(max_batch), zeros(max_batch), zeros(max_batch)
        self.active = zeros(max_batch, dtype=torch.bool)
        self.pages = zeros(max_batch, -(-max_context // page_size))
        self.step = zeros()

    def load(
        self, rows: torch.Tensor, lengths: torch.Tensor, req_to_token: torch.Tensor, *, lag: int
    ) -> None:
        """Take over the requests of a step; see `LocalCacheRank.begin_decode`.

        `lag` is the number of steps until the selection is used.
        """
        size, device = len(rows), self.rows.device
        width = min(self.pages.shape[1], -(-req_to_token.shape[1] // self._page_size))
        first = req_to_token[:, :: self._page_size][rows.long(), :width]
        # The table may be on another GPU; only the batch's part of it crosses.
        rows, lengths, first = rows.to(device), lengths.to(device), first.to(device)
        self.rows[:size] = rows
        self.lengths[:size] = lengths
        torch.sub(self.lengths[:size], 1, out=self.positions[:size])
        torch.sub(lengths, self._num_recent - lag, out=self.hi[:size])
        self.hi[:size].clamp_(min=0)
        self.lo[:size].fill_(self._sink)
        torch.clamp(self.hi[:size], max=self._num_resident, out=self.num_target[:size])
        torch.gt(lengths, self._lengths.num_cold, out=self.active[:size])
        self.active[:size] &= rows != 0
        torch.div(
            first,
            self._page_size,
            rounding_mode="floor",
            out=self.pages[:size, :width],
        )
        self.step += 1
