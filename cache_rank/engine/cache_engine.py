# SPDX-License-Identifier: Apache-2.0
"""The engine: select, compare with the mirror, copy what is missing.

Pools, resident sets and books are on one device, so a selection ends in copies from slot to
slot. Everything from `begin_decode` to the end of a step has a fixed shape and no host
synchronisation, and can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from tandemkv.cache_rank.policies.base import Policy, ScoringPolicy, keep_first
from tandemkv.cache_rank.policies.windowed import WindowedPolicy
from tandemkv.cache_rank.protocol.engine import EnginePools, PredictQuery
from tandemkv.cache_rank.protocol.engine_program import EngineProgram
from tandemkv.cache_rank.protocol.models.index_channels import read_index_channels
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings
from tandemkv.kernels.attention import attend_paged
from tandemkv.kernels.exchange import exchange_rows
from tandemkv.kernels.mirror import make_mirror_scratch, mirror_diff
from tandemkv.kernels.score import KeyScan
from tandemkv.kernels.select import make_select_scratch, score_topk
from tandemkv.kernels.streams import let_chain, shared_stream

from .batch import DecodeBatch
from .device_counters import DeviceCounters
from .key_index import KeyIndex, make_key_index
from .lanes import LaneWeights, ScanOrder
from .mirror import ResidentMirror
from .page_index import PageBoundsIndex
from .policy_calls import PolicyCalls
from .query_windows import DeviceQueryWindows
from .seeder import Seeder
from .selection_probe import SelectionProbe
from .stress import Stress

NUM_LANES = 2
"""Layers that are selected for at once: what waits in one overlaps what computes in the other.

