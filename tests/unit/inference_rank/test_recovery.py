# SPDX-License-Identifier: Apache-2.0
"""The turns of SGLang's scheduler from a loss to the end of the pause, or of patience."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import Future

import pytest
from recovery_world import Connection, recovery_of
from recovery_world import nobody_waits as nobody_waits
from scheduler_world import World

from tandemkv.cache_rank.protocol.step_ring import RESIDENT
from tandemkv.inference_rank.resume.recovery import Recovery, State
from tandemkv.inference_rank.sglang.versions import row_of


@pytest.fixture
def world() -> World:
    """Two requests that decode, and one whose prompt is half computed."""
    world = World(chunk=16)
    world.model_config.world = world
    for length in (10, 14, 70):
        world.add(list(range(1, length + 1)), 20)
    for _ in range(3):
        batch = world.next_batch()
        world.take(batch, world.launch(batch))
        world.last_batch = batch
    return world


def turn_until(recovery: Recovery, world: World, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, recovery.state
        recovery.turn(world)


def test_requests_wait_and_go_on(world: World) -> None:
    connection = Connection()
    recovery = recovery_of(world, connection)
    recovery.turn(world)
    assert not world._engine_paused, "nothing is lost"
    tokens = [list(r.output_ids) for r in world.requests]
    connection.mark_lost("its process ended")
    recovery.turn(world)
    assert recovery.state is State.MEETING
    assert world._engine_paused
    assert not recovery.refuses(world, world.requests[0])
    connection.is_there = True
    world.requests[2].output_ids.append(7)  # as one that was retracted has
    turn_until(recovery, world, lambda: recovery.state is State.RESUMING)
    world.requests[2].output_ids.pop()
    (rows,) = connection.resumed
    own = [row_of(req) for req in world.requests]
    assert len(set(own)) == 3
    assert [(r.row, r.generation, r.length, r.flags) for r in rows] == [
        (own[0], 100 + own[0], 10, 0),  # fits: it has no resident set
        (own[1], 100 + own[1], 14, RESIDENT),
        (own[2], 100 + own[2], 34, 0),  # its prompt is not through
    ]
    recovery.turn(world)
    assert world._engine_paused, "the rows are not taken up yet"
    assert not connection.refilled, "their K/V may not be back yet"
    connection.is_finished = True
    recovery.turn(world)
    want = [(own[0], 10), (own[1], 14), (own[2], 34)]
    assert connection.refilled == [want], "with tokens that are stored"
    assert recovery.state is State.SERVING
    assert not world._engine_paused
    assert connection.confirmed == connection.step
    counters = world.counters
    assert (counters.restored_rows_total, counters.reseeded_rows_total) == (2, 1)
    assert connection.num_seeded == 1, "the next step selects for the set that was chosen anew"
    assert counters.pauses_total == 1
    assert 0 < counters.pause_ms_total == counters.longest_pause_ms
    assert [list(r.output_ids) for r in world.requests] == tokens
    world.run()
    world.check_nothing_is_left()


def test_a_step_that_was_not_finished_is_a_loss(world: World) -> None:
    connection = Connection()
    recovery = recovery_of(world, connection)
    world.engine.faults[world.engine.number + 1] = "late"
    batch = world.next_batch()
    world.take(batch, world.launch(batch))
    world.last_batch = batch
    recovery.turn(world)
    assert connection.lost_reason == "a step was not finished"
    assert recovery.state is State.MEETING


def test_an_administrators_pause_stays_one(world: World) -> None:
    connection = Connection()
    connection.is_there = connection.is_finished = True
    connection.resumed_rows = (3, 0)
    for is_paused in (True, False):
        recovery = recovery_of(world, connection)
        connection.mark_lost("gone")
        recovery.turn(world)
        world._engine_paused = is_paused
        recovery.note_pause(world)
        assert world._engine_paused
        turn_until(recovery, world, lambda r=recovery: r.state is State.SERVING)
        assert world._engine_paused is is_paused
        world._engine_paused = False
    assert connection.num_seeded == 0, "no set was chosen anew"


def test_after_the_timeout_requests_end_and_new_ones_are_refused(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    connection = Connection()
    connection.is_finished = True
    recovery = recovery_of(world, connection, timeout_s=0.05)
    waiting = world.add([1, 2, 3], 5)
    connection.mark_lost("its process ended")
    turn_until(recovery, world, lambda: recovery.is_down)
    recovery.turn(world)
    assert {abort.rid for abort in world.sent} == {"r0", "r1", "r2", waiting.rid}
    for abort in world.sent:
        assert abort.finished_reason["status_code"] == 503
        assert "its process ended" in abort.finished_reason["message"]
    assert recovery.refuses(world, waiting)
    assert world.counters.requests_failed_total == 4
    assert "4 requests end with HTTP 503" in caplog.text
    assert world.counters.requests_refused_total == 1
    world.check_nothing_is_left()
    connection.is_there = True
    turn_until(recovery, world, lambda: recovery.state is State.SERVING)
    assert not recovery.is_down
    assert connection.resumed == [()]
    assert not recovery.refuses(world, waiting)


def test_rows_that_cannot_be_taken_up_are_computed_again(world: World) -> None:
    connection = Connection()
    connection.is_there = True
    recovery = recovery_of(world, connection)
    connection.mark_lost("gone")
    for number in range(1, 3):
        turn_until(recovery, world, lambda: recovery.state is State.RESUMING)
        assert len(connection.resumed) == number
        connection.mark_lost("it crashed over the rows")
        recovery.turn(world)
    turn_until(recovery, world, lambda: recovery.state is State.RESUMING)
    assert connection.num_forgotten == 1
    assert connection.num_closed == 1
    assert connection.resumed[-1] == ()
    assert world.counters.recomputed_requests_total == 3
    assert [r.rid for r in world.waiting_queue] == ["r0", "r1", "r2"]
    connection.is_finished = True
    recovery.turn(world)
    assert recovery.state is State.SERVING
    world.run()
    world.check_nothing_is_left()


def test_an_engine_that_does_not_take_up_rows_is_given_up(world: World) -> None:
    """Its process lives and answers heartbeats: nothing but its progress tells."""
    connection = Connection()
    connection.is_there = True
    recovery = recovery_of(world, connection)
    connection.mark_lost("its process ended")
    turn_until(recovery, world, lambda: recovery.state is State.RESUMING)
    for _ in range(5):
        recovery.turn(world)
    assert recovery.state is State.RESUMING, "it takes its time"
    connection.is_stuck = True
    recovery.turn(world)
    assert recovery.state is State.MEETING
    connection.is_stuck, connection.is_finished = False, True
    turn_until(recovery, world, lambda: recovery.state is State.SERVING)
    assert connection.epoch == 3
    assert len(connection.resumed) == 2
    assert world.counters.recomputed_requests_total == 0
    world.run()
    world.check_nothing_is_left()


@pytest.mark.parametrize("is_stuck", [False, True], ids=["late", "stuck"])
def test_a_server_that_gave_up_while_rows_were_taken_up_comes_back(
    world: World, is_stuck: bool
) -> None:
    """With the same epoch, whose engine was late, or with the next."""
    connection = Connection()
    connection.is_there = True
    recovery = recovery_of(world, connection, timeout_s=0.05)
    connection.mark_lost("its process ended")
    turn_until(recovery, world, lambda: recovery.is_down)
    assert recovery.state is State.RESUMING
    late = world.add([1, 2, 3], 5)
    world.waiting_queue.remove(late)
    assert recovery.refuses(world, late)
    told = [abort.finished_reason["message"] for abort in world.sent]
    assert len(told) == 4
    assert all("was lost (its process ended) and" in text for text in told), told
    if is_stuck:
        connection.is_stuck = True
        recovery.turn(world)
        connection.is_stuck = False
    connection.is_finished = True
    turn_until(recovery, world, lambda: recovery.state is State.SERVING)
    assert not recovery.is_down
    assert connection.resumed[1:] == ([()] if is_stuck else [])
    world.add([1, 2, 3], 5)
    world.run()
    world.check_nothing_is_left()


def test_requests_whose_memory_is_gone_are_computed_again(world: World) -> None:
    connection = Connection()
    connection.is_there = connection.is_finished = connection.has_lost_memory = True
    recovery = recovery_of(world, connection)
    tokens = [list(r.output_ids) for r in world.requests]
    connection.mark_lost("its host ended")
    recovery.turn(world)
    turn_until(recovery, world, lambda: recovery.state is State.SERVING)
    assert (connection.num_forgotten, connection.num_closed) == (1, 1)
    assert connection.resumed == [()], "nothing is taken up from other memory"
    assert [r.rid for r in world.waiting_queue] == ["r0", "r1", "r2"]
    assert world.counters.recomputed_requests_total == 3
    world.run()
    assert [list(r.output_ids)[: len(t)] for r, t in zip(world.requests, tokens, strict=True)] == (
        tokens
    )
    world.check_nothing_is_left()


def test_a_loss_without_progress_in_between_is_the_same_pause(world: World) -> None:
    """An engine that crashes over one step again and again does not pause for ever."""
    connection = Connection()
    connection.is_there = connection.is_finished = True
    recovery = recovery_of(world, connection, timeout_s=0.3)
    began = time.monotonic()
    while not recovery.is_down:
        connection.mark_lost("it crashed over the step")
        recovery.turn(world)
        turn_until(recovery, world, lambda: recovery.state is State.SERVING or recovery.is_down)
        assert time.monotonic() - began < 20
    assert world.counters.requests_failed_total == 3


def test_each_pause_is_told_with_its_own_length(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Though those of one loss are added up for the time after which requests end."""
    connection = Connection()
    connection.is_finished = True
    recovery = recovery_of(world, connection)
    lengths: list[float] = []
    for _ in range(3):
        connection.is_there = False
        connection.mark_lost("it crashed over the step")
        began = time.monotonic()
        recovery.turn(world)
        assert recovery.pause_s <= time.monotonic() - began
        time.sleep(0.2)
        connection.is_there = True
        turn_until(recovery, world, lambda: recovery.state is State.SERVING)
        lengths.append((time.monotonic() - began) * 1e3)
    counters = world.counters
    assert counters.pauses_total == 3
    assert 3 * 200 <= counters.pause_ms_total <= sum(lengths) + 3  # whole ms of each
    assert 200 <= counters.longest_pause_ms <= max(lengths) + 1
    told = re.findall(r"is back after ([\d.]+) s", caplog.text)
    rounded = 10.0  # ms, of what is told
    assert len(told) == 3
    for text, length in zip(told, lengths, strict=True):
        assert 200 - rounded <= float(text) * 1e3 <= length + rounded


