# SPDX-License-Identifier: Apache-2.0
"""An engine that takes up the rows of an earlier one goes on as if that had never ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from engine_world import LAYERS, QUERY_HEADS, World
from test_policies_in_engine import SPARSE, step

from tandemkv.cache_rank.engine.page_index import PageBoundsIndex
from tandemkv.cache_rank.protocol.gpu_flags import word_of
from tandemkv.cache_rank.service.row_versions import RowVersions

_BOOKS = ("resident_positions", "resident_last_used")


class Memory:
    """Named tensors that outlive an engine."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if name not in self.tensors:
            self.tensors[name] = torch.zeros(shape, dtype=dtype)
        assert self.tensors[name].shape == torch.Size(shape)
        return self.tensors[name]


def world_on(memory: Memory, **selection: object) -> World:
    world = World(**selection)  # type: ignore[arg-type]
    world.pools = replace(world.pools, allocate=memory.allocate)
    world.rank = world.make()
    return world


def versions_of(world: World, memory: Memory) -> RowVersions:
    books = {name: memory.tensors[name] for name in _BOOKS}
    if world.pools.log_weight is not None:
        books["sample_log_weight"] = world.pools.log_weight
    return RowVersions(books, memory.allocate)


def record(kept: RowVersions, rows: list[int], generations: list[int], *, step: int) -> None:
    """Keep the books of `rows` as they are before `step`."""
    kept.name(rows, generations, epoch=1)
    kept.record(torch.tensor(rows), step=torch.tensor([step - 1], dtype=torch.int32))


def sets_of(world: World, row: int) -> list[torch.Tensor]:
    return [world.pools.resident[layer][0][row].clone() for layer in SPARSE]


def prefill(world: World, row: int, length: int) -> None:
    world.prefill(row, length)
    for layer in SPARSE:  # where nothing is, nothing differs
        world.pools.resident[layer][0][row, world.width :] = 0


def positions(world: World, row: int) -> torch.Tensor:
    return world.rank._mirror.positions[:, row].clone()


@pytest.mark.parametrize(
    "selection",
    [
        {"policy": "look_ahead"},
        {"policy": "look_ahead", "sample_tokens": 8},
        {"policy": "look_ahead", "index_dtype": "int8"},
        {"policy": "look_ahead", "index_dtype": "int4"},
        {"policy": "look_ahead", "late_layers": 1, "exact_layers": ()},
        {"policy": "last_query"},
        {"policy": "async_spade", "options": {"unrotate": False}},
        {"policy": "mean_query", "options": {"unrotate": False}},
        {"policy": "quest"},
    ],
    ids=lambda s: " ".join(map(str, s.values())),
)
@pytest.mark.parametrize("broken", [0, 2, LAYERS, 2 * LAYERS])
def test_steps_after_a_loss_are_those_of_an_engine_that_lived(
    selection: dict[str, object], broken: int
) -> None:
    """The step after three is broken off behind `broken` layers, and done again.

    Or both that follow were done, and nobody heard of their ends, as the overlap scheduler has it.
    """
    rows, lengths = [1, 3], [200, 150]
    found = []
    for is_lost in (False, True):
        memory = Memory()
        world = world_on(memory, **selection)
        kept = versions_of(world, memory)
        for row, length in zip(rows, lengths, strict=True):
            prefill(world, row, length)
        record(kept, rows, [7, 8], step=3)
        queries = torch.Generator().manual_seed(5)
        run = runner(world, queries)
        for number in range(1, 4):
            run(rows, [n + number for n in lengths], LAYERS)
            record(kept, rows, [7, 8], step=3 + number)
        if is_lost:
            state = queries.get_state()
            run(rows, [n + 4 for n in lengths], min(broken, LAYERS))
            if broken >= LAYERS:
                record(kept, rows, [7, 8], step=7)
            if broken > LAYERS:
                run(rows, [n + 5 for n in lengths], LAYERS)
                record(kept, rows, [7, 8], step=8)
            queries.set_state(state)
            for layer in range(LAYERS):  # what a dying process leaves
                world.pools.resident[layer][0][rows] = float("nan")
                world.pools.resident[layer][1][rows] = float("nan")
            world.rank = world.make()
            kept = versions_of(world, memory)
            assert kept.restore(rows, [7, 8], step=6) == [True, True]
            world.rank.resume(
                rows,
                [n + 3 for n in lengths],
                [world.table[row, : n + 3].clone() for row, n in zip(rows, lengths, strict=True)],
                restored=[True, True],
                reseeded=[False, False],
            )
            run = runner(world, queries)
        for number in range(4, 9):
            run(rows, [n + number for n in lengths], LAYERS)
        found.append(
            [positions(world, row) for row in rows]
            + [t.nan_to_num(0) for row in rows for t in sets_of(world, row)]
            + ([] if world.pools.log_weight is None else [world.pools.log_weight[1:, rows]])
        )
    for mine, want in zip(*found, strict=True):
        assert torch.equal(mine, want)


