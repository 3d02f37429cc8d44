# SPDX-License-Identifier: Apache-2.0
"""A decode step: attend to what is resident, let the cache rank keep it fresh.

Per layer: append k, v to the ring; scatter the rows that the cache rank sent; attend to the
resident set; for exact rows and layers, merge the cache rank's part by log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tandemkv.cache_rank.protocol.messages import RowFlag, RowStep, StepBegin, StepKind, Timing
from tandemkv.cache_rank.protocol.step_program import TransferKind, exact_rows, sparse_rows
from tandemkv.kernels.attention import attend_resident
from tandemkv.kernels.merge import merge_attention
from tandemkv.kernels.placing import place

from .packs import PackQueue
from .runtime import Runtime


class _SampledRows(NamedTuple):
    """Who attends to samples, of the B requests of a step.

    `slots`, ``[B, num_samples]`` int64, are where the samples of each are; `selected` and `fast`,
    ``[B]`` bool, say who is selected for, and who of them is not slow in this step.
    """

    slots: torch.Tensor
    selected: torch.Tensor
    fast: torch.Tensor


class DecodeStep:
    """One decode forward pass over `rows`, each with `lengths` tokens after the step.

    `tokens`, the newest token of each row, are needed if `RefreshSchedule.wants_tokens`.
    """

    def __init__(
        self,
        runtime: Runtime,
        packs: PackQueue,
        rows: list[int],
        lengths: list[int],
        tokens: list[int] | None = None,
    ) -> None:
        self._runtime, self._packs = runtime, packs
        self._program = runtime.client.program
        newest = tokens if tokens is not None else [None] * len(rows)
        self._steps = [self._row_step(*row) for row in zip(rows, lengths, newest, strict=True)]
        resident = runtime.resident
        device = self._device = resident.device
        self._rows = place(rows, device)
        self._slots = place([resident.write_slot(n) for n in lengths], device)
        self._visible = resident.visible(lengths)
        self._ring_only = resident.visible_ring(lengths)
        self._sparse = self._indices(sparse_rows(self._steps))
        self._num_packed = len(self._program.packed_rows(self._steps))
        self._sample_moves = resident.sample_moves(lengths)
        self._sampled = self._sampled_rows() if resident.samples is not None else None
        self._exact = [self._indices(exact_rows(self._steps, flag)) for flag in (False, True)]
        self._slow_heads = [self._query_heads(n) for n in range(runtime.model.num_layers)]
        self._pack_of = {layers[-1]: layers for layers in self._program.packs()}
        self._pending_kv: list[torch.Tensor] = []
        dirty, tables = runtime.take_dirty(but=[])
        req_to_token = runtime.req_to_token_pool.req_to_token
        new_slots = req_to_token[self._rows, place([n - 1 for n in lengths], device)]
        table = torch.cat([*tables, new_slots.to(torch.int32)])
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
        self._selects = bool(self._num_packed) and self._program.selects_at(runtime.step_id)
        self._transfers = runtime.client.begin_step(step, table)
        runtime.note_lengths(rows, lengths)
        self._count(lengths)

    def _row_step(self, row: int, length: int, token: int | None) -> RowStep:
        runtime, generation = self._runtime, self._runtime.generation(row)
        flags = runtime.flags_for(length)
        if flags & RowFlag.SPARSE and runtime.refresh.is_slow(row, generation, token):
            flags |= RowFlag.SLOW
        return RowStep(
            row=row,
            generation=generation,
            length=length,
            prefix_len=length - 1,
            flags=flags,
            window=0,
        )

    def _query_heads(self, layer: int) -> torch.Tensor | None:
        """Return the query heads of the slow KV heads of `layer`, None if all are."""
        model, heads = self._runtime.model, self._program.slow_heads(layer)
        if len(heads) == model.num_kv_heads:
            return None
        size = model.gqa_group_size
        return place([head * size + i for head in heads for i in range(size)], self._device)

    def _sampled_rows(self) -> _SampledRows | None:
        """Return who attends to samples; None if nobody does."""
        samples = self._runtime.resident.samples
        selected = [s.flags & RowFlag.SPARSE and not s.flags & RowFlag.EXACT for s in self._steps]
        if samples is None or not any(selected):
            return None
        fast = [
            bool(is_selected) and not s.flags & RowFlag.SLOW
            for is_selected, s in zip(selected, self._steps, strict=True)
        ]
        return _SampledRows(
            slots=samples.slots(self._rows),
            selected=place([bool(x) for x in selected], self._device, torch.bool),
            fast=place(fast, self._device, torch.bool),
        )

    def _indices(self, steps: Sequence[RowStep]) -> torch.Tensor:
        wanted = {s.row for s in steps}
        found = [i for i, s in enumerate(self._steps) if s.row in wanted]
        return place(found, self._device)

    def _count(self, lengths: list[int]) -> None:
        counters = self._runtime.counters
        exact_layers = len(self._runtime.settings.selection.exact_layer_ids)
        counters.decode_steps_total += 1
        counters.sparse_rows_total += len(self._sparse)
        counters.slow_rows_total += sum(bool(s.flags & RowFlag.SLOW) for s in self._steps)
        counters.exact_rows_total += len(self._exact[0])
        counters.dense_rows_total += len(lengths) - len(self._exact[1])
        counters.exact_layer_rows_total += exact_layers * len(self._exact[1])
        counters.attended_tokens_total += sum(map(self._runtime.resident.num_visible, lengths))
        counters.context_tokens_total += sum(lengths)

    def on_layer_input(self, layer: int, stream: torch.Tensor) -> None:
        """Send the residual stream at the entry of `layer`, ``[B, hidden_size]``."""
        if self._transfers.wants(TransferKind.HIDDEN, (layer,)):
            self._transfers.send(TransferKind.HIDDEN, (layer,), stream[self._sparse])
            for target in self._program.targets_of(layer):
                self._expect_packs(target)

    @property
    def _selects_by_query(self) -> bool:
        return self._selects and self._program.timing is Timing.SAME_STEP_QUERY

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
        moves = None
        if resident.samples is not None and self._sample_moves is not None:
            moves = resident.samples.moves(layer, *self._sample_moves)
        resident.append(layer, self._rows, self._slots, k, v, moves=moves)
        if self._transfers.wants(TransferKind.QUERY, (layer,)):
            self._transfers.send(TransferKind.QUERY, (layer,), q[self._sparse])
            self._expect_packs(layer)
        is_exact_layer = layer in runtime.settings.selection.exact_layer_ids
        # A policy that attends completes every layer, with what is resident left to us.
        keeps_resident = self._program.attends and not is_exact_layer
        exact = self._exact[is_exact_layer or keeps_resident]
        heads = self._slow_heads[layer]
        if len(exact):
            sent = q[exact] if heads is None else q[exact][:, heads]
            self._transfers.send(TransferKind.EXACT_QUERY, (layer,), sent)
        self._packs.apply_for(layer, runtime.decode_step)
        visible = self._visible
        if len(exact) and heads is None and not keeps_resident:
            visible = visible.clone()
            visible[exact] = self._ring_only[exact]
        out, lse = attend_resident(
            q, resident.k[layer], resident.v[layer], self._rows, visible, scale=runtime.model.scale
        )
        if resident.samples is not None and self._sampled is not None and not is_exact_layer:
            # What the cache rank attends to as a whole leaves nothing to stand for.
            sampled = self._sampled
            active = sampled.fast if heads is None else sampled.selected
            resident.samples.attend(
                layer, q, sampled.slots, self._rows, active, out, lse, scale=runtime.model.scale
            )
        if len(exact):
            ring_out, ring_lse = out[exact], lse[exact]
            if heads is not None:  # the other heads keep to what is resident
                ring_out, ring_lse = self._attend_ring(layer, q, exact, heads)
            merged = self._merge_remote(layer, ring_out, ring_lse)
            if heads is None:
                out[exact] = merged.to(out.dtype)
            else:
                out[exact[:, None], heads] = merged.to(out.dtype)
            if is_exact_layer and self._selects_by_query:
                self._expect_packs(layer)  # selected with the exact layer's query
        self._append_remote(layer, q, k, v)
        return out.to(q.dtype)

    def _attend_ring(
        self, layer: int, q: torch.Tensor, exact: torch.Tensor, heads: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        resident = self._runtime.resident
        out, lse = attend_resident(
            q[exact],
            resident.k[layer],
            resident.v[layer],
            self._rows[exact],
            self._ring_only[exact],
            scale=self._runtime.model.scale,
        )
        return out[:, heads], lse[:, heads]

    def _merge_remote(self, layer: int, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        receive = self._transfers.receive(TransferKind.EXACT_OUTPUT, (layer,))
        receive.work.wait(None)
        remote = receive.buffer
        return merge_attention(out.float(), lse, remote[..., :-1], remote[..., -1])[0]

    def _expect_packs(self, layer: int) -> None:
        """Queue the packs of a same-step selection in `layer`, for itself and its followers."""
        for layers in self._program.selections(layer):
            receive = self._transfers.receive(TransferKind.PACK, layers)
            layout = self._program.pack_layout(len(layers), self._num_packed)
            self._packs.add(receive, layout, self._runtime.decode_step)

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
            layout = self._program.pack_layout(len(chosen), self._num_packed)
            self._packs.add(receive, layout, self._runtime.decode_step + 1)
