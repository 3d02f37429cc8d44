# SPDX-License-Identifier: Apache-2.0
"""Lost passes are undone on SGLang's own objects, and what follows is what would have been."""

from __future__ import annotations

import random
from typing import Any

import pytest
from scheduler_world import World

from tandemkv.inference_rank.resume.rewind import (
    end_requests,
    live_requests,
    recompute,
    rewind,
)
from tandemkv.inference_rank.sglang.versions import committed, row_of

SAMPLING: dict[str, list[dict[str, Any]]] = {
    "greedy": [{}],
    "penalties": [
        {"frequency_penalty": 0.7, "presence_penalty": 0.3},
        {"repetition_penalty": 1.4},
        {},
        {"min_new_tokens": 9},
    ],
    "sampled": [{"temperature": 0.9, "top_k": -1}, {}],
}


@pytest.fixture(autouse=True)
def penalties_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    original = ScheduleBatch.cumulate_penalty_output_tokens

    def followed(batch: Any) -> None:
        world = batch.model_config.world
        world.penalties.add(original, batch)

    monkeypatch.setattr(ScheduleBatch, "cumulate_penalty_output_tokens", followed)


def recover(world: World) -> None:
    """What `Recovery` does between two turns."""
    if world.passes.dropped:
        lost = list(world.passes.dropped) + [b for b, _ in world.result_queue]
        rewind(world, lost, world.penalties)
        world.passes.rewind(lost)


def served(
    faults: dict[int, str] | None = None, *, kind: str = "greedy", **options: Any
) -> tuple[World, list[list[int]]]:
    """Serve six requests, of which two have a prefix in common, with passes that are lost."""
    world = World(faults, **options)
    world.model_config.world = world
    rng = random.Random(4)
    shared = [rng.randrange(1, 97) for _ in range(20)]
    for i, length in enumerate((9, 30, 17, 41, 5, 24)):
        own = [rng.randrange(1, 97) for _ in range(length)]
        prompt = [*shared, *own] if i in (1, 4) else own
        sampling = SAMPLING[kind][i % len(SAMPLING[kind])]
        world.add(prompt, 8 + 3 * i, **sampling)

    world.before_turn = recover
    return world, world.run()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ["greedy", "penalties"])
def test_a_lost_pass_at_any_place_changes_no_token(kind: str, overlap: bool) -> None:
    options = {"kind": kind, "overlap": overlap, "chunk": 32}
    undisturbed, want = served(**options)
    undisturbed.check_nothing_is_left()
    passes = undisturbed.engine.number
    assert passes > 25
    for number in range(1, passes + 1):
        for fault in ("void", "late"):
            world, found = served({number: fault}, **options)
            assert found == want, (number, fault)
            world.check_nothing_is_left()
            assert world.counters.dropped_passes_total >= 1
            assert number not in world.engine.confirmed


@pytest.mark.parametrize("overlap", [False, True])
def test_losses_in_a_row_and_in_later_passes(overlap: bool) -> None:
    _, want = served(overlap=overlap, chunk=32)
    rng = random.Random(9)
    for _ in range(20):
        faults = {rng.randrange(1, 60): rng.choice(["void", "late"]) for _ in range(8)}
        world, found = served(faults, overlap=overlap, chunk=32)
        assert found == want, faults
        world.check_nothing_is_left()


def test_sampled_tokens_are_drawn_again_the_same() -> None:
    """One generator draws for a batch: the batches after a loss are the same ones."""
    undisturbed, want = served(kind="sampled", chunk=1000)
    first_decode = 4  # three passes are of prompts
    for number in range(first_decode, undisturbed.engine.number + 1):
        world, found = served({number: "late"}, kind="sampled", chunk=1000)
        assert found == want, number
        world.check_nothing_is_left()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prompt_that_continues_an_answer_finds_nothing_of_a_lost_pass(overlap: bool) -> None:
    """The pass behind a request's last token may be lost after its results were sent."""

    def answers(faults: dict[int, str]) -> tuple[int, list[list[int]]]:
        world = World(faults, overlap=overlap)
        world.model_config.world = world
        world.before_turn = recover
        first = world.add(list(range(1, 11)), 5)
        world.add(list(range(40, 52)), 12)
        world.run()
        world.add([*first.origin_input_ids, *first.output_ids, 3, 4], 6)
        found = world.run()
        world.check_nothing_is_left()
        return world.engine.number, found

    num_passes, want = answers({})
    for number in range(1, num_passes + 1):
        for fault in ("void", "late"):
            assert answers({number: fault})[1] == want, (number, fault)


