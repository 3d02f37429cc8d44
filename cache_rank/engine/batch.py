# SPDX-License-Identifier: Apache-2.0
"""The requests of a decode step, in buffers whose addresses never change."""

from __future__ import annotations

import torch

from tandemkv.cache_rank.protocol.engine import DenseLengths
from tandemkv.cache_rank.protocol.errors import ContractError
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings
from tandemkv.kernels.step_tables import CandidateTables, load_candidates
from tandemkv.kernels.to_device import to_device


class DecodeBatch(CandidateTables):
    """What the kernels of a step read, filled at its beginning.

    A request is `active` if its resident set may change; not padding (row 0), and not requests that
    are dense and will be for a while.

    Attributes
    ----------
    next_hi, next_num_target : torch.Tensor
        As `hi` and `num_target`, of the next step; `look_forward` fills them.
    num_cold : torch.Tensor
        ``[]`` int32: longest request that is not selected for; `set_num_cold` changes it.

    Parameters
    ----------
    selections : torch.Tensor
        ``[]`` int64 on `device`; the selections that steps ask for are added to it.
    """

    def __init__(
        self,
        selection: SelectionSettings,
        *,
        max_batch: int,
        max_context: int,
        page_size: int,
        selections: torch.Tensor,
        device: torch.device,
    ) -> None:
        self._page_size = page_size
        self._num_resident = selection.num_resident
        self._num_recent = selection.num_recent_tokens
        # As of the step that uses the selection.
        self._sink = selection.num_sink_tokens
        self._num_cold = DenseLengths.of(selection, self._num_resident).num_cold

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        super().__init__(
            rows=zeros(max_batch, dtype=torch.int64),
            positions=zeros(max_batch, dtype=torch.int64),
            lengths=zeros(max_batch),
            lo=zeros(max_batch),
            hi=zeros(max_batch),
            num_target=zeros(max_batch),
            active=zeros(max_batch, dtype=torch.bool),
            pages=zeros(max_batch, -(-max_context // page_size)),
            step=zeros(),
            selections=selections,
        )
        self.next_hi, self.next_num_target = zeros(max_batch), zeros(max_batch)
        self.num_cold = zeros().fill_(self._num_cold)
        self._slow: torch.Tensor | None = None

    def set_num_cold(self, num_cold: int) -> None:
        """Let steps that are loaded from now on select for requests of more than `num_cold`."""
        if num_cold != self._num_cold:
            self.num_cold.fill_(num_cold)
            self._num_cold = num_cold

    def load_slow(self, slow: torch.Tensor, *, num_layers: int, fills_others: bool) -> None:
        """Let selections of the step that was loaded be for the `slow` requests alone.

        ``slow [B]`` bool, on the host; `num_layers` as in `load`, which counts none then. With
        `fills_others` the sets of the others are filled up where they have empty slots.
        """
        active = self.active[: len(slow)]
        self._slow = to_device(slow.tolist(), active.device, torch.bool) & active
        self.selections += self._slow.sum() * num_layers
        if not fills_others:
            active &= self._slow

    def selecting(self, size: int) -> torch.Tensor:
        """Return for whom of the first `size` requests something is selected, bool."""
        return self.active[:size] if self._slow is None else self._slow[:size]

    def look_forward(self) -> None:
        """Fill in what a selection for the next step reads; a graph may capture it."""
        torch.sub(self.lengths, self._num_recent - 1, out=self.next_hi)
        self.next_hi.clamp_(min=0)
        torch.clamp(self.next_hi, max=self._num_resident, out=self.next_num_target)

    def load(
        self,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        req_to_token: torch.Tensor,
        *,
        lag: int,
        num_layers: int,
    ) -> None:
        """Take over the requests of a step; a graph may capture it. See `Engine.begin_decode`.

        `lag` is the number of steps until the selection is used, `num_layers` the number of
        layers that the step selects for.
        """
        if rows.device != self.rows.device:
            raise ContractError(f"requests on {rows.device}, the engine on {self.rows.device}")
        load_candidates(
            rows,
            lengths,
            req_to_token[:, :: self._page_size],
            self,
            page_size=self._page_size,
            num_sink=self._sink,
            num_excluded=self._num_recent - lag,
            num_resident=self._num_resident,
            num_cold=self.num_cold,
            num_layers=num_layers,
        )
