# SPDX-License-Identifier: Apache-2.0
"""A prefill step: attend to the prompt in staging, hand its K/V over, fill the resident set.

Staging is two layers' worth: a prefix that the cache rank holds already (earlier chunks, or a
radix hit) comes back layer by layer, the next layer's while this one is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandemkv.cache_rank.protocol.messages import RowFlag, RowStep, StepBegin, StepKind
from tandemkv.cache_rank.protocol.step_program import TransferKind, seeded_rows
from tandemkv.kernels.causal_attention import attend_causal

from .runtime import Runtime


@dataclass(frozen=True, slots=True)
class ExtendBatch:
    """The requests of a prefill step. `prefix_lens` tokens of each are stored already."""

    rows: list[int]
    prefix_lens: list[int]
    lengths: list[int]


class ExtendStep:
    """One prefill forward pass."""

    def __init__(self, runtime: Runtime, batch: ExtendBatch) -> None:
        self._runtime = runtime
        self._steps = [
            self._row_step(*row)
            for row in zip(batch.rows, batch.prefix_lens, batch.lengths, strict=True)
        ]
        self._seeded = seeded_rows(self._steps)
        dirty, tables = runtime.take_dirty(but=batch.rows)
        req_to_token = runtime.req_to_token_pool.req_to_token
        tables += [
            req_to_token[row, :length].to(torch.int32)
            for row, length in zip(batch.rows, batch.lengths, strict=True)
        ]
        table = torch.cat(tables)
        runtime.step_id += 1
        packs = runtime.packs
        step = StepBegin(
            epoch=runtime.client.epoch,
            step_id=runtime.step_id,
            kind=StepKind.EXTEND,
            rows=self._steps,
            dirty=dirty,
            num_table_slots=table.numel(),
            applied_seq=packs.applied_seq if packs is not None else 0,
        )
        self._transfers = runtime.client.begin_step(step, table)
        runtime.note_lengths(batch.rows, batch.lengths)
        counters = runtime.counters
        counters.extend_steps_total += 1
        counters.restored_tokens_total += sum(batch.prefix_lens)
        counters.seeded_rows_total += len(self._seeded)

    def _row_step(self, row: int, prefix_len: int, length: int) -> RowStep:
        runtime = self._runtime
        flags = 0
        if row != runtime.middle_chunk_row:
            flags = RowFlag.SEED | runtime.flags_for(length)
        window = 0
        if flags & RowFlag.SEED and flags & RowFlag.SPARSE:
            window = min(runtime.settings.selection.seed_window, length - prefix_len)
        return RowStep(
            row=row,
            generation=runtime.generation(row),
            length=length,
            prefix_len=prefix_len,
            flags=int(flags),
            window=window,
        )

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return the attention output of the new tokens, ``[T, num_qo_heads, head_dim]``.

        Parameters
        ----------
        layer : int
            Layer id; layers come in ascending order.
        q : torch.Tensor
            ``[T, num_qo_heads, head_dim]``, the new tokens of all requests, concatenated.
        k, v : torch.Tensor
            ``[T, num_kv_heads, head_dim]``.
        """
        self._transfers.send(TransferKind.CHUNK_KV, (layer,), torch.stack((k, v)))
        if self._seeded and self._runtime.client.program.is_selecting_layer(layer):
            self._send_seed_queries(layer, q)
        prefix_k, prefix_v = self._restored(layer)
        out = torch.empty_like(q)
        start, prefix_start = 0, 0
        prompts = []
        for step in self._steps:
            end = start + step.length - step.prefix_len
            prefix_end = prefix_start + step.prefix_len
            full_k, full_v = k[start:end], v[start:end]
            if step.prefix_len:
                full_k = torch.cat((prefix_k[prefix_start:prefix_end], full_k))
                full_v = torch.cat((prefix_v[prefix_start:prefix_end], full_v))
            out[start:end] = attend_causal(
                q[start:end], full_k, full_v, scale=self._runtime.model.scale
            )
            prompts.append((full_k, full_v))
            start, prefix_start = end, prefix_end
        self._fill(layer, prompts)
        return out

    @property
    def row_steps(self) -> Sequence[RowStep]:
        """The requests of the step."""
        return self._steps

    def finish(self) -> None:
        """Check that the step made every transfer that was announced."""
        self._transfers.check_complete()

    def _send_seed_queries(self, layer: int, q: torch.Tensor) -> None:
        parts, start = [], 0
        for step in self._steps:
            end = start + step.length - step.prefix_len
            if step.window:
                parts.append(q[end - step.window : end])
            start = end
        self._transfers.send(TransferKind.SEED_QUERY, (layer,), torch.cat(parts))

    def _restored(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._transfers.expects(TransferKind.RESTORE, (layer,)):
            empty = torch.empty(0, device=self._runtime.resident.device)
            return empty, empty
        receive = self._transfers.receive(TransferKind.RESTORE, (layer,))
        receive.work.wait(None)
        return receive.buffer[0], receive.buffer[1]

    def _fill(self, layer: int, prompts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        resident = self._runtime.resident
        for step, (k, v) in zip(self._steps, prompts, strict=True):
            if step.flags & RowFlag.SEED:
                resident.fill_from_prompt(layer, step.row, k, v)
        if not self._transfers.expects(TransferKind.SEED, (layer,)):
            return
        receive = self._transfers.receive(TransferKind.SEED, (layer,))
        receive.work.wait(None)
        by_row = {s.row: prompt for s, prompt in zip(self._steps, prompts, strict=True)}
        for i, step in enumerate(self._seeded):
            resident.seed(layer, step.row, receive.buffer[i], *by_row[step.row])
