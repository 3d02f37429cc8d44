# SPDX-License-Identifier: Apache-2.0
"""A decode step: attend to what is resident, let the cache rank keep it fresh.

Per layer: append k, v to the ring; scatter the rows that the cache rank sent; attend to the
resident set; for exact rows and layers, merge the cache rank's part by log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandemkv.cache_rank.protocol.messages import RowStep, StepBegin, StepKind, Timing
from tandemkv.cache_rank.protocol.step_program import TransferKind, exact_rows, sparse_rows
from tandemkv.kernels.attention import attend_resident
from tandemkv.kernels.merge import merge_attention

from .packs import PackQueue
from .runtime import Runtime


class DecodeStep:
    """One decode forward pass over `rows`, each with `lengths` tokens after the step."""

    def __init__(
        self, runtime: Runtime, packs: PackQueue, rows: list[int], lengths: list[int]
    ) -> None:
        self._runtime, self._packs = runtime, packs
        self._program = runtime.client.program
        self._steps = [self._row_step(r, n) for r, n in zip(rows, lengths, strict=True)]
        resident = runtime.resident
        self._rows = torch.tensor(rows, dtype=torch.int64)
        self._slots = torch.tensor([resident.write_slot(n) for n in lengths], dtype=torch.int64)
        self._visible = resident.visible(lengths)
        self._ring_only = resident.visible_ring(lengths)
        self._sparse = self._indices(sparse_rows(self._steps))
        self._exact = [self._indices(exact_rows(self._steps, flag)) for flag in (False, True)]
        self._pack_of = {layers[-1]: layers for layers in self._program.packs()}
        self._pending_kv: list[torch.Tensor] = []
        dirty, tables = runtime.take_dirty(but=[])
        req_to_token = runtime.req_to_token_pool.req_to_token
        newest = req_to_token[self._rows, torch.tensor(lengths, dtype=torch.int64) - 1]
        table = torch.cat([*tables, newest.to(torch.int32)])
        runtime.step_id += 1
        runtime.decode_step += 1
        step = StepBegin(
            epoch=runtime.client.epoch,
            step_id=runtime.step_id,
            kind=StepKind.DECODE,
            rows=self._steps,
            dirty=dirty,
            num_table_slots=table.numel(),
            applied_seq=packs.applied_seq,
        )
        self._selects = bool(len(self._sparse)) and self._program.selects_at(runtime.step_id)
        self._transfers = runtime.client.begin_step(step, table)
        runtime.note_lengths(rows, lengths)
        self._count(lengths)

    def _row_step(self, row: int, length: int) -> RowStep:
        return RowStep(
            row=row,
            generation=self._runtime.generation(row),
            length=length,
            prefix_len=length - 1,
            flags=self._runtime.flags_for(length),
            window=0,
        )

    def _indices(self, steps: Sequence[RowStep]) -> torch.Tensor:
        wanted = {s.row for s in steps}
        found = [i for i, s in enumerate(self._steps) if s.row in wanted]
        return torch.tensor(found, dtype=torch.int64)

    def _count(self, lengths: list[int]) -> None:
        counters = self._runtime.counters
        exact_layers = len(self._runtime.settings.selection.exact_layers)
        counters.decode_steps_total += 1
        counters.sparse_rows_total += len(self._sparse)
        counters.exact_rows_total += len(self._exact[0])
        counters.dense_rows_total += len(lengths) - len(self._exact[1])
        counters.exact_layer_rows_total += exact_layers * len(self._exact[1])
        counters.attended_tokens_total += int(self._visible.sum())
        counters.context_tokens_total += sum(lengths)

    def on_layer_input(self, layer: int, stream: torch.Tensor) -> None:
        """Send the residual stream at the entry of `layer`, ``[B, hidden_size]``."""
        if self._transfers.wants(TransferKind.HIDDEN, (layer,)):
            self._transfers.send(TransferKind.HIDDEN, (layer,), stream[self._sparse])
            for target in self._program.targets_of(layer):
                receive = self._transfers.receive(TransferKind.PACK, (target,))
                layout = self._program.pack_layout(1, len(self._sparse))
                self._packs.add(receive, layout, self._runtime.decode_step)

    @property
    def wants_layer_input(self) -> bool:
        """Whether `on_layer_input` is needed in this step."""
        return self._selects and self._program.timing is Timing.SAME_STEP_HIDDEN

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return the attention output, ``[B, num_qo_heads, head_dim]``.

        Parameters
        ----------
        layer : int
            Layer id; layers come in ascending order.
        q : torch.Tensor
            ``[B, num_qo_heads, head_dim]``.
        k, v : torch.Tensor
            ``[B, num_kv_heads, head_dim]``, the new token of each request.
        """
        runtime, resident = self._runtime, self._runtime.resident
        resident.append(layer, self._rows, self._slots, k, v)
        if self._transfers.wants(TransferKind.QUERY, (layer,)):
            self._transfers.send(TransferKind.QUERY, (layer,), q[self._sparse])
            receive = self._transfers.receive(TransferKind.PACK, (layer,))
            layout = self._program.pack_layout(1, len(self._sparse))
            self._packs.add(receive, layout, runtime.decode_step)
        is_exact_layer = layer in runtime.settings.selection.exact_layers
        exact = self._exact[is_exact_layer]
        if len(exact):
            self._transfers.send(TransferKind.EXACT_QUERY, (layer,), q[exact])
        self._packs.apply_for(layer, runtime.decode_step)
        visible = self._visible
        if len(exact):
            visible = visible.clone()
            visible[exact] = self._ring_only[exact]
        out, lse = attend_resident(
            q, resident.k[layer], resident.v[layer], self._rows, visible, scale=runtime.model.scale
        )
        if len(exact):
            receive = self._transfers.receive(TransferKind.EXACT_OUTPUT, (layer,))
            receive.work.wait(None)
            remote = receive.buffer
            merged, _ = merge_attention(
                out[exact].float(), lse[exact], remote[..., :-1], remote[..., -1]
            )
            out[exact] = merged.to(out.dtype)
        self._append_remote(layer, q, k, v)
        return out.to(q.dtype)

    @property
    def row_steps(self) -> Sequence[RowStep]:
        """The requests of the step."""
        return self._steps

    def finish(self) -> None:
        """Check that the step made every transfer that was announced."""
        self._transfers.check_complete()

    def _append_remote(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        parts = (k, v, q) if self._program.timing is Timing.NEXT_STEP else (k, v)
        self._pending_kv.append(torch.cat(parts, dim=1))
        layers = self._pack_of.get(layer)
        if layers is None:
            return
        self._transfers.send(TransferKind.STEP_KV, layers, torch.stack(self._pending_kv))
        self._pending_kv = []
        chosen = tuple(t for t in layers if self._program.is_selecting_layer(t))
        if chosen and self._transfers.expects(TransferKind.DELTA, chosen):
            receive = self._transfers.receive(TransferKind.DELTA, chosen)
            layout = self._program.pack_layout(len(chosen), len(self._sparse))
            due = self._runtime.decode_step + self._runtime.settings.selection.lag
            self._packs.add(receive, layout, due)
