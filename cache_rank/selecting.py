# SPDX-License-Identifier: Apache-2.0
"""Select for the sparse rows of a decode step, and pack what is missing over there."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from tandemkv.kernels.mirror import mirror_diff
from tandemkv.kernels.pack import gather_pack
from tandemkv.kernels.score import score_keys

from .epoch import Epoch
from .policies.base import SelectionInput, StoredKV
from .protocol.errors import ProtocolError
from .protocol.messages import StepBegin, Timing
from .protocol.pack_layout import PackHeader, PackViews, write_header
from .protocol.step_program import sparse_rows
from .row_table import PADDING_ROW


class SparseRows:
    """The sparse rows of one decode step: candidates, policy, mirror, packs.

    Candidates are ``[num_sink, hi)`` with ``hi = length - num_recent`` as of the step that
    uses the selection; `num_target` resident slots have to be filled then.

    Raises
    ------
    ProtocolError
        If a row was never seeded.
    """

    def __init__(self, epoch: Epoch, step: StepBegin) -> None:
        self._epoch = epoch
        self._step = step
        selection = epoch.settings.selection
        rows = sparse_rows(step.rows)
        for row in rows:
            if row.row != PADDING_ROW and not epoch.mirror.is_seeded(row.row, row.generation):
                raise ProtocolError(
                    f"row={row.row} generation={row.generation} is sparse but was never seeded"
                )
        self._row_steps = rows
        self._owners = [(row.row, row.generation) for row in rows]
        self._rows = torch.tensor([row.row for row in rows], dtype=torch.int64)
        self.positions = torch.tensor([row.length - 1 for row in rows], dtype=torch.int64)
        lag = selection.lag if epoch.program.timing is Timing.NEXT_STEP else 0
        self._use_positions = self.positions + lag
        hi = [
            0 if row.row == PADDING_ROW else max(0, row.length + lag - selection.num_recent_tokens)
            for row in rows
        ]
        self._hi = torch.tensor(hi, dtype=torch.int64)
        self._lo = torch.full_like(self._hi, selection.num_sink_tokens)
        self._num_target = self._hi.clamp(max=epoch.mirror.num_resident)
        self._width = max(hi, default=0)
        self._slots = epoch.rows.slots[self._rows, : self._width]

    def pack(self, layers: tuple[int, ...], queries: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Select with `queries` ``[S, Hq, D]`` by layer, and return the pack's buffer.

        While too many packs of these layers are on the way an empty one is returned, and the
        mirror stays as it is.
        """
        epoch = self._epoch
        layout = epoch.program.pack_layout(len(layers), len(self._rows))
        buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
        views = layout.views(buffer)
        seq, is_open = epoch.ledger.next_seq(layers)
        write_header(views, PackHeader(epoch.number, self._step.step_id, seq))
        views.rows.copy_(self._rows)
        views.generations.copy_(torch.tensor([row.generation for row in self._row_steps]))
        if is_open:
            for i, layer in enumerate(layers):
                self._fill(views, i, layer, queries[layer])
        else:
            views.fetch_pos.fill_(-1)
            views.fetch_slot.fill_(-1)
            epoch.counters.withheld_packs_total += 1
        return buffer

    def _fill(self, views: PackViews, index: int, layer: int, query: torch.Tensor) -> None:
        epoch = self._epoch
        if layer == 0:
            for slots, end in zip(self._slots, self._hi.tolist(), strict=True):
                epoch.store.note_read(slots[:end])
        selected = self._select(layer, query)
        before, last_used = epoch.mirror.load(layer, self._rows)
        resident = before.clone()
        fetch_pos, fetch_slot = mirror_diff(
            selected,
            resident,
            last_used,
            step=epoch.num_decode_steps,
            num_protected=epoch.settings.selection.num_sink_tokens,
            num_target=self._num_target,
            hi=self._hi,
            lo=0,
            fetch_cap=views.fetch_pos.shape[-1],
        )
        epoch.mirror.commit(layer, self._rows, resident, last_used)
        views.fetch_pos[index] = fetch_pos
        views.fetch_slot[index] = fetch_slot
        k_pool, v_pool = epoch.store.k[layer], epoch.store.v[layer]
        gather_pack(k_pool, v_pool, self._slots, fetch_pos, views.k[index], views.v[index])
        self._count(selected, before, fetch_slot)

    def _select(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        epoch, selection = self._epoch, self._epoch.settings.selection
        keys, k_scale = epoch.store.index(layer)
        request = SelectionInput(
            layer=layer,
            owners=self._owners,
            query=query,
            positions=self.positions,
            use_positions=self._use_positions,
            score=partial(
                score_keys,
                k_pool=keys,
                slots=self._slots,
                lo=self._lo,
                hi=self._hi,
                width=self._width,
                scale=epoch.model.scale,
                pooling=selection.pooling,
                k_scale=k_scale,
            ),
            budget=selection.budget_tokens,
            lo=self._lo,
            hi=self._hi,
            stored=StoredKV(epoch.store.k[layer], epoch.store.v[layer], self._slots),
        )
        chosen = epoch.policy.select(request)
        chosen.check((len(self._rows), epoch.model.num_kv_heads, selection.budget_tokens))
        return chosen.positions

    def _count(
        self, selected: torch.Tensor, before: torch.Tensor, fetch_slot: torch.Tensor
    ) -> None:
        counters = self._epoch.counters
        # Both are shifted by one, so that the padding -1 falls on a place that never hits.
        known = torch.zeros((*before.shape[:2], self._width + 1), dtype=torch.bool)
        known.scatter_(-1, (before + 1).clamp_(max=self._width).long(), 1)
        known[..., 0] = False
        num_selected = int((selected >= 0).sum())
        hits = int(known.gather(-1, (selected + 1).long()).sum())
        is_fetched = fetch_slot >= 0
        replaced = before.gather(-1, fetch_slot.clamp(min=0).long()) >= 0
        counters.selections_total += len(self._rows)
        counters.selected_tokens_total += num_selected
        counters.resident_hits_total += hits
        counters.resident_misses_total += num_selected - hits
        counters.fetched_rows_total += int(is_fetched.sum())
        counters.evictions_total += int((replaced & is_fetched).sum())
