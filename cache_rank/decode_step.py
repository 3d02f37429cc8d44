# SPDX-License-Identifier: Apache-2.0
"""A decode step: select for the sparse rows, attend for the exact ones, store the new tokens."""

from __future__ import annotations

import torch

from tandemkv.kernels.attention import attend_paged
from tandemkv.kernels.placing import place

from .attending import AttendedRows
from .epoch import Epoch
from .protocol.errors import ProtocolError
from .protocol.messages import RowFlag, StepBegin, Timing
from .protocol.step_program import Transfer, TransferKind, exact_rows
from .row_table import PADDING_ROW
from .selecting import SparseRows


class ExactRows:
    """Rows whose attention over ``[0, length - num_recent)`` is computed here.

    `packed` are those of them that a pack of the step is about, in the packs' order.
    """

    def __init__(self, epoch: Epoch, step: StepBegin, *, layer_is_exact: bool) -> None:
        self._epoch = epoch
        rows = exact_rows(step.rows, layer_is_exact)
        recent = epoch.settings.selection.num_recent_tokens
        hi = [0 if row.row == PADDING_ROW else max(0, row.length - recent) for row in rows]
        self._ends = hi
        self._hi = place(hi, epoch.device)
        index = place([row.row for row in rows], epoch.device)
        wanted = {row.row for row in epoch.program.packed_rows(step.rows)}
        packed = [i for i, row in enumerate(rows) if row.row in wanted]
        self.packed = place(packed, epoch.device)
        self._slots = epoch.rows.slots[index, : max(hi, default=0)]

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Return output and log-sum-exp ``[X, n, D + 1]`` float32 of `query` ``[X, n, D]``.

        The n query heads are all, or those of `StepProgram.slow_heads`.
        """
        store = self._epoch.store
        if layer == 0:
            for slots, end in zip(self._slots, self._ends, strict=True):
                store.note_read(slots[:end])
        model, heads = self._epoch.model, self._epoch.program.slow_heads(layer)
        pools = [(query, store.k[layer], store.v[layer])]
        if len(heads) != model.num_kv_heads:  # views of the pools: a list of heads would copy them
            groups = query.split(model.gqa_group_size, dim=1)
            pools = [
                (q, store.k[layer][:, head : head + 1], store.v[layer][:, head : head + 1])
                for q, head in zip(groups, heads, strict=True)
            ]
        parts = []
        for q, k, v in pools:
            out, lse = attend_paged(q, k, v, self._slots, self._hi, scale=model.scale)
            parts.append(torch.cat([out, lse.unsqueeze(-1)], dim=-1))
        self._epoch.tally.add("exact_rows_total", (self._hi > 0).sum())
        return torch.cat(parts, dim=1)


class DecodeStep:
    """Executes the transfers of one decode step.

    Parameters
    ----------
    epoch : Epoch
        State of the epoch; the new slots are entered here.
    step : StepBegin
        The step.
    slots : torch.Tensor
        ``[B]`` int32, the new slot of each request.
    """

    def __init__(self, epoch: Epoch, step: StepBegin, slots: torch.Tensor) -> None:
        self._epoch = epoch
        epoch.num_decode_steps += 1
        for row in step.rows:
            if row.row != PADDING_ROW and row.prefix_len != row.length - 1:
                raise ProtocolError(
                    f"row={row.row}: prefix_len={row.prefix_len} must be length - 1 in a decode"
                )
        epoch.rows.append_all(step.rows, slots)
        real = [i for i, row in enumerate(step.rows) if row.row != PADDING_ROW]
        self._real = place(real, epoch.device)
        self._new_slots = slots[self._real].long()
        # The queries of exact rows are of no use to a policy: nothing is selected for them.
        self._observed = [i for i in real if not step.rows[i].flags & RowFlag.EXACT]
        self._step = step
        has_packs = epoch.program.timing is not Timing.NONE
        self._sparse = SparseRows(epoch, step) if has_packs else None
        self._sparse_index = place(
            [
                i
                for i, row in enumerate(step.rows)
                if row.flags & RowFlag.SPARSE and not row.flags & RowFlag.EXACT
            ],
            epoch.device,
        )
        self._exact: dict[bool, ExactRows] = {}
        self._attended: AttendedRows | None = None
        self._hidden: torch.Tensor | None = None
        self._exact_query: torch.Tensor | None = None
        self._queries: dict[int, torch.Tensor] = {}

    def execute(self, transfer: Transfer) -> None:
        """Make one transfer with what belongs to it."""
        exchange = self._epoch.exchange
        match transfer.kind:
            case TransferKind.HIDDEN:
                self._hidden = exchange.receive(transfer)
            case TransferKind.QUERY:
                self._queries[transfer.layers[0]] = exchange.receive(transfer)
            case TransferKind.PACK | TransferKind.DELTA:
                exchange.send(transfer, self._pack(transfer.layers))
            case TransferKind.EXACT_QUERY:
                self._exact_query = exchange.receive(transfer)
            case TransferKind.EXACT_OUTPUT:
                exchange.send(transfer, self._attend(transfer.layers[0]))
            case TransferKind.STEP_KV:
                self._append(transfer.layers, exchange.receive(transfer))
            case _:
                raise AssertionError(transfer.kind)

    def finish(self) -> None:
        """Nothing is left to do after the last transfer."""

    def _pack(self, layers: tuple[int, ...]) -> torch.Tensor:
        epoch, sparse = self._epoch, self._sparse
        assert sparse is not None
        queries = self._queries
        if epoch.program.timing is Timing.SAME_STEP_HIDDEN:
            assert epoch.predictor is not None
            assert self._hidden is not None
            predict, hidden = epoch.predictor.predict_query, self._hidden
            sources = {epoch.program.source_of(layer) for layer in layers} - set(self._queries)
            for layer in sources:
                self._queries[layer] = predict(layer, hidden, sparse.positions)
        return sparse.pack(layers, queries)

    def _attend(self, layer: int) -> torch.Tensor:
        is_exact = layer in self._epoch.settings.selection.exact_layer_ids
        if self._epoch.program.attends and not is_exact:
            assert self._exact_query is not None
            self._attended = self._attended or AttendedRows(self._epoch, self._step)
            return self._attended.attend(layer, self._exact_query)
        if is_exact not in self._exact:
            self._exact[is_exact] = ExactRows(self._epoch, self._step, layer_is_exact=is_exact)
        rows, query = self._exact[is_exact], self._exact_query
        assert query is not None
        # What selects in exact steps, or in an exact layer for others, does so with their query.
        self._queries.setdefault(layer, query[rows.packed])
        return rows.attend(layer, query)

    def _append(self, layers: tuple[int, ...], values: torch.Tensor) -> None:
        """Store K and V of the new tokens; hand the queries to a next-step policy."""
        epoch, heads = self._epoch, self._epoch.model.num_kv_heads
        is_whole = len(self._real) == values.shape[1]
        for i, layer in enumerate(layers):
            kept = values[i] if is_whole else values[i, self._real]
            k, v = kept[:, :heads], kept[:, heads : 2 * heads]
            epoch.store.put(layer, self._new_slots, k, v)
            if epoch.program.timing is Timing.NEXT_STEP and epoch.program.is_selecting_layer(layer):
                self._observe(layer, values[i, :, 2 * heads :])

    def _observe(self, layer: int, queries: torch.Tensor) -> None:
        policy = self._epoch.policy
        self._queries[layer] = queries[self._sparse_index]
        if policy.capabilities.wants_query_window and self._observed:
            rows = [self._step.rows[i] for i in self._observed]
            positions = place([row.length - 1 for row in rows], self._epoch.device)
            owners = [(row.row, row.generation) for row in rows]
            policy.observe(layer, owners, queries[self._observed], positions)