def runner(world: World, queries: torch.Generator) -> Callable[[list[int], list[int], int], None]:
    """Return a function that does the first layers of a step, as a link does."""

    def run(rows: list[int], lengths: list[int], layers: int) -> None:
        rank = world.rank
        program, size = rank.program, len(rows)
        hidden = torch.randn((LAYERS, size, QUERY_HEADS, 16), generator=queries)
        rank.begin_step()
        rank.begin_decode(torch.tensor(rows), torch.tensor(lengths), world.table)
        for layer in range(layers):
            for target in program.targets_of(layer):
                rank.choose_ahead(target, hidden[layer].flatten(1))
                rank.fetch(target, size)
            if layer == program.last_entry:
                for late in program.late_layers:
                    rank.choose_late(late, hidden[late].flatten(1))
                    rank.fetch(late, size)
            if program.needs_query and program.is_sparse_layer(layer):
                if program.selects_for_next_step:
                    rank.append(layer, size)
                rank.choose(layer, hidden[layer])
                rank.fetch(layer, size)
        if layers == LAYERS:
            for layer in range(LAYERS):
                rank.append(layer, size)
            rank.end_step()

    return run


def test_rows_without_a_version_get_the_sink_and_the_latest() -> None:
    memory = Memory()
    world = world_on(memory, policy="look_ahead", sample_tokens=8)
    kept = versions_of(world, memory)
    world.prefill(1, 200)
    assert kept.restore([1], [7], step=9) == [False]
    table = world.table[1, :200].clone()
    moved: list[None] = []
    world.rank.resume(
        [1], [200], [table], restored=[False], reseeded=[True], moved=lambda: moved.append(None)
    )
    assert len(moved) > len(SPARSE), "whoever waits hears of each layer, and of the row"
    latest = set(range(201 - 16 - (world.width - 4), 201 - 16))
    for layer in SPARSE:
        world.check_books(layer, 1, 201)
        for head in world.resident(layer, 1)[1].tolist():
            assert set(head) == {0, 1, 2, 3} | latest
    assert world.pools.log_weight is not None
    assert bool(world.pools.log_weight[1:, 1].isneginf().all())


@pytest.mark.parametrize("is_word", [True, False])
@pytest.mark.parametrize("first", [1, 2**31 - 3, 2**32 + 1])
def test_copies_are_found_where_the_word_of_a_step_wraps_around(first: int, is_word: bool) -> None:
    """A GPU knows the step by 32 bits, the host by 64."""
    for lost in range(first + 2, first + 7):
        memory, book = Memory(), torch.zeros(2, 3, 1)
        kept = RowVersions({"book": book}, memory.allocate)
        kept.name([1, 2], [7, 8], epoch=1)
        for number in range(first, lost + 2):  # the last two were under way
            book[:, 1:] = number
            word = torch.tensor([word_of(number)]).int() if is_word else torch.tensor([number])
            kept.record(torch.tensor([1, 2]), step=word)
        book.zero_()
        taken_up = RowVersions({"book": book}, memory.allocate)
        assert taken_up.restore([1, 2], [7, 9], step=lost) == [True, False]
        assert (book[:, 1] == lost - 1).all()
        assert not book[:, 2].any()