def test_tokens_are_drawn_again_behind_a_lost_pass_that_draws_none() -> None:
    """A greedy pass is lost, and behind it one that has drawn: both are done again."""

    def answers(faults: dict[int, str]) -> tuple[int, list[list[int]]]:
        world = World(faults, overlap=True)
        world.model_config.world = world

        def turn(world: World) -> None:
            recover(world)
            if len(world.requests) == 1 and len(world.requests[0].output_ids) == 3:
                world.add(list(range(40, 52)), 8, temperature=0.9, top_k=-1)

        world.before_turn = turn
        world.add(list(range(1, 11)), 16)
        found = world.run()
        return world.engine.number, found

    num_passes, want = answers({})
    for number in range(1, num_passes + 1):
        assert answers({number: "late"})[1] == want, number


def test_rows_and_tree_stay_and_slots_of_lost_tokens_come_back() -> None:
    world = World()
    world.model_config.world = world
    for length in (12, 20):
        world.add(list(range(1, length + 1)), 30)
    for _ in range(6):
        batch = world.next_batch()
        world.take(batch, world.launch(batch))
        world.last_batch = batch
    before = [(row_of(r), list(r.output_ids), committed(r)) for r in world.requests]
    free, tree = world.token_to_kv_pool_allocator.available_size(), world.tree_cache.total_size()
    world.engine.faults[world.engine.number + 1] = "late"
    batch = world.next_batch()
    world.take(batch, world.launch(batch))
    world.last_batch = batch
    assert world.token_to_kv_pool_allocator.available_size() == free - 2
    begun = world.engine.steps_begun
    found = rewind(world, list(world.passes.dropped), world.penalties)
    world.passes.rewind(list(world.passes.dropped))
    assert found.num_rewound == 2
    assert found.decoding == tuple(world.requests)
    assert [(row_of(r), list(r.output_ids), committed(r)) for r in world.requests] == before
    assert all(r.kv.kv_allocated_len == committed(r) for r in world.requests)
    assert world.token_to_kv_pool_allocator.available_size() == free
    assert world.tree_cache.total_size() == tree
    assert world.engine.steps_begun == begun - 1, "the backend prepares the same step again"
    assert not world.waiting_queue
    assert world.last_batch is None


def begun(new_tokens: int = 20) -> World:
    world = World(chunk=16)
    world.model_config.world = world
    for length in (10, 14, 70):
        world.add(list(range(1, length + 1)), new_tokens)
    for _ in range(3):
        batch = world.next_batch()
        world.take(batch, world.launch(batch))
        world.last_batch = batch
    assert world.chunked_req is not None
    return world


def test_requests_are_computed_again_where_the_memory_is_gone() -> None:
    _, want = (lambda w: (w, w.run()))(begun())
    world = begun()
    found = recompute(world, world.penalties)
    assert {r.rid for r in found} == {"r0", "r1", "r2"}
    assert [r.rid for r in world.waiting_queue] == [r.rid for r in found]
    assert world.tree_cache.total_size() == 0
    world.stored.fill_(-1)
    assert world.run() == want, "this model attends to everything"
    world.check_nothing_is_left()


def test_requests_that_are_given_up_leave_nothing() -> None:
    world = begun()
    assert len(live_requests(world)) == 3
    assert len(end_requests(world, world.penalties)) == 3
    assert not live_requests(world)
    world.check_nothing_is_left()


def test_a_prompt_whose_client_left_does_not_wait_again() -> None:
    world = begun()
    world.engine.faults[world.engine.number + 1] = "void"
    batch = world.next_batch()
    world.take(batch, world.launch(batch))
    world.last_batch = batch
    world._pending_chunked_abort_req = world.chunked_req
    lost = list(world.passes.dropped)
    rewind(world, lost, world.penalties)
    world.passes.rewind(lost)
    assert not world.waiting_queue
    assert [abort.rid for abort in world.sent] == ["r2"]
    world.requests.pop()
    world.run()
    world.check_nothing_is_left()