H200, batch 8 x 64K, one GPU: 11.64 ms a step with one lane, 11.07 with two.
"""


class CacheEngine:
    """See `tandemkv.cache_rank.protocol.engine.Engine`."""

    def __init__(
        self,
        *,
        model: ModelSpec,
        settings: RankSettings,
        pools: EnginePools,
        max_batch: int,
        predict_query: PredictQuery,
        policy: Policy,
    ) -> None:
        selection = settings.selection
        self._model, self._selection, self._pools = model, selection, pools
        self._predict = predict_query
        device = self._device = pools.k[0].device
        self._policy = policy
        policy.make_rows(pools.allocate or self._zeros, pools.num_rows)
        self.program = program = EngineProgram(
            model, settings, policy.traits, page_size=pools.page_size
        )
        self._place_of = {layer: i for i, layer in enumerate(program.sources)}
        self._head_maps = _head_maps_of(policy, program.selecting, device)
        self._sparse = [x for x in range(model.num_layers) if program.is_sparse_layer(x)]
        self._resident = pools.resident
        books = len(program.selecting), pools.num_rows, model.num_kv_heads, selection.num_resident
        self._mirror = ResidentMirror(books, device=device, allocate=pools.allocate)
        self._index = self._make_index(policy)
        self._counters = DeviceCounters(device)
        self.batch = DecodeBatch(
            selection,
            max_batch=max_batch,
            max_context=model.max_context,
            page_size=pools.page_size,
            selections=self._counters.selections,
            device=device,
        )
        self._calls = PolicyCalls(policy, pools, program, index=self._index, batch=self.batch)
        selects = self._calls.composition.selects
        self._windows = None if selects else self._make_windows(policy)
        self._stress: Stress | None = None
        if settings.stress_selection:
            self._stress = Stress(model, device, pools.shard, max_batch=max_batch)
        self._make_scratch(max_batch, selects=selects)
        # What sources chose, for those that follow; without scores it is best first.
        self._chosen: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._order = ScanOrder(device, is_kept=pools.is_far)
        self._probe = SelectionProbe.from_settings(settings)
        if pools.is_far:
            let_chain(device)
        self._seeder = Seeder(pools, self._mirror)
        self._num_steps = 0

    def _make_windows(self, policy: Policy) -> DeviceQueryWindows | None:
        """Return what a kernel remembers of past queries; None if the policy predicts otherwise."""
        if policy.capabilities.prediction is None:
            return None
        assert isinstance(policy, WindowedPolicy)  # as declared
        return DeviceQueryWindows(
            policy,
            num_layers=len(self.program.sources),
            num_rows=self._pools.num_rows,
            allocate=self._pools.allocate or self._zeros,
        )

    def _make_scratch(self, max_batch: int, *, selects: bool) -> None:
        """Allocate what kernels work in, a lane each: two lanes are worked on at once.

        If the policy itself `selects` none of them ranks, and it may name a position twice.
        """
        model, pools, device = self._model, self._pools, self._device
        num_lanes = NUM_LANES if self.program.selects else 0
        heads, context = model.num_kv_heads, model.max_context
        sizes = max_batch, model.num_qo_heads, heads, context, self._selection.budget_tokens
        self._scratch = [
            make_select_scratch(*sizes, device) for _ in range(0 if selects else num_lanes)
        ]
        self._mirror_scratch = [
            make_mirror_scratch(max_batch, heads, context, device, may_repeat=selects)
            for _ in range(num_lanes)
        ]
        self.weights = LaneWeights(pools, num_lanes)
        # Of the lowest priority: a scan fills the GPU, and the rest of another lane's selection,
        # a few programs each, would wait for all of it.
        self._scan_streams = [shared_stream(device, number=n) for n in range(NUM_LANES)]

    def _zeros(self, _: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)

    # -- what there is -------------------------------------------------------------------

    @property
    def forgets(self) -> bool:
        """See `Engine.forgets`."""
        return self._calls.composition.forgets

    @property
    def nbytes(self) -> int:
        """See `Engine.nbytes`."""
        books = self._mirror.positions.nbytes + self._mirror.last_used.nbytes
        windows = self._windows.nbytes if self._windows is not None else 0
        return self._index.nbytes + books + windows + self.weights.nbytes

    @property
    def num_lanes(self) -> int:
        """See `Engine.num_lanes`."""
        return NUM_LANES

    def lane_of(self, layer: int) -> int:
        """See `Engine.lane_of`."""
        return self._place_of.get(self.program.source_of(layer), 0) % NUM_LANES

    def _make_index(self, policy: Policy) -> KeyIndex:
        selection, pools, program = self._selection, self._pools, self.program
        if policy.capabilities.index == "page_bounds":
            return PageBoundsIndex(
                pools,
                program.sources,
                selection,
                page_tokens=policy.page_tokens,
                max_context=min(self._model.max_context, pools.num_slots),
            )
        index_dtype = selection.index_dtype if program.selects else "native"
        heads = pools.shard.heads(self._model.num_kv_heads)
        channels = read_index_channels(selection, program.sources, heads)
        return make_key_index(index_dtype, pools, program.sources, channels)

    # -- prefill -------------------------------------------------------------------------

    def begin_extend(
        self,
        rows: Sequence[int],
        prefix_lens: Sequence[int],
        lengths: Sequence[int],
        tables: Sequence[torch.Tensor],
    ) -> None:
        """See `Engine.begin_extend`."""
        self._calls.begin_extend(rows)
        if self._windows is not None:
            self._windows.begin_prompt(rows, lengths)
        tables = [table.to(self._device) for table in tables]
        self._seeder.begin_extend(tables)
        self._index.begin_extend(prefix_lens, lengths, tables, rows)

    def extend(self, layer: int, slots: torch.Tensor) -> None:
        """See `Engine.extend`."""
        if layer in self._place_of:
            self._index.extend(layer, slots.to(self._device))

    def seed(self, layer: int, request: int, row: int, queries: torch.Tensor) -> None:
        """See `Engine.seed`."""
        queries, place = queries.to(self._device), self._place_of.get(layer)
        keys = (self._pools.k[layer], None) if place is None else self._index.seed_keys(layer)
        book = self.program.book_of(layer)
        positions = self._seeder.seed(layer, request, row, queries, keys, self._calls, book=book)
        if self._windows is not None and place is not None and book is not None:
            self._windows.observe_prompt(place, row, queries, positions)

    def resume(
        self,
        rows: Sequence[int],
        lengths: Sequence[int],
        tables: Sequence[torch.Tensor],
        *,
        restored: Sequence[bool],
        reseeded: Sequence[bool],
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        """See `Engine.resume`."""
        tables = [table.to(self._device) for table in tables]
        self._calls.resume(rows)
        self._index.begin_extend([0] * len(rows), lengths, tables, rows)
        for layer in self._place_of:
            self._index.rebuild(layer)
            moved()
        every = [(layer, self.program.book_of(layer)) for layer in self._sparse]
        books = [(layer, book) for layer, book in every if book is not None]
        chosen = [i for i, is_restored in enumerate(restored) if is_restored]
        if chosen and books:
            padded = pad_sequence([tables[i] for i in chosen], batch_first=True)
            index = torch.tensor([rows[i] for i in chosen], device=self._device)
            self._seeder.refill(books, index, padded)
            # Steps go on behind the latest of those that the books name: only their order counts.
            latest = self._mirror.last_used[:, index].max().clamp(min=0)
            self.batch.step.copy_(latest)
        for row, table, is_reseeded in zip(rows, tables, reseeded, strict=True):
            if is_reseeded:
                self._seeder.seed_latest(every, row, table, self._selection)
                moved()

    def seed_identity(self, rows: torch.Tensor, tables: torch.Tensor | None) -> None:
        """See `Engine.seed_identity`."""
        self._seeder.seed_identity(self._sparse, rows, tables)

    # -- decode --------------------------------------------------------------------------

    def begin_step(self) -> None:
        """See `Engine.begin_step`."""
        self._num_steps += 1
        self._counters.begin_step()

    def set_num_cold(self, num_cold: int) -> None:
        """See `Engine.set_num_cold`."""
        self.batch.set_num_cold(num_cold)

    def begin_decode(
        self, rows: torch.Tensor, lengths: torch.Tensor, req_to_token: torch.Tensor,
        *, selects: bool = True, slow: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """See `Engine.begin_decode`."""
        lag = int(self.program.selects_for_next_step)
        num_layers = len(self.program.selecting) if selects else 0
        counted = num_layers if slow is None else 0
        self.batch.load(rows, lengths, req_to_token, lag=lag, num_layers=counted)
        if self._stress is not None:
            self._stress.begin_step(self.batch.step, self.batch.positions[: len(rows)])
        if slow is not None:
            # Without dense attention while all fits, empty slots are filled in each step.
            fills_others = not self._selection.dense_while_fits
            self.batch.load_slow(slow, num_layers=num_layers, fills_others=fills_others)

    def end_step(self) -> None:
        """See `Engine.end_step`."""
        self._order.end_step()

    def append(self, layer: int, batch_size: int) -> None:
        """See `Engine.append`."""
        if layer in self._place_of:
            batch = self.batch
            self._index.append(
                layer,
                batch.lengths[:batch_size],
                batch.pages[:batch_size],
                batch.rows[:batch_size],
            )

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """See `Engine.attend`."""
        size, batch, pools = len(query), self.batch, self._pools
        lengths = batch.lengths[:size]
        if self.program.slow_steps and self.program.is_sparse_layer(layer):
            lengths = lengths * batch.selecting(size)
        out, _ = attend_paged(
            query, pools.k[layer], pools.v[layer], batch.pages[:size], lengths,
            scale=self._model.scale, page_size=pools.page_size,
        )  # fmt: skip
        return out.to(query.dtype)

    def attend_selected(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """See `Engine.attend_selected`."""
        return self._calls.attend(layer, query)

    def observe(self, layer: int, query: torch.Tensor) -> None:
        """See `Engine.observe`."""
        if self._calls.observes and layer in self._place_of:
            self._calls.observe(layer, query)
        if self._windows is not None and layer in self._place_of:
            rows, positions = self.batch.rows[: len(query)], self.batch.positions[: len(query)]
            self._windows.push(self._place_of[layer], rows, query, positions)

    def choose_ahead(self, layer: int, hidden: torch.Tensor) -> None:
        """See `Engine.choose_ahead`."""
        size = len(hidden)
        positions = self.batch.positions[:size]
        if self._stress is not None:
            positions = self._stress.positions(size)
        self.choose(layer, self._predict(layer, hidden, positions))

    def choose_late(self, layer: int, hidden: torch.Tensor) -> None:
        """See `Engine.choose_late`."""
        if layer == self.program.late_layers[0]:
            self.batch.look_forward()
        self.choose_ahead(layer, hidden)

    def choose(self, layer: int, query: torch.Tensor) -> None:
        """See `Engine.choose`."""
        size, batch, selection = len(query), self.batch, self._selection
        lane, (hi, _) = self.lane_of(layer), self._ends_of(layer)
        if self._windows is not None:
            query = self._windows.push_and_predict(
                self._place_of[layer], batch.rows[:size], query, batch.positions[:size]
            )
        if self._stress is not None and not self.program.needs_hidden:
            query = self._stress.flipped(query)
        self._order.await_choice()
        if self._calls.composition.selects:
            if self._calls.observes:
                self._calls.observe(layer, query)
            lag = int(self.program.selects_for_next_step or layer in self.program.late_layers)
            self._chosen[layer] = self._calls.choose(layer, query, hi[:size], lag=lag), None
            return
        stored, k_scale = self._index.keys(layer)
        keys = KeyScan(
            query,
            stored,
            batch.pages[:size],
            batch.lo[:size],
            hi[:size],
            width=self._model.max_context,
            scale=self._model.scale,
            pooling=selection.pooling,
            k_scale=k_scale,
            page_size=self._pools.page_size,
            active=batch.active[:size],
            channels=self._index.channels(layer),
        )
        chosen, scores = score_topk(
            keys,
            selection.budget_tokens,
            scratch=self._scratch[lane],
            scan_stream=self._scan_streams[lane],
            pooled_positions=selection.pooled_positions,
        )
        self._chosen[layer] = self._kept(chosen, scores)

    def _kept(
        self, chosen: torch.Tensor, scores: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return of positions ``[B, H, K]`` as many of the best as the policy wants, and scores."""
        assert isinstance(self._policy, ScoringPolicy)
        wanted = self._policy.num_wanted(self.batch.lengths[: len(chosen)])
        if wanted is None:
            return chosen, scores
        # They come in any order: of equal scores the lowest positions stay.
        order = chosen.argsort(dim=-1)
        chosen, scores = chosen.gather(-1, order), scores.gather(-1, order)
        order = scores.argsort(dim=-1, descending=True, stable=True)
        return keep_first(chosen.gather(-1, order), wanted), scores.gather(-1, order)

    def fetch(self, layer: int, batch_size: int) -> None:
        """See `Engine.fetch`."""
        batch, selection, book = self.batch, self._selection, self.program.book_of(layer)
        assert book is not None
        lane, rows, pages = self.lane_of(layer), batch.rows[:batch_size], batch.pages[:batch_size]
        chosen, chosen_scores = self._chosen[self.program.source_of(layer)]
        active, (hi, num_target) = batch.active[:batch_size], self._ends_of(layer)
        head_map = self._head_maps.get(layer)
        if head_map is not None:
            chosen = chosen.index_select(1, head_map)
            if chosen_scores is not None:
                chosen_scores = chosen_scores.index_select(1, head_map)
        if self._probe is not None:
            asked = batch.selecting(batch_size)
            self._probe.record(layer, rows, batch.lengths[:batch_size], asked, chosen)
        fetch_pos, fetch_slot = mirror_diff(
            chosen,
            self._mirror.positions[book],
            self._mirror.last_used[book],
            step=batch.step,
            num_protected=selection.num_sink_tokens,
            num_target=num_target[:batch_size],
            hi=hi[:batch_size],
            fetch_cap=selection.fetch_cap_tokens,
            selected_scores=chosen_scores,
            active=active,
            rows=rows,
            counters=self._counters.totals,
            log_weight=self.weights.written(layer, lane),
            scratch=self._mirror_scratch[lane],
        )
        self._order.note_choice()
        k_res, v_res = self._resident[layer]
        exchange_rows(
            self._pools.k[layer], self._pools.v[layer], pages, fetch_pos, fetch_slot,
            k_res, v_res, rows, page_size=self._pools.page_size,
            weights=self.weights.carried(layer, lane, active),
        )  # fmt: skip

    def _ends_of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where candidates end, and slots to be filled, in the step that uses them."""
        batch = self.batch
        if layer in self.program.late_layers:
            return batch.next_hi, batch.next_num_target
        return batch.hi, batch.num_target

    def resident_positions(self, layer: int) -> torch.Tensor | None:
        """See `Engine.resident_positions`."""
        book = self.program.book_of(layer)
        return None if book is None else self._mirror.positions[book]

    def counters(self) -> dict[str, float]:
        """See `Engine.counters`."""
        return {
            "steps_total": float(self._num_steps),
            "index_bytes": float(self._index.nbytes),
            **self._with_attended(self._counters.read()),
        }

    def last_counters(self) -> dict[str, float]:
        """See `Engine.last_counters`."""
        return self._with_attended(self._counters.last())

    def _with_attended(self, totals: dict[str, float]) -> dict[str, float]:
        """Add what the policy attended to itself, if it does."""
        if not self.program.attends:
            return totals
        calls = self._calls
        return totals | {
            "selections_total": float(calls.num_attends),
            "attended_by_policy_total": float(calls.num_attended),
        }


def _head_maps_of(
    policy: Policy, layers: Sequence[int], device: torch.device
) -> dict[int, torch.Tensor]:
    """Return the head of its source that each head follows, for layers where they differ."""
    share = policy.context.share
    if share is None:
        return {}
    maps = {x: share.head_maps[x] for x in layers if share.sources[x] != x}
    return {
        x: torch.tensor(heads, dtype=torch.int64, device=device)
        for x, heads in maps.items()
        if heads != tuple(range(len(heads)))
    }
