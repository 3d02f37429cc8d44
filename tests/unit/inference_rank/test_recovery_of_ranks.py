# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel schedulers, each with a cache rank: what one loses, both do again.

Each scheduler is a thread. Whoever asks alone, or something else than the other, breaks the barrier
at which answers are exchanged, and the test fails.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch.distributed as dist
from recovery_world import Connection, recovery_of
from recovery_world import nobody_waits as nobody_waits
from scheduler_world import World

from tandemkv.inference_rank.resume.agreement import Agreement
from tandemkv.inference_rank.resume.recovery import Recovery, State

RANKS = (0, 1)
PROMPTS, NEW_TOKENS = (10, 14, 70), 12
_PATIENCE_S = 20.0
_MOST_TURNS = 4000


class Table:
    """Where the ranks lay down their answers, with the place that asks."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(len(RANKS), timeout=_PATIENCE_S)
        self.answers: list[tuple[str, float]] = [("", 0.0)] * len(RANKS)

    def exchange(self, rank: int, question: str, value: float) -> list[float]:
        self.answers[rank] = (question, value)
        self.barrier.wait()
        found = list(self.answers)
        self.barrier.wait()
        assert len({asked for asked, _ in found}) == 1, found
        return [value for _, value in found]


class Agreed(Agreement):
    """An agreement over a `Table`."""

    def __init__(self, table: Table, rank: int) -> None:
        super().__init__()
        self.is_alone, self._table, self._rank = False, table, rank

    def any(self, flag: bool) -> bool:
        return any(self._table.exchange(self._rank, "any", float(flag)))

    def all(self, flag: bool) -> bool:
        return all(self._table.exchange(self._rank, "all", float(flag)))

    def total(self, count: int) -> int:
        return int(sum(self._table.exchange(self._rank, "total", count)))


class Rank:
    """A scheduler with its connection; `script` is called before each of its turns."""

    def __init__(self, table: Table, number: int, faults: dict[int, str], timeout_s: float) -> None:
        agreement = Agreed(table, number)
        self.number = number
        self.world = World(faults, chunk=16, agreement=agreement)
        self.world.model_config.world = self.world
        self.connection = Connection()
        self.connection.is_there = self.connection.is_finished = True
        self.recovery = recovery_of(self.world, self.connection, timeout_s, agreement)
        self.turns = 0
        self.script: Callable[[Rank], None] = lambda _: None
        self.world.before_turn = self._turn
        for length in PROMPTS:
            self.world.add(list(range(1, length + 1)), NEW_TOKENS)

    def _turn(self, world: World) -> None:
        self.turns += 1
        self.script(self)
        self.recovery.turn(world)


class Ranks:
    """Both ranks, from their start to the end of all requests."""

    def __init__(self, faults: dict[int, str] | None = None, timeout_s: float = 60.0) -> None:
        self.table = Table()
        # World publishes SGLang's arguments for the process: one after the other.
        self.all = [
            Rank(self.table, number, (faults or {}) if number else {}, timeout_s)
            for number in RANKS
        ]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.table.barrier.abort()

    def run(self) -> list[list[list[int]]]:
        """Run both; returns the tokens that each has."""

        def one(rank: Rank) -> list[list[int]]:
            try:
                return rank.world.run(_MOST_TURNS)
            except BaseException:
                self.table.barrier.abort()
                raise

        with ThreadPoolExecutor(len(RANKS)) as pool:
            return list(pool.map(one, self.all))


@pytest.fixture(scope="module")
def undisturbed() -> list[list[int]]:
    world = World(chunk=16)
    for length in PROMPTS:
        world.add(list(range(1, length + 1)), NEW_TOKENS)
    return world.run()


def check(ranks: Ranks, tokens: list[list[list[int]]], want: list[list[int]]) -> None:
    assert tokens == [want, want]
    for rank in ranks.all:
        assert rank.recovery.state is State.SERVING
        rank.world.check_nothing_is_left()
    assert ranks.all[0].turns == ranks.all[1].turns


def lose_at(turn: int) -> Callable[[Rank], None]:
    def script(rank: Rank) -> None:
        if rank.turns == turn:
            rank.connection.mark_lost("its process ended")

    return script


@pytest.mark.parametrize("fault", ["void", "late"])
@pytest.mark.parametrize("step", [1, 4, 9, 15])
def test_a_pass_that_one_engine_did_not_finish_is_done_again_by_both(
    step: int, fault: str, undisturbed: list[list[int]]
) -> None:
    with Ranks({step: fault}) as ranks:
        check(ranks, ranks.run(), undisturbed)
        for rank in ranks.all:
            assert rank.world.counters.dropped_passes_total == 1
            assert rank.connection.num_left == 1
        first, second = (rank.connection.resumed for rank in ranks.all)
        assert first == second
        assert len(first) == 1


@pytest.mark.parametrize("turn", [2, 7, 13])
def test_the_epoch_of_the_other_engine_ends_in_order(
    turn: int, undisturbed: list[list[int]]
) -> None:
    with Ranks() as ranks:
        ranks.all[1].script = lose_at(turn)
        check(ranks, ranks.run(), undisturbed)
        left = [rank.connection.num_left for rank in ranks.all]
        assert left == [1, 0]  # it is told; the other one's process is gone
        assert [rank.connection.epoch for rank in ranks.all] == [2, 2]
        assert [rank.world.counters.pauses_total for rank in ranks.all] == [1, 1]


def test_each_rank_tells_of_the_cache_ranks_that_all_have_lost(
    undisturbed: list[list[int]],
) -> None:
    """The status of the first one is read."""

    def loses(rank: Rank) -> None:
        if rank.turns in (3, 12):
            rank.connection.mark_lost("its process ended")
            rank.world.counters.cache_rank_lost_total += 1

    with Ranks() as ranks:
        ranks.all[1].script = loses
        check(ranks, ranks.run(), undisturbed)
        counters = [rank.world.counters for rank in ranks.all]
        assert [each.cache_rank_lost_total for each in counters] == [0, 2]
        assert [each.as_values()["cache_rank_lost_total"] for each in counters] == [2, 2]
        assert "lost_by_other_ranks" not in counters[0].as_values()


def test_a_connection_is_kept_until_all_have_one(undisturbed: list[list[int]]) -> None:
    """A cache rank that ends while its connection is kept is met again."""

    def comes_back(rank: Rank) -> None:
        lose_at(8)(rank)
        rank.connection.is_there = rank.turns > 40

    def ends_meanwhile(rank: Rank) -> None:
        if rank.turns == 25:
            (kept,) = rank.connection.opened
            kept.is_gone = True

    with Ranks() as ranks:
        ranks.all[0].script, ranks.all[1].script = ends_meanwhile, comes_back
        check(ranks, ranks.run(), undisturbed)
        first, second = (rank.connection for rank in ranks.all)
        assert [each.is_closed for each in first.opened] == [True, False]
        assert [each.is_closed for each in second.opened] == [False]


def test_rows_that_one_engine_cannot_take_up_are_computed_again_by_both(
    undisturbed: list[list[int]],
) -> None:
    def crashes_over_rows(rank: Rank) -> None:
        lose_at(9)(rank)
        rank.connection.is_finished = len(rank.connection.resumed) > 2
        if rank.recovery.state is State.RESUMING and not rank.connection.is_finished:
            rank.connection.mark_lost("it crashed over the rows")

    with Ranks() as ranks:
        ranks.all[1].script = crashes_over_rows
        tokens = ranks.run()
        check(ranks, tokens, undisturbed)
        for rank in ranks.all:
            assert rank.connection.num_forgotten == 1
            assert rank.world.counters.recomputed_requests_total == len(PROMPTS)
            assert rank.connection.resumed[-1] == ()


def test_a_cache_rank_that_one_cannot_adopt_is_adopted_by_none(
    undisturbed: list[list[int]],
) -> None:
    with Ranks() as ranks:
        first, second = (rank.connection for rank in ranks.all)
        adopt, tried = second.adopt, []

        def fails_once(opened: Any) -> None:
            tried.append(opened)
            if len(tried) == 1:
                raise OSError("no memory")
            adopt(opened)

        second.adopt = fails_once  # type: ignore[method-assign]
        ranks.all[1].script = lose_at(6)
        check(ranks, ranks.run(), undisturbed)
        assert (len(first.opened), len(second.opened)) == (2, 2)
        assert first.num_left == 2
        assert len(first.resumed) == len(second.resumed) == 1


def test_patience_ends_for_both() -> None:
    def stays_away(rank: Rank) -> None:
        lose_at(6)(rank)
        rank.connection.is_there = rank.recovery.is_down

    with Ranks(timeout_s=0.2) as ranks:
        ranks.all[1].script = stays_away
        ranks.run()
        for rank in ranks.all:
            assert not rank.recovery.is_down
            assert rank.world.counters.requests_failed_total == len(PROMPTS)
            assert {abort.rid for abort in rank.world.sent} == {"r0", "r1", "r2"}
            rank.world.check_nothing_is_left()


def run_rank(number: int, store: Path, results: Any) -> None:
    """Be one of two ranks of a real group."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    agreement = Agreement(dist.group.WORLD)
    flags = ((False, False), (True, False), (True, True))
    found = [(agreement.any(pair[number]), agreement.all(pair[number])) for pair in flags]
    results.put((agreement.is_alone, found, agreement.total(3 + number)))
    dist.destroy_process_group()


