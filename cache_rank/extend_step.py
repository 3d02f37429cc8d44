# SPDX-License-Identifier: Apache-2.0
"""A prefill step: give prefixes back, store the new tokens, choose what is resident first."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .epoch import Epoch
from .policies.attending import AttendingPolicy
from .policies.base import SeedInput, StoredKV
from .protocol.messages import RowFlag, RowStep, StepBegin
from .protocol.step_program import Transfer, TransferKind, seeded_rows
from .row_table import PADDING_ROW
from .seeding import fill_set, make_seed_input


class ExtendStep:
    """Executes the transfers of one extend.

    Parameters
    ----------
    epoch : Epoch
        State of the epoch; the rows are assigned here.
    step : StepBegin
        The step.
    tables : Sequence[torch.Tensor]
        Slots ``[0, length)`` of each request, int32.
    """

    def __init__(self, epoch: Epoch, step: StepBegin, tables: Sequence[torch.Tensor]) -> None:
        self._epoch = epoch
        self._step = step
        for row, slots in zip(step.rows, tables, strict=True):
            displaced = epoch.rows.assign(row, slots)
            if displaced is not None:
                epoch.release(row.row, displaced)
        prefixes = [t[: r.prefix_len] for r, t in zip(step.rows, tables, strict=True)]
        chunks = [t[r.prefix_len :] for r, t in zip(step.rows, tables, strict=True)]
        self._prefix_slots = torch.cat(prefixes).long()
        self._chunk_slots = torch.cat(chunks).long()
        self._seeded = seeded_rows(step.rows)
        self._tables = {r.row: t for r, t in zip(step.rows, tables, strict=True)}
        self._windows: tuple[torch.Tensor, ...] = ()

    def execute(self, transfer: Transfer) -> None:
        """Make one transfer with what belongs to it."""
        epoch, exchange = self._epoch, self._epoch.exchange
        match transfer.kind:
            case TransferKind.RESTORE:
                layer = transfer.layers[0]
                if layer == 0:
                    epoch.store.note_read(self._prefix_slots)
                exchange.send(transfer, epoch.store.read(layer, self._prefix_slots))
            case TransferKind.CHUNK_KV:
                k, v = exchange.receive(transfer)
                epoch.store.put(transfer.layers[0], self._chunk_slots, k, v)
            case TransferKind.SEED_QUERY:
                queries = exchange.receive(transfer)
                self._windows = queries.split([row.window for row in self._seeded])
            case TransferKind.SEED:
                exchange.send(transfer, self._seed(transfer.layers[0]))
            case _:
                raise AssertionError(transfer.kind)

    def finish(self) -> None:
        """Enter whose the books are, and count."""
        for row in self._step.rows:
            if row.row == PADDING_ROW or not row.flags & RowFlag.SEED:
                continue
            self._epoch.counters.seeds_total += 1
            if row.flags & RowFlag.EXACT or not self._epoch.policy.capabilities.selects:
                continue  # what such a row has resident is unknown here, and not asked for
            if row.flags & RowFlag.SPARSE:
                self._epoch.mirror.claim(row.row, row.generation)
            else:
                self._epoch.mirror.seed_identity(row.row, row.generation)

    def _seed(self, layer: int) -> torch.Tensor:
        epoch = self._epoch
        chosen = []
        for row, window in zip(self._seeded, self._windows, strict=True):
            request = self._seed_input(layer, row, window)
            chosen.append(self._choose(row, request))
            if row.row == PADDING_ROW:
                continue
            epoch.mirror.seed(layer, row.row, chosen[-1])
            epoch.policy.observe_prompt(layer, request.owner, window, request.positions)
            if isinstance(epoch.policy, AttendingPolicy):
                epoch.policy.observe_stored(request)
        return torch.stack(chosen)

    def _choose(self, row: RowStep, request: SeedInput) -> torch.Tensor:
        """Return positions for the slots ``[H, R]``: the sink, then the best by score."""
        epoch, hi = self._epoch, request.hi

        def score() -> torch.Tensor:
            if row.row == PADDING_ROW:
                shape = (epoch.model.num_kv_heads, hi)
                return torch.full(shape, float("-inf"), device=epoch.device)
            if request.layer == 0:
                epoch.store.note_read(self._tables[row.row][:hi])
            return epoch.policy.seed_scores(request)

        return fill_set(
            score,
            num_heads=epoch.model.num_kv_heads,
            length=row.length,
            selection=epoch.settings.selection,
            num_resident=epoch.mirror.num_resident,
            device=epoch.device,
        )

    def _seed_input(self, layer: int, row: RowStep, window: torch.Tensor) -> SeedInput:
        epoch, slots = self._epoch, self._tables[row.row]
        return make_seed_input(
            layer,
            (row.row, row.generation),
            window,
            epoch.store.index(layer),
            StoredKV(epoch.store.k[layer], epoch.store.v[layer], slots.unsqueeze(0)),
            pages=slots,
            page_size=1,
            length=row.length,
            selection=epoch.settings.selection,
            scale=epoch.model.scale,
        )