def test_pauses_of_an_idle_server_are_not_one() -> None:
    world = World()
    world.model_config.world = world
    connection = Connection()
    connection.is_there = connection.is_finished = True
    recovery = recovery_of(world, connection, timeout_s=0.5)
    connection.mark_lost("its process ended")
    recovery.turn(world)
    turn_until(recovery, world, lambda: recovery.state is State.SERVING)
    time.sleep(0.3)
    for served_s in (0.3, 0.6):  # together longer than the pause may be; and one alone
        connection.is_there = False
        world.add([1, 2, 3], 5)
        connection.mark_lost("its process ended")
        recovery.turn(world)
        assert recovery.pause_s < 0.3
        assert not recovery.is_down
        connection.is_there = True
        turn_until(recovery, world, lambda: recovery.state is State.SERVING)
        time.sleep(served_s)
    assert not world.sent
    assert world.counters.longest_pause_ms < 500


def test_dense_steps_are_progress() -> None:
    """They ask nothing of the engine, which confirms nothing of them."""
    world = World()
    world.model_config.world = world
    request = world.add(list(range(1, 11)), 60)
    connection = Connection()
    connection.is_there = connection.is_finished = True
    recovery = recovery_of(world, connection, timeout_s=0.5)
    begin = world.engine.begin

    def begin_dense() -> None:
        begin()
        world.engine.pass_step = None

    def step() -> None:
        batch = world.next_batch()
        world.take(batch, world.launch(batch))
        world.last_batch = batch

    step()
    world.engine.begin = begin_dense
    for _ in range(3):
        connection.mark_lost("its process ended")
        recovery.turn(world)
        time.sleep(0.2)  # three of these are longer than a pause may be
        turn_until(recovery, world, lambda: recovery.state is State.SERVING)
        step()
    assert not world.sent
    assert len(request.output_ids) == 4