def test_ranks_of_a_group_agree(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=run_rank, args=(n, tmp_path / "s", results)) for n in RANKS]
    for rank in ranks:
        rank.start()
    found = [results.get(timeout=60) for _ in ranks]
    for rank in ranks:
        rank.join()
    assert found == [(False, [(False, False), (True, False), (True, True)], 7)] * 2


def test_one_rank_agrees_with_itself() -> None:
    alone = Agreement()
    assert alone.is_alone
    assert [alone.any(flag) for flag in (True, False)] == [True, False]
    assert [alone.all(flag) for flag in (True, False)] == [True, False]
    assert alone.total(4) == 4


def test_a_rank_that_is_not_alone_breaks_off_no_pass() -> None:
    with Ranks() as ranks:
        ranks.run()
        assert not any(rank.world.engine.breaks_off for rank in ranks.all)
    world = World()
    world.add([1, 2, 3], 2)
    world.run()
    assert world.engine.breaks_off


def test_the_state_is_that_of_a_recovery(undisturbed: list[list[int]]) -> None:
    """Clients see one pause: both ranks are in the same state in each turn."""
    seen: list[list[State]] = [[], []]

    def note(recovery: Recovery, number: int) -> None:
        seen[number].append(recovery.state)

    with Ranks() as ranks:
        lose = lose_at(5)

        def first(rank: Rank) -> None:
            note(rank.recovery, 0)

        def second(rank: Rank) -> None:
            note(rank.recovery, 1)
            lose(rank)

        ranks.all[0].script, ranks.all[1].script = first, second
        check(ranks, ranks.run(), undisturbed)
    assert seen[0] == seen[1]
    assert set(seen[0]) == set(State)
