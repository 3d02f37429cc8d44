# SPDX-License-Identifier: Apache-2.0
"""The rows of a decode step that an attending policy answers for: see `AttendingPolicy`."""

from __future__ import annotations

import torch

from tandemkv.kernels.placing import place

from .epoch import Epoch
from .policies.attending import AttendingPolicy, AttendInput
from .policies.base import PolicyError, StoredKV
from .protocol.errors import ProtocolError
from .protocol.messages import RowFlag, StepBegin
from .protocol.step_program import exact_rows
from .row_table import PADDING_ROW


class AttendedRows:
    """Rows whose attention over ``[num_sink, length - num_recent)`` the policy completes.

    The sink and the recent tokens are attended to on the inference rank: the two parts share
    no token, and together have all.

    Raises
    ------
    ProtocolError
        If a row asks for the exact step, which this policy does not take.
    """

    def __init__(self, epoch: Epoch, step: StepBegin) -> None:
        if not isinstance(epoch.policy, AttendingPolicy):
            raise PolicyError(f"{type(epoch.policy).__name__} must be an AttendingPolicy")
        self._epoch, self._policy = epoch, epoch.policy
        rows = exact_rows(step.rows, layer_is_exact=True)
        for row in rows:
            if row.flags & (RowFlag.EXACT | RowFlag.SLOW):
                raise ProtocolError(f"row={row.row}: flags={row.flags} with a policy that attends")
        selection = epoch.settings.selection
        self._owners = [(row.row, row.generation) for row in rows]
        lengths = [row.length for row in rows]
        self._lengths = place(lengths, epoch.device)
        self._ends = [
            0 if row.row == PADDING_ROW else max(0, row.length - selection.num_recent_tokens)
            for row in rows
        ]
        self._hi = place(self._ends, epoch.device)
        self._lo = torch.full_like(self._hi, selection.num_sink_tokens)
        index = place([row.row for row in rows], epoch.device)
        self._slots = epoch.rows.slots[index, : max(lengths)]

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Return output and log-sum-exp ``[S, Hq, D + 1]`` float32 of `query` ``[S, Hq, D]``."""
        epoch, store = self._epoch, self._epoch.store
        if layer == 0:
            for slots, end in zip(self._slots, self._ends, strict=True):
                store.note_read(slots[:end])
        request = AttendInput(
            layer=layer,
            owners=self._owners,
            query=query,
            lengths=self._lengths,
            lo=self._lo,
            hi=self._hi,
            stored=StoredKV(store.k[layer], store.v[layer], self._slots),
            budget=epoch.settings.selection.budget_tokens,
        )
        found = self._policy.attend(request)
        epoch.counters.selections_total += len(self._owners)
        epoch.counters.selected_tokens_total += found.num_attended
        return found.merged