def test_a_take_up_that_failed_is_forgotten_with_its_pause(world: World) -> None:
    """Two in one pause make all requests be computed again, two of two pauses do not."""
    connection = Connection()
    connection.is_there = True
    recovery = recovery_of(world, connection)
    for _ in range(2):
        connection.is_finished = False
        connection.mark_lost("its process ended")
        recovery.turn(world)
        turn_until(recovery, world, lambda: recovery.state is State.RESUMING)
        connection.mark_lost("while it took up rows")
        recovery.turn(world)
        connection.is_finished = True
        turn_until(recovery, world, lambda: recovery.state is State.SERVING)
    assert world.counters.recomputed_requests_total == 0


def test_a_cache_rank_that_fails_for_hours_does_not_end_the_scheduler(world: World) -> None:
    """Every few seconds one comes back and ends again, as where its container is too small."""
    recovery = recovery_of(world, Connection())
    for _ in range(1100):
        recovery._fail_to_resume()
    assert 4 < recovery._not_before - time.monotonic() <= 5


def test_requests_whose_grammar_is_compiled_are_refused_as_well(world: World) -> None:
    """SGLang keeps them in a queue of their own, and looks there before a pass only."""
    connection = Connection()
    recovery = recovery_of(world, connection, timeout_s=0.05)
    waiting = world.add([1, 2, 3], 5)
    world.waiting_queue.remove(waiting)
    waiting.grammar = Future()
    world.grammar_manager.grammar_queue.append(waiting)
    connection.mark_lost("its process ended")
    turn_until(recovery, world, lambda: recovery.is_down)
    recovery.turn(world)
    assert world.grammar_manager.grammar_queue == []
    assert waiting.grammar.cancelled()
    assert world.counters.requests_failed_total == 4


@pytest.mark.parametrize("number", [None, *range(4, 16)])
def test_a_pass_that_still_runs_leaves_no_token_behind_the_rewinding(number: int | None) -> None:
    """On a GPU the pass behind a lost one is launched already, and ends after the loss is known."""
    faults = {} if number is None else {number: "late"}
    world = World(faults, overlap=True, is_queued=True)
    world.model_config.world = world
    for length in (10, 14, 30):
        world.add(list(range(1, length + 1)), 20)
    connection = Connection()
    connection.is_there = connection.is_finished = True
    world.before_turn = recovery_of(world, connection).turn
    found = world.run()
    undisturbed = World(overlap=True)
    undisturbed.model_config.world = undisturbed
    for length in (10, 14, 30):
        undisturbed.add(list(range(1, length + 1)), 20)
    assert found == undisturbed.run()
    assert len(connection.resumed) == len(faults)
