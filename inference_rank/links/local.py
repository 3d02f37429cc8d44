# SPDX-License-Identifier: Apache-2.0
"""Link ``local``: the engine works on lanes beside the forward pass, driven by this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tandemkv.cache_rank.protocol.engine import Engine
from tandemkv.cache_rank.protocol.engine_program import DecodeKind
from tandemkv.cache_rank.protocol.model_spec import ModelSpec
from tandemkv.inference_rank.links.layer_streams import LayerStreams
from tandemkv.inference_rank.links.look_ahead import LookAhead
from tandemkv.inference_rank.links.peer_flags import Signal
from tandemkv.inference_rank.links.peer_memory import seen_from
from tandemkv.inference_rank.links.remote_attention import RemoteAttention
from tandemkv.inference_rank.links.side_stream import SideStream
from tandemkv.inference_rank.residual_hooks import install_logits_hook
from tandemkv.kernels.flags import raise_flags

from .base import DecodeRows, ExtendRow


class LocalLink:
    """See `Link`; the engine's work is queued as the forward pass is, layer by layer.

    Parameters
    ----------
    runner : Any
        SGLang's model runner.
    engine : Engine
        Keeps the resident sets.
    model : ModelSpec
        Heads of this rank.
    max_batch : int
        Requests of a step at most.
    device, cache_device : torch.device
        Of the forward pass and of the engine.
    is_far : bool
        Whether the latter is another GPU, or to be taken for one.
    """

    def __init__(
        self,
        runner: Any,
        engine: Engine,
        model: ModelSpec,
        *,
        max_batch: int,
        device: torch.device,
        cache_device: torch.device,
        is_far: bool,
    ) -> None:
        self._engine, self.program = engine, engine.program
        self._num_layers = num_layers = model.num_layers
        program = self.program
        layers = range(num_layers)
        sizes: dict[str, Any] = {
            "max_batch": max_batch,
            "dtype": runner.dtype,
            "device": device,
            "cache_device": cache_device,
        }
        all_sparse = all(program.is_sparse_layer(x) for x in layers)
        attends_far = int(is_far and not all_sparse)  # `RemoteAttention` has the last of each
        num_rows, num_lanes = num_layers + attends_far, engine.num_lanes + attends_far
        self._side = SideStream(device, cache_device, num_rows, num_lanes, max_batch, is_far=is_far)
        # On the same GPU the engine reads the queries where they are.
        self._queries: LayerStreams | None = None
        self._far: RemoteAttention | None = None
        if is_far:
            width = model.num_qo_heads * model.head_dim
            self._send_queries(
                runner.token_to_kv_pool, attends=bool(attends_far), width=width, **sizes
            )
            engine.let_load_from(device, seen_from)
        self._kind, self._is_decode = DecodeKind.DENSE, False
        self._seeds: list[tuple[int, int]] = []
        self._ahead: LookAhead | None = None
        if program.needs_hidden:
            hidden = int(runner.model_config.hidden_size)
            self._ahead = LookAhead(
                runner.model, engine, self._side,
                LayerStreams(num_layers=num_layers, is_far=is_far, width=hidden, **sizes),
                is_selecting=lambda: self._is_decode and self._kind is DecodeKind.SELECTING,
                fetch=self._fetch, sends_beside=is_far,
            )  # fmt: skip
        if program.late_layers:
            install_logits_hook(runner.model, self._on_logits)

    def _send_queries(self, pool: Any, *, attends: bool, width: int, **sizes: Any) -> None:
        """Send queries to the engine's GPU, where it needs them or `attends` for exact layers."""
        if not (self.program.needs_query or attends):
            return
        num_layers = self._num_layers
        self._queries = LayerStreams(num_layers=num_layers, is_far=True, width=width, **sizes)
        if attends:
            self._far = RemoteAttention(
                self._engine, pool, self._side, self._queries,
                lane=self._engine.num_lanes, row=num_layers, width=width, **sizes,
            )  # fmt: skip

    # -- prefill -------------------------------------------------------------------------

    def begin_extend(self, requests: Sequence[ExtendRow]) -> None:
        """See `Link.begin_extend`."""
        self._is_decode = False
        self._side.begin_step()
        if self._ahead is not None:
            self._ahead.begin_step()
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
        self.recover()
        if self._ahead is not None:
            self._ahead.begin_step()
        self._engine.begin_step()
        if kind is not DecodeKind.DENSE or self._far is not None or self.program.attends:
            # Every lane reads what this loads.
            self._engine.begin_decode(
                step.rows, step.lengths, step.req_to_token,
                selects=kind is DecodeKind.SELECTING, num_cold=step.num_cold, slow=step.slow,
            )  # fmt: skip

    def enter_attention(self, layer: int) -> None:
        """See `Link.enter_attention`."""
        if self._ahead is not None:
            self._ahead.join_sent()

    def select_with_query(
        self, layer: int, query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, owner: Any,
        forward_batch: Any, save_kv_cache: bool,
    ) -> None:  # fmt: skip
        """See `Link.select_with_query`."""
        program, side, size = self.program, self._side, len(query)
        there: torch.Tensor | None = None
        if self._far is not None and not program.is_sparse_layer(layer):
            there = self._far.begin(query, k, v, owner, forward_batch, save_kv_cache)
        if not program.hands_over_query(self._kind, layer):
            return
        signal = side.signal(layer, size)
        if there is None:
            there = self._query_for_engine(layer, query, signal)
        elif signal is not None:
            raise_flags(signal.raised)
        with side.fork(there, lane=self._engine.lane_of(layer), signal=signal):
            self._engine.choose(layer, there)
            self._fetch(*program.fetched_by(layer), size=size)

    def remote_output(self, layer: int) -> torch.Tensor | None:
        """See `Link.remote_output`."""
        if self._far is None or self.program.is_sparse_layer(layer):
            return None
        return self._far.end(layer)

    def attend_selected(self, layer: int, query: torch.Tensor) -> torch.Tensor | None:
        """See `Link.attend_selected`; only on a CPU, where one thing is done after the other."""
        if not self.program.attends_in(layer):
            return None
        return self._engine.attend_selected(layer, query)

    def await_set(self, layer: int) -> torch.Tensor | None:
        """See `Link.await_set`."""
        return self._side.join_by_flags(layer)

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
            signal = side.signal(layer, batch_size)
            query = self._query_for_engine(layer, query, signal)
            with side.fork(query, lane=lane, signal=signal):
                engine.append(layer, batch_size)
                if selecting:
                    engine.choose(layer, query)
                    engine.fetch(layer, batch_size)
                else:
                    engine.observe(layer, query)
        elif later:
            # What its source chose is for the next step as well: not before it has attended.
            signal = side.signal(layer, batch_size)
            if signal is not None:
                raise_flags(signal.raised)
            with side.fork(lane=lane, signal=signal):
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
        self._side.begin_step()
        self._join()  # nothing to wait for, unless a step failed

    def _fetch(self, *layers: int, size: int) -> None:
        """Inside a fork: bring to `layers` what has been chosen for them, one after the other."""
        for layer in layers:
            self._engine.fetch(layer, size, flag=self._side.done_flags(layer))
            self._side.note_done(layer)

    def _query_for_engine(
        self, layer: int, query: torch.Tensor, signal: Signal | None
    ) -> torch.Tensor:
        if self._queries is None:
            return query
        return self._queries.put(layer, query.flatten(1), None, [signal]).view(query.shape)

    @property
    def _is_pending(self) -> bool:
        """Whether something is selected for the next step, and need not be joined yet."""
        return self._ahead is not None and self._ahead.is_pending

    def _on_logits(self) -> None:
        if self._is_pending:
            self._join()

    def _join(self) -> None:
        """End a step: whatever is beside it is done before the next one."""
        self._side.join_all()
        self._engine.end_step()
        if self._ahead is not None:
            self._ahead.is_pending = False
