# SPDX-License-Identifier: Apache-2.0
"""Select for the sparse rows of a decode step, and pack what is missing over there."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tandemkv.kernels.mirror import mirror_diff
from tandemkv.kernels.pack import gather_pack
from tandemkv.kernels.placing import place

from .candidates import Candidates
from .epoch import Epoch
from .page_bounds import page_bounds
from .policies.base import PageBounds
from .protocol.errors import ProtocolError
from .protocol.messages import RowFlag, StepBegin, Timing
from .protocol.pack_layout import PackHeader, PackViews, write_header
from .row_table import PADDING_ROW

SELECTION_COUNTERS = (
    "selected_tokens_total",
    "resident_hits_total",
    "resident_misses_total",
    "fetched_rows_total",
    "evictions_total",
    "exact_rows_total",
)
"""Counters that are found on the device."""


class SparseRows:
    """The packed rows of one decode step: candidates, policy, mirror, packs.

    Candidates are ``[num_sink, hi)`` with ``hi = length - num_recent`` as of the step that
    uses the selection; `num_target` resident slots have to be filled then. A layer that
    shares the selection of another is packed with that, by its head map. With
    `Timing.EXACT_STEP` only slow rows are selected for; others that are packed are filled up.

    Raises
    ------
    ProtocolError
        If a row was never seeded.
    """

    def __init__(self, epoch: Epoch, step: StepBegin) -> None:
        self._epoch = epoch
        self._step = step
        selection = epoch.settings.selection
        rows = epoch.program.packed_rows(step.rows)
        for row in rows:
            if row.row != PADDING_ROW and not epoch.mirror.is_seeded(row.row, row.generation):
                raise ProtocolError(
                    f"row={row.row} generation={row.generation} is sparse but was never seeded"
                )
        device = epoch.device
        self._rows = place([row.row for row in rows], device)
        self._generations = place([row.generation for row in rows], device)
        self.positions = place([row.length - 1 for row in rows], device)
        timing = epoch.program.timing
        lag = int(timing in (Timing.NEXT_STEP, Timing.EXACT_STEP))
        hi = [
            0 if row.row == PADDING_ROW else max(0, row.length + lag - selection.num_recent_tokens)
            for row in rows
        ]
        self._ends = hi
        self._hi = place(hi, device)
        self._num_target = self._hi.clamp(max=epoch.mirror.num_resident)
        self._width = max(hi, default=0)
        self._slots = epoch.rows.slots[self._rows, : self._width]
        candidates = Candidates(
            owners=tuple((row.row, row.generation) for row in rows),
            rows=self._rows,
            positions=self.positions,
            use_positions=self.positions + lag,
            lo=torch.full_like(self._hi, selection.num_sink_tokens),
            hi=self._hi,
            slots=self._slots,
        )
        asked = list(range(len(rows)))
        if timing is Timing.EXACT_STEP:
            asked = [i for i, row in enumerate(rows) if row.flags & RowFlag.SLOW]
        self._asked_index = place(asked, device)
        self._asked = candidates.subset(asked)
        self._chosen: dict[int, torch.Tensor] = {}

    def pack(self, layers: tuple[int, ...], queries: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Select with `queries` by layer, and return the pack's buffer.

        Queries are ``[S, Hq, D]``, with `Timing.EXACT_STEP` of the slow rows and heads only.

        While too many packs of these layers are on the way an empty one is returned, and the
        mirror stays as it is.
        """
        epoch = self._epoch
        layout = epoch.program.pack_layout(len(layers), len(self._rows))
        buffer = torch.zeros(layout.nbytes, dtype=torch.uint8, device=epoch.device)
        views = layout.views(buffer)
        seq, is_open = epoch.ledger.next_seq(layers)
        write_header(views, PackHeader(epoch.number, self._step.step_id, seq))
        views.rows.copy_(self._rows)
        views.generations.copy_(self._generations)
        if is_open:
            for i, layer in enumerate(layers):
                self._fill(views, i, layer, queries)
        else:
            views.fetch_pos.fill_(-1)
            views.fetch_slot.fill_(-1)
            views.log_weight.fill_(float("nan"))
            epoch.counters.withheld_packs_total += 1
        return buffer

    def _fill(
        self, views: PackViews, index: int, layer: int, queries: Mapping[int, torch.Tensor]
    ) -> None:
        epoch = self._epoch
        if layer == 0:
            for slots, end in zip(self._slots, self._ends, strict=True):
                epoch.store.note_read(slots[:end])
        selected = self._selected(layer, queries)
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
            log_weight=views.log_weight[index] if views.log_weight.numel() else None,
            scratch=epoch.scratch.mirror if epoch.scratch is not None else None,
        )
        epoch.mirror.commit(layer, self._rows, resident, last_used)
        views.fetch_pos[index] = fetch_pos
        views.fetch_slot[index] = fetch_slot
        k_pool, v_pool = epoch.store.k[layer], epoch.store.v[layer]
        gather_pack(k_pool, v_pool, self._slots, fetch_pos, views.k[index], views.v[index])
        self._count(selected, before, fetch_slot)

    def _selected(self, layer: int, queries: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return the positions ``[S, H, K]`` of `layer`: its own, or those that it shares."""
        source = self._epoch.program.source_of(layer)
        if source not in self._chosen:
            self._chosen[source] = self._select(source, queries)
        chosen = self._chosen[source]
        share = self._epoch.policy.context.share
        if source == layer or share is None:
            return chosen
        return chosen[:, list(share.head_maps[layer])]

    def _select(self, layer: int, queries: Mapping[int, torch.Tensor]) -> torch.Tensor:
        epoch, selection = self._epoch, self._epoch.settings.selection
        shape = (epoch.model.num_kv_heads, selection.budget_tokens)
        asked = self._asked
        if not len(asked.owners):
            return self._nothing(shape)
        stored = epoch.store.k[layer], epoch.store.v[layer]
        request = asked.request(
            layer,
            queries[layer],
            epoch.store.index(layer),
            stored,
            model=epoch.model,
            selection=selection,
            heads=epoch.program.slow_heads(layer),
            bounds=self._bounds(asked, stored[0]),
            scratch=epoch.scratch.score if epoch.scratch is not None else None,
        )
        chosen = epoch.policy.select(request)
        chosen.check((len(asked.owners), *shape))
        if len(asked.owners) == len(self._rows):
            return chosen.positions
        whole = self._nothing(shape)
        whole[self._asked_index] = chosen.positions
        return whole

    def _bounds(self, asked: Candidates, keys: torch.Tensor) -> PageBounds | None:
        """Return bounds of the keys by page, made anew in each step, if the policy reads them."""
        if self._epoch.policy.capabilities.index != "page_bounds":
            return None
        size = self._epoch.settings.selection.quest_page_tokens
        return page_bounds(keys, asked.slots, asked.lo, asked.hi, page_tokens=size)

    def _nothing(self, shape: tuple[int, int]) -> torch.Tensor:
        size = (len(self._rows), *shape)
        return torch.full(size, -1, dtype=torch.int32, device=self._epoch.device)

    def _count(
        self, selected: torch.Tensor, before: torch.Tensor, fetch_slot: torch.Tensor
    ) -> None:
        tally = self._epoch.tally
        # Both are shifted by one, so that the padding -1 falls on a place that never hits.
        shape = (*before.shape[:2], self._width + 1)
        known = torch.zeros(shape, dtype=torch.bool, device=before.device)
        known.scatter_(-1, (before + 1).clamp_(max=self._width).long(), 1)
        known[..., 0] = False
        num_selected = (selected >= 0).sum()
        hits = known.gather(-1, (selected + 1).long()).sum()
        is_fetched = fetch_slot >= 0
        replaced = before.gather(-1, fetch_slot.clamp(min=0).long()) >= 0
        self._epoch.counters.selections_total += len(self._rows)
        tally.add("selected_tokens_total", num_selected)
        tally.add("resident_hits_total", hits)
        tally.add("resident_misses_total", num_selected - hits)
        tally.add("fetched_rows_total", is_fetched.sum())
        tally.add("evictions_total", (replaced & is_fetched).sum())
