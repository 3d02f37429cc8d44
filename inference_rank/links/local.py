# SPDX-License-Identifier: Apache-2.0
"""Link ``local``: the engine works on lanes beside the forward pass, driven by this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tandemkv.cache_rank.protocol.engine import Engine
from tandemkv.cache_rank.protocol.engine_program import DecodeKind
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.inference_rank.sglang.residual_hooks import (
    check_whole,
    install_logits_hook,
    install_residual_hooks,
)
from tandemkv.kernels.step_flags import StepWait

from .base import DecodeRows, ExtendRow
from .side_stream import SideStream


class LocalLink:
    """See `Link`; the engine's work is queued as the forward pass is, layer by layer."""

    def __init__(
        self,
        runner: Any,
        engine: Engine,
        model: ModelSpec,
        *,
        max_batch: int,
        device: torch.device,
    ) -> None:
        self._engine, self.program = engine, engine.program
        num_layers, self._linear = model.num_layers, frozenset(model.linear_layers)
        self._side = SideStream(device, num_layers, engine.num_lanes)
        self._kind, self._is_decode = DecodeKind.DENSE, False
        self._num_requests = 0
        self._seeds: list[tuple[int, int]] = []
        self._is_pending = False
        """Whether something is selected for the next step, and need not be joined yet."""
        if self.program.needs_hidden:
            shape = (num_layers, max_batch, int(runner.model_config.hidden_size))
            self._streams = torch.zeros(shape, dtype=runner.dtype, device=device)
            install_residual_hooks(runner.model, self._on_stream)
        if self.program.late_layers:
            install_logits_hook(runner.model, self._on_logits)

    # -- prefill -------------------------------------------------------------------------

    def begin_extend(self, requests: Sequence[ExtendRow]) -> None:
        """See `Link.begin_extend`."""
        self._is_decode = self._is_pending = False
        tables = [request.table for request in requests]
        with self._side.fork(*tables):
            self._engine.begin_extend(
                [request.row for request in requests],
                [request.prefix_len for request in requests],
                [request.length for request in requests],
                tables,
            )
        self._seeds = [(i, r.row) for i, r in enumerate(requests) if r.window is not None]

    def extend(self, layer: int, slots: torch.Tensor, windows: Sequence[torch.Tensor]) -> None:
        """See `Link.extend`."""
        with self._side.fork(slots, *windows):
            self._engine.extend(layer, slots)
            if windows:
                for (request, row), window in zip(self._seeds, windows, strict=True):
                    self._engine.seed(layer, request, row, window)

    def end_extend(self) -> None:
        """See `Link.end_extend`."""
        self._join()

    def seed_identity(self, rows: torch.Tensor, tables: torch.Tensor | None) -> None:
        """See `Link.seed_identity`."""
        with self._side.fork(rows, tables):
            self._engine.seed_identity(rows, tables)

    # -- decode --------------------------------------------------------------------------

    def begin_decode(self, kind: DecodeKind, step: DecodeRows) -> None:
        """See `Link.begin_decode`."""
        self._is_decode, self._kind = True, kind
        self._num_requests = len(step.rows)
        self.recover()
        self._engine.begin_step()
        if kind is not DecodeKind.DENSE or self.program.attends:
            # Every lane reads what this loads.
            self._engine.set_num_cold(step.num_cold)
            self._engine.begin_decode(
                step.rows, step.lengths, step.req_to_token,
                selects=kind is DecodeKind.SELECTING, slow=step.slow,
            )  # fmt: skip

    def enter_attention(self, layer: int) -> None:
        """See `Link.enter_attention`: behind it the stream is written to again."""
        del layer
        self._side.await_read()

    def select_with_query(
        self, layer: int, query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, owner: Any,
        forward_batch: Any, save_kv_cache: bool,
    ) -> None:  # fmt: skip
        """See `Link.select_with_query`."""
        program = self.program
        if not program.hands_over_query(self._kind, layer):
            return
        with self._side.fork(query, lane=self._engine.lane_of(layer)):
            self._engine.choose(layer, query)
            self._fetch(*program.fetched_by(layer), size=len(query))

    def remote_output(self, layer: int) -> torch.Tensor | None:
        """See `Link.remote_output`: K and V of all layers are here."""
        return None

    def attend_selected(self, layer: int, query: torch.Tensor) -> torch.Tensor | None:
        """See `Link.attend_selected`; only on a CPU, where one thing is done after the other."""
        if not self.program.attends_in(layer):
            return None
        return self._engine.attend_selected(layer, query)

    def await_set(self, layer: int) -> StepWait | None:
        """See `Link.await_set`: an event is waited for."""
        self._side.join(layer)
        return None

    def resident_positions(self, layer: int) -> torch.Tensor | None:
        """See `Link.resident_positions`."""
        return self._engine.resident_positions(layer)

    def attended(self, layer: int, query: torch.Tensor, batch_size: int) -> None:
        """See `Link.attended`."""
        program, side, engine = self.program, self._side, self._engine
        lane, selecting = engine.lane_of(layer), program.selects_later(self._kind)
        # What is selected now is for a later step, which begins when everything beside this one
        # was joined.
        later = program.hands_over_later(self._kind, layer)
        if later and program.is_source(layer):
            with side.fork(query, lane=lane):
                engine.append(layer, batch_size)
                if selecting:
                    engine.choose(layer, query)
                    engine.fetch(layer, batch_size)
                else:
                    engine.observe(layer, query)
        elif later:
            # What its source chose is for the next step as well: not before it has attended.
            with side.fork(lane=lane):
                engine.fetch(layer, batch_size)
        elif program.indexes(self._kind, layer):
            side.defer(lane, lambda: engine.append(layer, batch_size))

    def end_step(self) -> None:
        """See `Link.end_step`."""
        if self._is_pending:
            self._side.finish_deferred()
        else:
            self._join()

    def recover(self) -> None:
        """See `Link.recover`."""
        self._join()  # nothing to wait for, unless a step failed

    def _fetch(self, *layers: int, size: int) -> None:
        """Inside a fork: bring to `layers` what has been chosen for them, one after the other."""
        for layer in layers:
            self._engine.fetch(layer, size)
            self._side.note_done(layer)

    def _on_stream(self, layer: int, hidden: torch.Tensor) -> None:
        """Let the engine select for a layer where the forward pass enters an earlier one."""
        if not self._is_decode or self._kind is not DecodeKind.SELECTING:
            return
        size, rank, side, program = len(hidden), self._engine, self._side, self.program
        targets = program.targets_of(layer)
        if not targets and layer not in program.late_layers:
            return
        check_whole(layer, hidden, self._num_requests)
        stream = self._streams[layer, :size]
        # Not where nobody calls `enter_attention`, nor in a lane that has a selection to do before.
        is_beside = layer not in self._linear
        is_beside &= not targets or targets[-1] - layer <= rank.num_lanes
        if not is_beside:
            stream.copy_(hidden)
        lanes = [rank.lane_of(target) for target in targets]
        # At the first layer two selections may begin; nobody can wait for the second before the
        # first is done, and beside each other they take 274 us instead of 185 (H200, 8 x 64K).
        for target, lane, after in zip(targets, lanes, (None, *lanes), strict=False):
            with side.fork(hidden, lane=lane, after=after):
                if after is None and is_beside:
                    self._copy(stream, hidden)
                rank.choose_ahead(target, stream)
                self._fetch(target, *program.followers_of(target), size=size)
        if not targets:
            with side.fork(hidden, lane=rank.lane_of(layer)):
                self._copy(stream, hidden)
        elif layer == program.last_entry:
            self._select_late(size, behind=lanes[-1])

    def _copy(self, stream: torch.Tensor, hidden: torch.Tensor) -> None:
        """Inside a fork: keep a stream that is written to again once the layer has attended."""
        stream.copy_(hidden)
        self._side.note_read()

    def _select_late(self, size: int, *, behind: int) -> None:
        """Select for late layers and the next step, behind the step's last selection.

        That one began when the forward pass had come to its layer: late layers have attended.
        """
        rank = self._engine
        for layer in self.program.late_layers:
            lane = rank.lane_of(layer)
            with self._side.fork(lane=lane, behind=behind):
                rank.choose_late(layer, self._streams[layer, :size])
                rank.fetch(layer, size)
            behind, self._is_pending = lane, True

    def _on_logits(self) -> None:
        if self._is_pending:
            self._join()

    def _join(self) -> None:
        """End a step: whatever is beside it is done before the next one."""
        self._side.join_all()
        self._engine.end_step()
        self._is_pending = False
