# SPDX-License-Identifier: Apache-2.0
"""Calls of a policy's own methods, where kernels do not do all that it does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from tandemkv.cache_rank.policies.attending import AttendingPolicy, AttendInput
from tandemkv.cache_rank.policies.base import Owner, Policy, SelectionInput, StoredKV
from tandemkv.cache_rank.policies.composition import Composition
from tandemkv.cache_rank.protocol.engine import PADDING_ROW, EnginePools
from tandemkv.cache_rank.protocol.engine_program import EngineProgram
from tandemkv.kernels.score import KeyScan, score_keys

from .batch import DecodeBatch
from .key_index import KeyIndex
from .page_index import PageBoundsIndex
from .seeding import fill_set, make_seed_input


class PolicyCalls:
    """Asks a policy what to select, to seed and to attend to, and tells it what it may remember.

    A request is known to it as (row, generation); generations count the prefill steps of a row. It
    is asked about the requests that something is selected for. On a GPU that captures its steps
    (`EngineProgram.is_captured`) it is asked about all of the batch, and nobody is named
    (`SelectionInput.owners`).

    Attributes
    ----------
    num_attends, num_attended : int
        Since the start: how often the policy attended, once for each request and layer, and to how
        many tokens, over KV heads.
    """

    def __init__(
        self,
        policy: Policy,
        pools: EnginePools,
        program: EngineProgram,
        *,
        index: KeyIndex,
        batch: DecodeBatch,
    ) -> None:
        self.composition = Composition.of(type(policy))
        context = policy.context
        self._policy, self._model, self._selection = policy, context.model, context.selection
        self._pools, self._program, self._index, self._batch = pools, program, index, batch
        self._is_eager = pools.k[0].device.type == "cpu" or not program.is_captured
        self._generations: dict[int, int] = {}
        self.num_attends = self.num_attended = 0

    @property
    def observes(self) -> bool:
        """Whether `Policy.observe` is called with the queries of every step."""
        return self.composition.selects and self._policy.capabilities.wants_query_window

    def begin_extend(self, rows: Sequence[int]) -> None:
        """Forget whoever was in `rows`: somebody else is, or the same prompt has one chunk more.

        Nothing is remembered of a prompt before its last chunk.
        """
        for row in rows:
            generation = self._generations.get(row, 0)
            self._policy.release((row, generation))  # maybe what an earlier engine left
            self._generations[row] = generation + 1

    def resume(self, rows: Sequence[int]) -> None:
        """Go on with the requests that an earlier engine had in `rows`."""
        self._generations |= dict.fromkeys(rows, 1)

    # -- prompts -------------------------------------------------------------------------

    def seed(
        self,
        layer: int,
        row: int,
        queries: torch.Tensor,
        keys: tuple[torch.Tensor, torch.Tensor | None],
        slots: torch.Tensor,
        num_resident: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is resident first of a prompt, and let the policy take note of its end.

        ``[H, R]`` int32, and ``[W]`` int64, the positions of ``queries [W, Hq, D]``, its last ones.
        Keys and scales are as for `tandemkv.kernels.score.KeyScan`, ``slots [length]``.
        """
        stored = StoredKV(self._pools.k[layer], self._pools.v[layer], slots[None])
        prompt = make_seed_input(
            self._policy, layer, self._owner(row), queries, keys, stored,
            page_size=self._pools.page_size,
        )  # fmt: skip
        chosen = fill_set(self._policy, prompt, num_resident)
        if self.composition.observes_prompt:
            self._policy.observe_prompt(layer, prompt.owner, queries, prompt.positions)
        if isinstance(self._policy, AttendingPolicy):
            self._policy.observe_stored(prompt)
        return chosen, prompt.positions

    # -- decode --------------------------------------------------------------------------

    def observe(self, layer: int, query: torch.Tensor) -> None:
        """Let the policy take note of a step's queries ``[B, Hq, D]``, padding left out."""
        size, batch = len(query), self._batch
        rows, positions = batch.rows[:size], batch.positions[:size]
        owners: Sequence[Owner] = ()
        if self._is_eager:
            places = (rows != PADDING_ROW).nonzero()[:, 0]
            rows, positions, query = rows[places], positions[places], query[places]
            owners = self._owners(rows)
            if not owners:
                return
        self._policy.observe(layer, owners, query, positions)

    def choose(
        self, layer: int, query: torch.Tensor, hi: torch.Tensor, *, lag: int
    ) -> torch.Tensor:
        """Return what the policy selects in `layer`, ``[B, H, K]`` int32, best first.

        ``hi [B]`` is where candidates end, `lag` the number of steps until the selection is used.
        Nothing is selected for requests that are not asked for.
        """
        batch, size = self._batch, len(query)
        asked = batch.selecting(size)
        if not self._is_eager:
            ends = torch.where(asked, hi, batch.lo[:size])  # nobody's end where they begin
            return self._ask(layer, query, slice(size), ends, lag=lag)
        shape = (size, self._model.num_kv_heads, self._selection.budget_tokens)
        whole = torch.full(shape, -1, dtype=torch.int32, device=query.device)
        places = asked.nonzero()[:, 0]
        if len(places):
            whole[places] = self._ask(layer, query[places], places, hi[places], lag=lag)
        return whole

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Return output and log-sum-exp ``[B, Hq, D + 1]`` float32 of the policy's part.

        Where nothing is asked for, the log-sum-exp is ``-inf``.
        """
        assert isinstance(self._policy, AttendingPolicy)
        size, batch, model = len(query), self._batch, self._model
        merged = query.new_zeros(
            (size, model.num_qo_heads, model.head_dim + 1), dtype=torch.float32
        )
        merged[..., -1] = float("-inf")
        places = batch.active[:size].nonzero()[:, 0]
        if not len(places):
            return merged
        lengths = batch.lengths[places].long()
        rows = batch.rows[places]
        slots = self._slots(batch.pages[places], int(lengths.max()))
        found = self._policy.attend(
            AttendInput(
                layer=layer,
                owners=self._owners(rows),
                query=query[places],
                lengths=lengths,
                lo=batch.lo[places].long(),
                hi=batch.hi[places].long(),
                stored=StoredKV(self._pools.k[layer], self._pools.v[layer], slots),
                budget=self._selection.budget_tokens,
            )
        )
        merged[places] = found.merged
        self.num_attended += found.num_attended
        self.num_attends += len(places)
        return merged

    def _ask(
        self, layer: int, query: torch.Tensor, places: slice | torch.Tensor, hi: torch.Tensor,
        *, lag: int,
    ) -> torch.Tensor:  # fmt: skip
        """Return what is selected for the requests at `places`, whose candidates end at `hi`."""
        batch, heads, index = self._batch, self._program.slow_heads(layer), self._index
        rows, pages, positions = batch.rows[places], batch.pages[places], batch.positions[places]
        lo, hi = batch.lo[places].long(), hi.long()
        width = int(hi.max()) if self._is_eager else self._model.max_context
        bounds = None
        if isinstance(index, PageBoundsIndex):
            bounds = index.bounds(layer, width)

        def score(asked: torch.Tensor) -> torch.Tensor:
            return self._scores(layer, asked, pages, lo, hi, width)

        request = SelectionInput(
            layer=layer,
            owners=self._owners(rows),
            rows=rows,
            query=self._of_heads(query, heads),
            positions=positions,
            use_positions=positions + lag,
            score=score,
            budget=self._selection.budget_tokens,
            lo=lo,
            hi=hi,
            stored=StoredKV(self._pools.k[layer], self._pools.v[layer], self._slots(pages, width)),
            pages=bounds,
        )
        chosen = self._policy.select(request)
        chosen.check((len(rows), self._model.num_kv_heads, request.budget))
        return chosen.positions

    def _scores(
        self, layer: int, query: torch.Tensor, pages: torch.Tensor, lo: torch.Tensor,
        hi: torch.Tensor, width: int,
    ) -> torch.Tensor:  # fmt: skip
        """Score candidates of a layer, of all KV heads or of those alone that are slow in it.

        ``[S, n, width]`` float32 for ``[S, n * group, D]``.
        """
        heads, group = self._program.slow_heads(layer), self._model.gqa_group_size
        keys, k_scale = self._index.keys(layer)
        channels = self._index.channels(layer)
        scan = partial(
            KeyScan, slots=pages, lo=lo, hi=hi, width=width, scale=self._model.scale,
            pooling=self._selection.pooling, page_size=self._pools.page_size,
        )  # fmt: skip
        if len(heads) == self._model.num_kv_heads:
            return score_keys(scan(query, keys, k_scale=k_scale, channels=channels))
        parts = []
        for i, head in enumerate(heads):  # views of the pool: a list of heads would copy it
            scale = None if k_scale is None else k_scale[:, head : head + 1]
            own = query[:, i * group : (i + 1) * group]
            kept = None if channels is None else channels[head : head + 1]
            found = scan(own, keys[:, head : head + 1], k_scale=scale, channels=kept)
            parts.append(score_keys(found))
        return torch.cat(parts, dim=1)

    def _slots(self, pages: torch.Tensor, width: int) -> torch.Tensor:
        """Return the slots ``[S, width]`` of the first positions in `pages` ``[S, max_pages]``."""
        size = self._pools.page_size
        if size == 1:
            return pages[:, :width]
        within = torch.arange(size, dtype=pages.dtype, device=pages.device)
        return (pages[:, : -(-width // size), None] * size + within).flatten(1)[:, :width]

    def _of_heads(self, query: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
        """Return the query heads ``[S, n, D]`` of the groups of `heads`."""
        if len(heads) == self._model.num_kv_heads:
            return query
        shape = (len(query), self._model.num_kv_heads, -1, self._model.head_dim)
        return query.view(shape)[:, list(heads)].flatten(1, 2)

    def _owner(self, row: int) -> Owner:
        return row, self._generations.get(row, 0)

    def _owners(self, rows: torch.Tensor) -> tuple[Owner, ...]:
        """Return who is in `rows` ``[S]``; nobody where a GPU captures steps."""
        return tuple(map(self._owner, rows.tolist())) if self._is_eager else ()
