# SPDX-License-Identifier: Apache-2.0
"""Time a layer's selection before anything is served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from tandemkv.cache_rank.policies.registry import find_policy
from tandemkv.cache_rank.protocol.engine import (
    DenseLengths,
    EnginePools,
    PredictQuery,
    SelectionTime,
)
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings
from tandemkv.kernels.exchange import exchange_rows
from tandemkv.kernels.stopwatch import median_us

from .cache_engine import CacheEngine
from .factory import create

_MOST_BYTES = 512 << 20
"""Of the scratch keys, and of the scratch resident sets. A GPU's L2 cache holds a tenth of it."""
_MOST_TOKENS = {"cpu": 1 << 15}
"""Scanned in one run; where more are asked for, time is taken to grow with the requests."""


def measure(
    *,
    model: ModelSpec,
    settings: RankSettings,
    num_slots: int,
    page_size: int,
    max_batch: int,
    device: torch.device,
    predict_query: PredictQuery,
    model_dir: Path | None = None,
) -> SelectionTime | None:
    """See `tandemkv.cache_rank.protocol.engine.measure_selection`.

    The measured rank has one layer, whose queries jump from step to step, so that every
    repetition fetches as many rows as a step may. Page tables name the scratch pages in random
    order, more than once if the scratch is smaller than the pool.
    """
    selection = settings.selection
    num_cold = DenseLengths.of(selection, selection.num_resident).num_cold
    load = largest_load(
        num_slots=num_slots, max_batch=max_batch, max_context=model.max_context, num_cold=num_cold
    )
    if load is None:
        return None
    batch, context = load
    scratch = _Scratch.make(
        model, settings, num_slots=num_slots, page_size=page_size, load=load, device=device
    )
    # Its layer is none of those that are not selected for.
    alike = msgspec.structs.replace(model, windowed_layers=(), linear_layers=())
    rank = create(
        model=msgspec.structs.replace(alike, num_layers=1), settings=_every_step(settings),
        pools=scratch.pools, max_batch=scratch.batch, predict_query=predict_query,
        model_dir=model_dir, calibrated=alike,
    )  # fmt: skip
    if not rank.program.selects:
        return None
    lengths = prompt_lengths(num_cold + 1, min(model.max_context, num_slots))
    scratch.seed_prompts(rank, lengths, window=selection.seed_window)
    total = scratch.selection_us(rank, context)
    transfer = scratch.transfer_us(rank, context, cap=selection.fetch_cap_tokens)
    scale = batch / scratch.batch
    return SelectionTime(
        scan_us=scale * max(0.0, total - transfer),
        transfer_us=scale * transfer,
        batch=batch,
        context=context,
    )


def _every_step(settings: RankSettings) -> RankSettings:
    """Return `settings` of a rank that chooses in each step, in its one layer."""
    selection = settings.selection.model_copy(
        update={"exact_layers": (), "refresh_every": 1, "anchors": (0,), "late_layers": 0}
    )
    return settings.model_copy(
        update={"selection": selection, "stress_selection": True, "evaluation": False}
    )


