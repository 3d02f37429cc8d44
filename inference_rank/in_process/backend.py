# SPDX-License-Identifier: Apache-2.0
"""SGLang's attention backend ``tandemkv`` with an in-process cache rank.

K/V stay in SGLang's own pool, so prefill, radix hits, retraction and slot reuse are SGLang's
from end to end. Decode attends to resident sets that lie behind the tokens in the same pool;
the cache rank keeps them fresh on a stream of its own, inside SGLang's decode graph.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from tandemkv.cache_rank.protocol.local import LocalCacheRank
from tandemkv.inference_rank.residual_hooks import install_logits_hook
from tandemkv.kernels.flags import raise_flags, wait_flags

from .dense_steps import DenseSteps
from .far_attention import FarAttention
from .graph_variants import PlanFence, PlansApart, StepKind
from .layer_streams import LayerStreams
from .look_ahead import LookAhead
from .peer_flags import Signal
from .peer_memory import seen_from
from .resident_attention import FlashInferResident, PagedResident
from .resident_home import ResidentHome
from .side_stream import SideStream


class InProcessBackend(AttentionBackend):
    """Attention over resident sets of this process's cache rank.

    Parameters
    ----------
    runner : Any
        SGLang's model runner.
    full : AttentionBackend
        SGLang's own backend: prefill, and layers that attend to everything.
    rank : LocalCacheRank
        Keeps the resident sets.
    home : ResidentHome
        Where they lie, and what decode attends to.
    cache_device : torch.device
        Where the cache rank works.
    is_far : bool
        Whether that is another GPU, or to be taken for one.
    """

    def __init__(
        self, runner: Any, full: AttentionBackend, rank: LocalCacheRank, home: ResidentHome,
        *, cache_device: torch.device, is_far: bool, seed_window: int, dense: DenseSteps,
        num_resident: int, runtime: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self._full, self._rank = full, rank
        self._full_plans = PlansApart(full)
        self._fence = PlanFence(home.table.slots.device)
        self._home, self._table = home, home.table
        self._runtime = runtime
        self._seed_window, self._num_resident = seed_window, num_resident
        self._dense, self._lengths = dense, dense.base
        self._pool = runner.req_to_token_pool
        is_cuda = cache_device.type == "cuda"
        self._sparse: FlashInferResident | PagedResident = (
            FlashInferResident(runner, home.table, home.pool, home.samples)
            if is_cuda
            else PagedResident(home.table, home.pool, home.samples)
        )
        self._num_layers = int(runner.model_config.num_hidden_layers)
        layers = range(self._num_layers)
        self._is_sparse = [rank.is_sparse_layer(x) for x in layers]
        device = home.table.slots.device
        all_sparse = all(self._is_sparse)
        # Exact layers: by SGLang's backend here, or by the GPU that has the K/V.
        self._needs_full = not (all_sparse or is_far)
        model, max_batch = runtime.model, len(home.table.slots)
        sizes: dict[str, Any] = {
            "max_batch": max_batch,
            "dtype": runner.dtype,
            "device": device,
            "cache_device": cache_device,
        }
        attends_far = int(is_far and not all_sparse)  # `FarAttention` has the last of each
        num_rows, num_lanes = self._num_layers + attends_far, rank.num_lanes + attends_far
        self._side = SideStream(device, cache_device, num_rows, num_lanes, max_batch, is_far=is_far)
        # On the same GPU the cache rank reads the queries where they are.
        self._queries = self._far = None
        sizes["width"] = model.num_qo_heads * model.head_dim
        if is_far and (rank.needs_query or attends_far):
            self._queries = LayerStreams(num_layers=self._num_layers, is_far=is_far, **sizes)
        if self._queries is not None and attends_far:
            self._far = FarAttention(
                rank, runner.token_to_kv_pool, self._side, self._queries, lane=rank.num_lanes,
                row=self._num_layers, **sizes,
            )  # fmt: skip
        self._kind = self.captured_kind = StepKind.DENSE
        self.shares_gpu = cache_device == device
        self._is_decode = False
        self._seeds: list[tuple[int, int, int, int]] = []
        self._fills: list[tuple[int, torch.Tensor]] = []
        if is_far:
            rank.let_load_from(device, seen_from)
        self._ahead: LookAhead | None = None
        if rank.needs_hidden:
            sizes["width"] = int(runner.model_config.hidden_size)
            self._ahead = LookAhead(
                runner.model, rank, self._side,
                LayerStreams(num_layers=self._num_layers, is_far=is_far, **sizes),
                is_selecting=lambda: self._is_decode and self._kind is StepKind.SELECTING,
                fetch=self._fetch, num_layers=self._num_layers, sends_beside=is_far,
            )  # fmt: skip
        if rank.late_layers:
            install_logits_hook(runner.model, self._on_logits)

    # -- SGLang's contract ---------------------------------------------------------------

    def support_triton(self) -> bool:
        """No Triton metadata is needed from SGLang."""
        return False

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of padding rows."""
        return 1

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what captured graphs read."""
        if self._needs_full:
            self._full.init_cuda_graph_state(max_bs, max_num_tokens)
        assert isinstance(self._sparse, FlashInferResident)
        self._sparse.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare a step that runs without a graph."""
        mode = forward_batch.forward_mode
        self._is_decode = mode.is_decode()
        if mode.is_idle():
            return
        if self._is_decode:
            self._begin_decode(forward_batch, in_capture=False, in_graph=False)
        else:
            with self._fence.planning():
                self._full.init_forward_metadata(forward_batch)
            self._begin_extend(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare a step that is captured or replayed."""
        self._is_decode = True
        self._begin_decode(forward_batch, in_capture=in_capture, in_graph=True)

    def forward_extend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Prefill attention of one layer, by SGLang's own backend."""
        out: torch.Tensor = self._full.forward_extend(
            q, k, v, layer, forward_batch, save_kv_cache, **kwargs
        )
        index = layer.layer_id
        if self._is_sparse[index] and not self._is_decode:
            queries = q.view(-1, layer.tp_q_head_num, layer.head_dim)
            self._index_and_seed(
                index, forward_batch, [queries[start:end] for _, _, start, end in self._seeds]
            )
        elif self._rank.is_source(index) and not self._is_decode:
            self._extend(index, forward_batch)
        return self._after(index, out)

    def forward_decode(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Decode attention of one layer."""
        index, size = layer.layer_id, forward_batch.batch_size
        if self._ahead is not None:
            self._ahead.join_sent()
        rank, side = self._rank, self._side
        lane, own = rank.lane_of(index), q.view(-1, layer.tp_q_head_num, layer.head_dim)
        selecting, source = self._kind is StepKind.SELECTING, rank.is_source(index)
        selects, does_more = selecting and source, self._kind is not StepKind.DENSE
        indexes = does_more and source and rank.index_interval > 0
        selects_next = selects and rank.selects_for_next_step
        far = None if self._is_sparse[index] else self._far
        query = None if far is None else far.begin(own, k, v, layer, forward_batch, save_kv_cache)
        if selects and rank.needs_query and not selects_next:
            signal = side.signal(index, size)
            if query is None:
                query = self._query_for_rank(index, own, signal)
            elif signal is not None:
                raise_flags(signal.raised)
            with side.fork(query, lane=lane, signal=signal):
                rank.choose(index, query)
                own_layer = (index,) if self._is_sparse[index] else ()
                self._fetch(*own_layer, *rank.followers_of(index), size=size)
        if not self._is_sparse[index]:
            out: torch.Tensor = (
                self._full.forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
                if far is None
                else far.end(index)
            )
            if indexes:
                side.defer(lane, lambda: rank.append(index, size))
            return self._after(index, out)
        awaited = side.join_by_flags(index)
        if awaited is not None and save_kv_cache:
            self._home.await_in_write(awaited)  # a launch less than waiting for itself
        elif awaited is not None:
            wait_flags(awaited)
        out = self._sparse.attend(
            q, k, v, layer, forward_batch, save_kv_cache, with_samples=self._may_be_sparse
        )
        # After this layer's attention: what is selected is for a later step, which begins when
        # everything beside this one was joined.
        if selects_next or (rank.keeps_queries and indexes):
            signal = side.signal(index, size)
            query = self._query_for_rank(index, own, signal)
            with side.fork(query, lane=lane, signal=signal):
                rank.append(index, size)
                if selects_next:
                    rank.choose(index, query)
                    rank.fetch(index, size)
                else:
                    rank.observe(index, query)
        elif selecting and rank.selects_for_next_step:
            # What its source chose is for the next step as well: not before it has attended.
            signal = side.signal(index, size)
            if signal is not None:
                raise_flags(signal.raised)
            with side.fork(lane=lane, signal=signal):
                rank.fetch(index, size)
        elif indexes:
            side.defer(lane, lambda: rank.append(index, size))
        return self._after(index, out)

    def _fetch(self, *layers: int, size: int) -> None:
        """Inside a fork: bring to `layers` what has been chosen for them, one after the other."""
        for layer in layers:
            self._rank.fetch(layer, size, flag=self._side.done_flags(layer))
            self._side.note_done(layer)

    def _query_for_rank(
        self, index: int, query: torch.Tensor, signal: Signal | None
    ) -> torch.Tensor:
        if self._queries is None:
            return query
        return self._queries.put(index, query.flatten(1), None, [signal]).view(query.shape)

    def _index_and_seed(self, index: int, forward_batch: Any, queries: list[torch.Tensor]) -> None:
        """Let the cache rank index a layer's new keys, and fill the sets of finished prompts."""
        slots = forward_batch.out_cache_loc
        with self._side.fork(slots, *queries):
            self._rank.extend(index, slots)
            for (request, row, _, _), window in zip(self._seeds, queries, strict=True):
                self._rank.seed(index, request, row, window)
        for row, table in self._fills:
            self._home.fill(index, row, table)

    def _extend(self, index: int, forward_batch: Any) -> None:
        """Let the cache rank index the new keys of an exact layer that others follow."""
        with self._side.fork(forward_batch.out_cache_loc):
            self._rank.extend(index, forward_batch.out_cache_loc)

    def _after(self, index: int, out: torch.Tensor) -> torch.Tensor:
        if index == self._num_layers - 1:
            self._home.end_step()
            if self._is_pending:
                self._side.finish_deferred()
            else:
                self._join()
        return out

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
        self._rank.end_step()
        if self._ahead is not None:
            self._ahead.is_pending = False

    # -- benchmarks ----------------------------------------------------------------------

    @property
    def cache_rank(self) -> LocalCacheRank:
        """The cache rank of this process."""
        return self._rank

    def adopt(self, forward_batch: Any) -> None:
        """Index and seed prompts whose K/V is in the pool already, with random queries.

        For benchmarks, which fill the pool instead of computing it.
        """
        self._is_decode = False
        self._begin_extend(forward_batch)
        model, device = self._runtime.model, forward_batch.out_cache_loc.device
        for index, is_sparse in enumerate(self._is_sparse):
            if not is_sparse:
                if self._rank.is_source(index):
                    self._extend(index, forward_batch)
                continue
            shapes = [(e - s, model.num_qo_heads, model.head_dim) for _, _, s, e in self._seeds]
            queries = [torch.randn(shape, device=device) for shape in shapes]
            dtype = getattr(torch, model.dtype)
            self._index_and_seed(index, forward_batch, [q.to(dtype) for q in queries])
        self._side.join_all()

    # -- steps ---------------------------------------------------------------------------

    def _begin_decode(self, forward_batch: Any, *, in_capture: bool, in_graph: bool) -> None:
        size = forward_batch.batch_size
        rows, lengths = forward_batch.req_pool_indices[:size], forward_batch.seq_lens[:size]
        req_to_token = self._pool.req_to_token
        on_host = forward_batch.seq_lens_cpu[:size]
        dense = self._dense.of(on_host)
        if not in_capture:
            self._make_sparse(rows, on_host, req_to_token)
            self._count(on_host[: size - getattr(forward_batch, "num_padding", 0)], dense.num_dense)
            self._dense.advance(on_host)
        self._table.load(rows, lengths, req_to_token, dense.num_dense)
        if self._home.samples is not None:
            self._home.samples.load(rows, lengths, req_to_token, dense.num_dense)
        self._home.begin_step()
        self._side.begin_step()
        self._join()  # nothing to wait for, unless a step failed
        if self._ahead is not None:
            self._ahead.begin_step()
        self._rank.begin_step()
        kind = self._kind = self.captured_kind if in_capture else self.kind_of(on_host)
        if in_capture or kind is not StepKind.DENSE or self._far is not None:
            # Every lane reads what this loads.
            self._rank.begin_decode(rows, lengths, req_to_token, num_cold=dense.num_cold)
        with self._fence.planning():
            self._sparse.plan(forward_batch, in_capture=in_capture, in_graph=in_graph, kind=kind)
            if self._needs_full and in_graph:
                self._full_plans.use(kind)
                self._full.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
            elif self._needs_full:
                self._full.init_forward_metadata(forward_batch)

    def kind_of(self, lengths: torch.Tensor) -> StepKind:
        """Return what a step over ``lengths [B]``, on the host, does beside the forward pass.

        Keys are indexed for requests that are attended to as a whole, too, because they may outgrow
        it. What a step attends to, a table says: between two refreshes it is the resident sets as
        they were left.
        """
        rank = self._rank
        if not rank.selects:
            return StepKind.DENSE
        if rank.selects_in_step and bool((lengths > self._dense.of(lengths).num_cold).any()):
            return StepKind.SELECTING
        every = rank.index_interval
        indexes = every > 0 and bool((lengths % every == 0).any())
        return StepKind.INDEXING if indexes else StepKind.DENSE

    @property
    def _may_be_sparse(self) -> bool:
        """Whether a step of this kind may have requests that are not attended to as a whole.

        Not if nothing is selected for it, unless what it attends to was selected before.
        """
        rank = self._rank
        was_before = rank.selects_for_next_step or rank.refresh_every > 1
        return self._kind is StepKind.SELECTING or was_before

    @property
    def kinds(self) -> tuple[StepKind, ...]:
        """Kinds of steps that there are; a graph for each is captured."""
        if not self._rank.selects:
            return (StepKind.DENSE,)
        found, every = [StepKind.SELECTING], self._rank.index_interval
        found += [StepKind.INDEXING] if every else []
        return (*found, StepKind.DENSE) if every != 1 else tuple(found)

    def _make_sparse(
        self, rows: torch.Tensor, lengths: torch.Tensor, req_to_token: torch.Tensor
    ) -> None:
        """Give requests that have just outgrown dense attention their resident set."""
        grown = (lengths == self._lengths.num_cold + 1).nonzero()[:, 0]
        if not len(grown):
            return
        chosen = rows[grown.to(rows.device)].long()
        tables = req_to_token[chosen, : self._num_resident]
        with self._side.fork(chosen, tables):
            self._rank.seed_identity(chosen, None if self._home.holds_dense else tables)

    def _begin_extend(self, forward_batch: Any) -> None:
        self._side.begin_step()
        if self._ahead is not None:
            self._ahead.begin_step()
        prefixes = [int(n) for n in forward_batch.extend_prefix_lens_cpu]
        lengths = [int(n) for n in forward_batch.seq_lens_cpu.tolist()]
        rows = self._runtime.rows_on_host
        if rows is None:  # this waits for the GPU
            rows = forward_batch.req_pool_indices.tolist()
        req_to_token = self._pool.req_to_token
        tables = [req_to_token[row, :n] for row, n in zip(rows, lengths, strict=True)]
        with self._side.fork(*tables):
            self._rank.begin_extend(rows, prefixes, lengths, tables)
        self._seeds, self._fills, end = [], [], 0
        for request, (row, prefix, length) in enumerate(zip(rows, prefixes, lengths, strict=True)):
            start, end = end, end + length - prefix
            is_whole = row != self._runtime.middle_chunk_row
            if is_whole and row:
                self._fills.append((row, tables[request]))
            if is_whole and row and length > self._lengths.num_cold:
                start = max(start, end - self._seed_window)
                self._seeds.append((request, row, start, end))
        counters = self._runtime.counters
        counters.extend_steps_total += 1
        counters.seeded_rows_total += len(self._seeds)

    def _count(self, lengths: torch.Tensor, num_dense: int) -> None:
        counters = self._runtime.counters
        num_sparse = int((lengths > num_dense).sum())
        counters.decode_steps_total += 1
        counters.sparse_rows_total += num_sparse
        counters.dense_rows_total += len(lengths) - num_sparse
        attended = self._table.attended_on_host(lengths, num_dense)
        if self._home.samples is not None:
            attended = attended + (lengths - attended).clamp(max=self._home.samples.num_samples)
        counters.attended_tokens_total += int(attended.sum())
        counters.context_tokens_total += int(lengths.sum())
