# SPDX-License-Identifier: Apache-2.0
"""SGLang's attention backend ``tandemkv``.

K/V stay in SGLang's own pool, so prefill, radix hits, retraction and slot reuse are SGLang's
from end to end. Decode attends to resident sets that lie behind the tokens in the same pool, or
apart from it on the model's GPU; an engine keeps them fresh, reached by a link.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from tandemkv.cache_rank.protocol.engine_program import DecodeKind
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings
from tandemkv.inference_rank.links.base import DecodeRows, ExtendRow, Link
from tandemkv.inference_rank.sglang import versions as sglang_versions
from tandemkv.kernels.to_device import to_device

from .dense_steps import DenseSteps
from .graph_variants import PlanFence, PlansApart
from .prefix_staging import PrefixStaging
from .probe import AttentionProbe
from .resident_attention import FlashInferResident, PagedResident
from .resident_home import ResidentHome


class ResidentBackend(AttentionBackend):
    """Attention over resident sets that an engine keeps fresh.

    `full` is SGLang's own backend: prefill, and layers that attend to everything. `home` is where
    the resident sets lie, and what decode attends to. The engine works on `cache_device`; with
    `is_far`, on another GPU or what is taken for one, exact layers attend there. `staging` copies
    prefixes to the model's GPU, if the pool is on another one.
    """

    def __init__(
        self, runner: Any, full: AttentionBackend, link: Link, home: ResidentHome,
        *, cache_device: torch.device, is_far: bool, selection: SelectionSettings,
        dense: DenseSteps, runtime: Any, probe: AttentionProbe | None = None,
        staging: PrefixStaging | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._full, self.link, self._program = full, link, link.program
        # What later versions of SGLang ask of the backend that attends to prompts.
        self.extend_dummy_seqs_capped_by_req_pool = getattr(
            full, "extend_dummy_seqs_capped_by_req_pool", False
        )
        self._full_plans = PlansApart(full)
        device = home.table.slots.device
        self._fence = PlanFence(device)
        self._home, self._table = home, home.table
        self._runtime, self._probe, self._staging = runtime, probe, staging
        self._selection = selection
        self._dense, self._lengths = dense, dense.base
        self._of_step = dense.base  # what holds for the step that was begun last
        # SGLang's models find both here.
        self.req_to_token_pool = self._pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self._sparse = (
            FlashInferResident(runner, home.table, home.pool, home.samples)
            if device.type == "cuda"
            else PagedResident(home.table, home.pool, home.samples)
        )
        self._num_layers = int(runner.model_config.num_hidden_layers)
        self._is_sparse = [self._program.is_sparse_layer(x) for x in range(self._num_layers)]
        self._num_others = len(runtime.model.other_layers)
        linear = runtime.model.linear_layers
        self._last_layer = max(x for x in range(self._num_layers) if x not in linear)
        # Exact layers: by SGLang's backend here, or where the K/V are.
        self._needs_full = not (all(self._is_sparse) or is_far)
        self._kind = self.captured_kind = DecodeKind.DENSE
        self.cache_device, self.shares_gpu = cache_device, cache_device == device
        self._is_decode = self._is_verify = False
        self._slow_far: torch.Tensor | None = None  # places of those that attend far away
        self._num_steps = 0
        self._has_seeded = self._is_behind_prompt = False
        """Whether sets of prompts were made since the last step, and before the one begun last."""
        self._windows: list[tuple[int, int]] = []
        self._fills: list[tuple[int, torch.Tensor]] = []

    # -- SGLang's contract ---------------------------------------------------------------

    def support_triton(self) -> bool:
        """No Triton metadata is needed from SGLang."""
        return False

    def shared_read_ends(self, _mode: Any) -> Any:
        """Until when rows and slots must stay as they are."""
        return sglang_versions.end_of_reads()

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of padding rows."""
        return 1

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what captured graphs read."""
        if self._needs_full:
            self._full.init_cuda_graph_state(max_bs, max_num_tokens)
        self._sparse.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare a step that runs without a graph."""
        mode = forward_batch.forward_mode
        self._is_decode, self._is_verify = mode.is_decode(), mode.is_target_verify()
        if mode.is_idle():
            return
        if self._is_verify:
            self._begin_verify(forward_batch, in_capture=False, in_graph=False)
        elif self._is_decode:
            self._begin_decode(forward_batch, in_capture=False, in_graph=False)
        else:
            with self._fence.planning():
                self._full.init_forward_metadata(forward_batch)
            if self._staging is not None:
                self._staging.begin(forward_batch.extend_prefix_lens_cpu)
            self._begin_extend(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare a step that is captured or replayed."""
        self._is_verify = forward_batch.forward_mode.is_target_verify()
        self._is_decode = not self._is_verify
        begin = self._begin_verify if self._is_verify else self._begin_decode
        begin(forward_batch, in_capture=in_capture, in_graph=True)

    def forward_extend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of one layer to prompts or drafts, by SGLang's own backend."""
        out: torch.Tensor = self._full.forward_extend(
            q, k, v, layer, forward_batch, save_kv_cache, **kwargs
        )
        if self._is_verify:
            return out
        index = layer.layer_id
        if self._staging is not None:
            self._staging.attended(index)
        if not self._is_decode:
            queries = _dense_view(q, layer)
            self._index_and_seed(
                index, forward_batch, [queries[start:end] for start, end in self._windows]
            )
        return self._after(index, out)

    def forward_decode(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Decode attention of one layer."""
        index, size, link = layer.layer_id, forward_batch.batch_size, self.link
        query = _dense_view(q, layer)
        link.enter_attention(index)
        link.select_with_query(index, query, k, v, layer, forward_batch, save_kv_cache)
        if not self._is_sparse[index]:
            remote = link.remote_output(index)
            out: torch.Tensor = (
                self._full.forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
                if remote is None
                else remote
            )
        else:
            awaited = link.await_set(index)
            if awaited is not None and save_kv_cache:
                self._home.await_in_write(awaited)  # a launch less than waiting for itself
            elif awaited is not None:
                awaited.now()
            out = self._sparse.attend(
                q, k, v, layer, forward_batch, save_kv_cache, with_samples=self._may_be_sparse,
                rest=link.attend_selected(index, query), sinks=kwargs.get("sinks"),
            )  # fmt: skip
            whole = link.remote_output(index)
            if whole is not None and self._slow_far is not None:
                out[self._slow_far] = whole[self._slow_far]
            if self._probe is not None:
                self._probe.after_layer(index, query, self._pool.req_to_token)
        link.attended(index, query, size)
        return self._after(index, out)

    def _index_and_seed(self, index: int, forward_batch: Any, queries: list[torch.Tensor]) -> None:
        """Let the engine index a layer's new keys, and fill the sets of finished prompts."""
        slots = forward_batch.out_cache_loc
        if self._is_sparse[index]:
            self.link.extend(index, slots, queries)
            for row, table in self._fills:
                self._home.fill(index, row, table)
        elif self._program.is_source(index):  # an exact layer that others follow
            self.link.extend(index, slots, ())

    def _after(self, index: int, out: torch.Tensor) -> torch.Tensor:
        if index == self._last_layer:
            self._home.end_step()
            if self._is_decode:
                self.link.end_step()
            else:
                self.link.end_extend()
        return out

    # -- passes that are done twice ------------------------------------------------------

    def snapshot(self) -> tuple[Any, ...]:
        """Return what preparing a pass changes here."""
        of_step = self._num_steps, self._has_seeded
        return of_step, self._dense.snapshot(), self._runtime.refresh.snapshot()

    def rewind(self, state: tuple[Any, ...]) -> None:
        """Go back to where `snapshot` was asked."""
        self._num_steps, self._has_seeded = state[0]
        self._dense.rewind(state[1])
        self._runtime.refresh.rewind(state[2])

    def note_seeded(self) -> None:
        """Take note that sets were chosen anew: the next step selects, as behind a prompt."""
        self._has_seeded = True

    def refill(self, rows: Sequence[tuple[int, int]]) -> None:
        """Bring what only the forward pass keeps of a row to what it is at its length.

        For pairs of a row and its stored tokens, after passes were lost: where resident sets lie
        apart from the pool, a lost step has overwritten the oldest of the latest tokens.
        """
        for row, length in rows:
            table = self._pool.req_to_token[row, :length]
            for layer, is_sparse in enumerate(self._is_sparse):
                if is_sparse:
                    self._home.fill(layer, row, table)

    @property
    def num_cold(self) -> int:
        """Longest request that has no resident set yet."""
        return self._lengths.num_cold

    # -- benchmarks ----------------------------------------------------------------------

    def adopt(self, forward_batch: Any) -> None:
        """Index and seed prompts whose K/V is in the pool already, with random queries.

        For benchmarks, which fill the pool instead of computing it.
        """
        self._is_decode = False
        self._begin_extend(forward_batch)
        model, device = self._runtime.model, forward_batch.out_cache_loc.device
        dtype = getattr(torch, model.dtype)
        for index in range(self._num_layers):
            shapes = [
                (end - start, model.num_qo_heads, model.head_dim) for start, end in self._windows
            ]
            queries = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
            self._index_and_seed(index, forward_batch, queries)
        self.link.end_extend()

    # -- steps ---------------------------------------------------------------------------

    def _begin_decode(self, forward_batch: Any, *, in_capture: bool, in_graph: bool) -> None:
        size = forward_batch.batch_size
        rows, lengths = forward_batch.req_pool_indices[:size], forward_batch.seq_lens[:size]
        req_to_token = self._pool.req_to_token
        on_host = forward_batch.seq_lens_cpu[:size]
        dense = self._of_step = self._dense.of(on_host)
        slow = self._slow_rows(forward_batch, on_host, dense.num_dense)
        if not in_capture:
            num_real = size - getattr(forward_batch, "num_padding", 0)
            self._make_sparse(rows, on_host, req_to_token)
            self._count(on_host[:num_real], dense.num_dense, slow)
            if self._probe is not None:
                self._probe.begin_step(
                    rows, on_host, self._pool.req_generation, num_dense=dense.num_dense,
                    slow=slow, step=self._runtime.counters.decode_steps_total,
                )  # fmt: skip
            self._dense.advance(on_host)
        self._table.load(rows, lengths, req_to_token, dense.num_dense)
        if self._home.samples is not None:
            self._home.samples.load(rows, lengths, req_to_token, dense.num_dense)
        self._slow_far = None
        if slow is not None and self._program.is_far:  # they attend where the K/V are
            places = slow.nonzero()[:, 0].tolist()
            self._slow_far = to_device(places, rows.device) if places else None
        elif slow is not None:
            self._table.attend_whole(slow, rows, lengths, req_to_token)
            if self._home.samples is not None:
                self._home.samples.leave_out(slow)
        if self._staging is not None and self._needs_full:
            self._staging.begin(())  # exact layers read the pool, whatever a pass has left
        self._home.begin_step()
        self._num_steps += 1
        if not in_capture:
            self._is_behind_prompt, self._has_seeded = self._has_seeded, False
        kind = self._kind = self.captured_kind if in_capture else self.kind_of(on_host, slow)
        # What a policy attends to itself must not be attended to here as well.
        num_cold = dense.num_dense if self._program.attends else dense.num_cold
        step = DecodeRows(
            rows=rows, lengths=lengths, lengths_on_host=on_host, req_to_token=req_to_token,
            num_cold=num_cold, slow=slow, is_rehearsal=in_capture,
        )  # fmt: skip
        self.link.begin_decode(kind, step)
        with self._fence.planning():
            self._sparse.plan(forward_batch, in_capture=in_capture, in_graph=in_graph, kind=kind)
            if self._needs_full and in_graph:
                self._full_plans.use(kind)
                self._full.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
            elif self._needs_full:
                self._full.init_forward_metadata(forward_batch)

    def _begin_verify(self, forward_batch: Any, *, in_capture: bool, in_graph: bool) -> None:
        """Prepare a step that verifies drafts: they attend to everything, by SGLang's backend.

        The engine has no part in it, as in every step of a policy whose layers are all exact.
        """
        if not in_capture:
            num_padding = getattr(forward_batch, "num_padding", 0)
            self._runtime.counters.decode_steps_total += 1
            self._runtime.counters.exact_rows_total += forward_batch.batch_size - num_padding
        with self._fence.planning():
            if in_graph:
                self._full.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
            else:
                self._full.init_forward_metadata(forward_batch)

    def _slow_rows(
        self, forward_batch: Any, lengths: torch.Tensor, num_dense: int
    ) -> torch.Tensor | None:
        """Return who attends to everything because its step is slow, ``[B]`` bool on the host.

        None for a policy that has no slow steps. On a GPU tokens, where they decide, are waited
        for, which the overlap scheduler does not do by itself.
        """
        if not self._program.slow_steps:
            return None
        refresh, size = self._runtime.refresh, len(lengths)
        rows = self._runtime.rows_on_host
        if rows is None:  # this waits for the GPU
            rows = forward_batch.req_pool_indices[:size].tolist()
        tokens = forward_batch.input_ids[:size].tolist() if refresh.wants_tokens else [None] * size
        found = []
        for row, length, token in zip(rows, lengths.tolist(), tokens, strict=True):
            if length <= num_dense:
                refresh.restart(row)  # nothing was selected for it lately
            found.append(length > num_dense and refresh.is_slow(row, token))
        return torch.tensor(found)

    def kind_of(self, lengths: torch.Tensor, slow: torch.Tensor | None = None) -> DecodeKind:
        """Return what a step over ``lengths [B]``, on the host, does beside the forward pass.

        It is the step that was begun last. Keys are indexed for requests that are attended to as a
        whole, too, because they may outgrow it. What a step attends to, a table says: between two
        refreshes it is the resident sets as they were left. Until its first sparse step a set is
        made anew in each step, and once right behind a prompt, whatever `refresh_every` is: nothing
        else was selected for it, and no samples count yet.
        """
        program = self._program
        if not program.selects:
            return DecodeKind.DENSE
        dense = self._of_step
        selected = lengths > dense.num_cold
        # A captured batch is filled up with requests of one token, which are nobody's.
        is_new = selected & (lengths <= dense.num_dense + 1) & (lengths > 1)
        is_due = self._num_steps % program.refresh_every == 0 or self._is_behind_prompt
        is_due |= bool(is_new.any())
        if slow is not None and self._lengths.num_cold:
            is_due = bool(slow.any())  # else empty slots are filled in each step
        if is_due and bool(selected.any()):
            return DecodeKind.SELECTING
        every = program.index_interval
        indexes = every > 0 and bool((lengths % every == 0).any())
        return DecodeKind.INDEXING if indexes else DecodeKind.DENSE

    @property
    def _may_be_sparse(self) -> bool:
        """Whether a step of this kind may have requests that are not attended to as a whole.

        Not if nothing is selected for it, unless what it attends to was selected before.
        """
        program = self._program
        was_before = program.selects_for_next_step or program.refresh_every > 1
        return self._kind is DecodeKind.SELECTING or was_before

    @property
    def kinds(self) -> tuple[DecodeKind, ...]:
        """Kinds of steps that there are; a graph for each is captured."""
        if not self._program.selects:
            return (DecodeKind.DENSE,)
        found, every = [DecodeKind.SELECTING], self._program.index_interval
        found += [DecodeKind.INDEXING] if every else []
        return (*found, DecodeKind.DENSE) if every != 1 else tuple(found)

    def _make_sparse(
        self, rows: torch.Tensor, lengths: torch.Tensor, req_to_token: torch.Tensor
    ) -> None:
        """Give requests that have just outgrown dense attention their resident set."""
        grown = (lengths == self._lengths.num_cold + 1).nonzero()[:, 0]
        if not len(grown):
            return
        chosen = rows[grown.to(rows.device)].long()
        tables = req_to_token[chosen, : self._selection.num_resident]
        self.link.seed_identity(chosen, None if self._home.holds_dense else tables)

    def _begin_extend(self, forward_batch: Any) -> None:
        prefixes = [int(n) for n in forward_batch.extend_prefix_lens_cpu]
        lengths = [int(n) for n in forward_batch.seq_lens_cpu.tolist()]
        rows = self._runtime.rows_on_host
        if rows is None:  # this waits for the GPU
            rows = forward_batch.req_pool_indices.tolist()
        req_to_token = self._pool.req_to_token
        requests: list[ExtendRow] = []
        self._fills, end = [], 0
        for row, prefix, length in zip(rows, prefixes, lengths, strict=True):
            start, end = end, end + length - prefix
            if self._program.slow_steps:
                self._runtime.refresh.restart(row)
            table, window = req_to_token[row, :length], None
            is_whole = row != self._runtime.middle_chunk_row
            if is_whole and row:
                self._fills.append((row, table))
            if is_whole and row and length > self._lengths.num_cold:
                window = (max(start, end - self._selection.seed_window), end)
            requests.append(
                ExtendRow(row=row, prefix_len=prefix, length=length, table=table, window=window)
            )
        self._windows = [r.window for r in requests if r.window is not None]
        self._has_seeded |= bool(self._windows)
        self.link.begin_extend(requests)
        counters = self._runtime.counters
        counters.extend_steps_total += 1
        counters.seeded_rows_total += len(self._windows)

    def _count(self, lengths: torch.Tensor, num_dense: int, slow: torch.Tensor | None) -> None:
        counters = self._runtime.counters
        if slow is not None:
            slow = slow[: len(lengths)]
            counters.slow_rows_total += int(slow.sum())
        num_sparse = int((lengths > num_dense).sum())
        counters.decode_steps_total += 1
        counters.dense_rows_total += len(lengths) - num_sparse
        num_exact = self._is_sparse.count(False) - self._num_others
        counters.exact_layer_rows_total += num_sparse * num_exact
        if not any(self._is_sparse):
            counters.exact_rows_total += num_sparse
            attended = lengths
        else:
            counters.sparse_rows_total += num_sparse
            attended = self._table.attended_on_host(lengths, num_dense, slow)
            if self._home.samples is not None:
                attended = attended + (lengths - attended).clamp(max=self._home.samples.num_samples)
        counters.attended_tokens_total += int(attended.sum())
        counters.context_tokens_total += int(lengths.sum())


def _dense_view(q: torch.Tensor, layer: Any) -> torch.Tensor:
    """Return ``[n, Hq, D]``; of what a model has transposed, ``[1, n, Hq, D]``, a copy."""
    if q.dim() == 4:
        q = q.contiguous()
    return q.view(-1, layer.tp_q_head_num, layer.head_dim)