@dataclass(frozen=True)
class _Scratch:
    """Memory to measure in: keys and resident sets of one layer, and who uses them.

    `batch` requests are selected for in a run; `num_slots` slots of keys there are.
    """

    model: ModelSpec
    pools: EnginePools
    batch: int
    num_slots: int
    generator: torch.Generator

    @classmethod
    def make(
        cls,
        model: ModelSpec,
        settings: RankSettings,
        *,
        num_slots: int,
        page_size: int,
        load: tuple[int, int],
        device: torch.device,
    ) -> _Scratch:
        """Allocate at most `_MOST_BYTES` of keys, and as much of resident sets.

        Of keys more if bounds of their pages are kept, and one request has more.
        """
        selection, (batch, context) = settings.selection, load
        dtype, stored = getattr(torch, model.dtype), getattr(torch, model.stored_dtype)
        token_bytes = model.num_kv_heads * model.head_dim * stored.itemsize
        most = min(
            max(1, _MOST_BYTES // (2 * max(1, selection.num_resident) * token_bytes)),
            max(1, _MOST_TOKENS.get(device.type, num_slots) // context),
        )
        measured = min(batch, most)
        least = page_size
        if find_policy(selection.policy).capabilities.index == "page_bounds":
            least = context + page_size - 1  # of which there are as many as slots, in each row
        slots = min(num_slots, max(least, _MOST_BYTES // token_bytes)) // page_size * page_size
        shape = (measured + 1, selection.num_resident, model.num_kv_heads, model.head_dim)
        # The process's own generators are for sampling, and in step on all tensor-parallel ranks.
        generator = torch.Generator(device).manual_seed(0)
        keys = torch.randn(slots, *shape[2:], generator=generator, device=device, dtype=dtype)
        keys = keys.to(stored)
        k, v = (torch.zeros(shape, dtype=stored, device=device) for _ in range(2))
        weights = torch.zeros((1, shape[0], shape[2], selection.num_samples), device=device)
        pools = EnginePools(
            k=[keys],
            v=[keys],
            resident=[(k, v)],
            page_size=page_size,
            log_weight=weights if selection.num_samples else None,
            is_far=settings.placement.has_far_pool,
        )
        return cls(model, pools, measured, slots, generator)

    @property
    def rows(self) -> torch.Tensor:
        return torch.arange(1, self.batch + 1, device=self.generator.device)

    def random(self, *size: int) -> torch.Tensor:
        """Draw normal numbers in the model's dtype."""
        dtype, device = getattr(torch, self.model.dtype), self.generator.device
        return torch.randn(size, generator=self.generator, device=device, dtype=dtype)

    def page_tables(self, num_rows: int, context: int) -> torch.Tensor:
        """Slots of the positions of rows ``1 .. num_rows``, ``[num_rows + 1, context]`` int32."""
        size, device = self.pools.page_size, self.generator.device
        num_pages = -(-context // size)
        order = torch.randperm(self.num_slots // size, generator=self.generator, device=device)
        index = torch.arange((num_rows + 1) * num_pages, device=device) % len(order)
        first = order[index].view(num_rows + 1, num_pages, 1) * size
        table = first + torch.arange(size, device=device)
        return table.flatten(1)[:, :context].to(torch.int32).contiguous()

    def seed_prompts(self, rank: CacheEngine, lengths: Sequence[int], *, window: int) -> None:
        """Compute prompts of the given lengths, so that their kernels are compiled."""
        every = torch.arange(self.num_slots, device=self.generator.device)
        rank.begin_extend([0], [0], [self.num_slots], [every])
        rank.extend(0, every)
        for length in lengths:
            prompt = self.page_tables(1, length)[1]
            rank.begin_extend([1], [length], [length], [prompt])
            late = self.random(min(window, length), self.model.num_qo_heads, self.model.head_dim)
            rank.seed(0, 0, 1, late)

    def selection_us(self, rank: CacheEngine, context: int) -> float:
        """Median time of a step's selection and fetch, in microseconds."""
        rows, device = self.rows, self.generator.device
        rank.seed_identity(rows, None)
        table = self.page_tables(self.batch, context)
        # What is measured are other requests than that of the longest prompt.
        every, whole = list(range(1, self.batch + 1)), [context] * self.batch
        rank.begin_extend(every, whole, whole, list(table[1:]))
        rank.extend(0, table[1].long())  # bounds of pages are of requests, not of slots
        lengths = torch.full((self.batch,), context, device=device)
        query = self.random(self.batch, self.model.num_qo_heads, self.model.head_dim)
        hidden = self.random(self.batch, self.model.hidden_size)

        def select() -> None:
            if rank.program.needs_hidden:
                rank.choose_ahead(0, hidden)
            else:
                rank.choose(0, query)
            rank.fetch(0, self.batch)
            rank.end_step()

        return median_us(
            select, device, prepare=lambda: rank.begin_decode(rows, lengths, table),
            is_captured=rank.program.is_captured,
        )  # fmt: skip

    def transfer_us(self, rank: CacheEngine, context: int, *, cap: int) -> float:
        """Median time of copying `cap` rows a request and head, in microseconds."""
        pools, rows, device = self.pools, self.rows, self.generator.device
        k_res, v_res = pools.resident[0]
        shape = (self.batch, pools.k[0].shape[1], cap)
        to = torch.arange(shape[2], dtype=torch.int32, device=device).expand(shape).contiguous()
        found = torch.randint(
            context, shape, generator=self.generator, dtype=torch.int32, device=device
        )
        weights = rank.weights.carried(0, 0, rank.batch.active[: self.batch])

        def copy() -> None:
            exchange_rows(
                pools.k[0], pools.v[0], rank.batch.pages[: self.batch], found, to, k_res, v_res,
                rows, page_size=pools.page_size, weights=weights,
            )  # fmt: skip

        return median_us(copy, device, budget_s=0.1)


def largest_load(
    *, num_slots: int, max_batch: int, max_context: int, num_cold: int
) -> tuple[int, int] | None:
    """Return the most requests, and their tokens, that are selected for and fit into the pool.

    As many requests as may run share the pool evenly; fewer if they would be too short then for
    anything to be selected (`num_cold` tokens). None if not even one is long enough.
    """
    context = min(max_context, max(num_slots // max_batch, num_cold + 1))
    batch = min(max_batch, num_slots // context)
    return (batch, context) if context > num_cold and batch else None


def prompt_lengths(shortest: int, longest: int) -> list[int]:
    """Return lengths of prompts to seed at start, so that none that is served compiles a kernel.

    A kernel is compiled for each power of two in which a prompt's length lies, roughly: on a GPU
    that holds a request up for a second or two.
    """
    found = [min(shortest, longest)]
    while 2 * found[-1] <= longest:
        found.append(2 * found[-1])
    return [*found, longest] if longest > found[-1] else found