@pytest.mark.parametrize("length", [1, 4 + 16 - 1, 4 + 16, 4 + 16 + 1, 52 + 16 - 2, 52 + 16 - 1])
def test_rows_that_are_short_get_all_of_their_candidates(length: int) -> None:
    """Where nothing is attended to as a whole they have a set as well."""
    world = world_on(Memory(), policy="look_ahead", dense_while_fits=False)
    assert world.width == 52
    table = world.table[2, :length].clone()
    world.rank.resume([2], [length], [table], restored=[False], reseeded=[True])
    candidates = set(range(max(0, length + 1 - 16)))
    for layer in SPARSE:
        if candidates:
            world.check_books(layer, 2, length + 1)
        for head in world.resident(layer, 2)[1].tolist():
            assert set(head) - {-1} == candidates
            assert len(head) - head.count(-1) == len(candidates)


def test_page_bounds_are_those_of_the_steps_that_were() -> None:
    memory = Memory()
    world = world_on(memory, policy="quest")
    world.prefill(2, 150)
    for number in range(1, 40):
        step(world, [2], [150 + number])
    index = world.rank._index
    assert isinstance(index, PageBoundsIndex)
    want = {layer: index._bounds[layer][:, 2].clone() for layer in SPARSE}
    world.rank = world.make()
    table = world.table[2, :189].clone()
    world.rank.resume([2], [189], [table], restored=[True], reseeded=[False])
    index = world.rank._index
    assert isinstance(index, PageBoundsIndex)
    for layer in SPARSE:
        assert torch.equal(index._bounds[layer][:, 2], want[layer])


def books(num_rows: int = 4) -> dict[str, torch.Tensor]:
    return {"a": torch.zeros(2, num_rows, 3), "b": torch.zeros((1, num_rows), dtype=torch.int32)}


def test_the_state_before_a_step_survives_two_copies_after_it() -> None:
    memory, live = Memory(), books()
    kept = RowVersions(live, memory.allocate)
    for number in range(1, 8):
        # Row 2 takes part in every second step only: its copies are of those.
        rows = [1, 2] if number % 2 else [1]
        live["a"][:, rows] = live["b"][:, rows] = number
        record(kept, rows, [5] * len(rows), step=number + 1)
    live["a"][:] = live["b"][:] = -1
    again = RowVersions(live, memory.allocate)
    assert again.restore([1, 2, 3], [5, 5, 5], step=6) == [True, True, False]
    assert live["a"][:, 1].unique().tolist() == [5]
    assert live["a"][:, 2].unique().tolist() == [5]
    assert live["b"][:, 3].unique().tolist() == [-1]
    # Copies of later steps are given up, the one that was taken stays.
    live["a"][:] = -2
    assert again.restore([1, 2], [5, 5], step=99) == [True, True]
    assert live["a"][0, 1:3, 0].tolist() == [5, 5]


def test_another_tenants_copies_and_half_a_copy_are_none() -> None:
    memory, live = Memory(), books()
    kept = RowVersions(live, memory.allocate)
    record(kept, [1], [5], step=3)
    assert kept.restore([1], [6], step=9) == [False]
    record(kept, [1], [5], step=3)
    record(kept, [1], [5], step=4)
    kept.stamps[kept.stamps[:, 1, 2] == 4, 1] = 0  # the process ended while it copied
    assert kept.restore([1], [5], step=9) == [True]
    assert kept.restore([1], [5], step=2) == [False]
