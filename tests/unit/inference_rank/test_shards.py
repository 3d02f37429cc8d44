# SPDX-License-Identifier: Apache-2.0
"""Several cache ranks of one inference rank: who gets what, and whose answer counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandemkv.cache_rank.protocol.errors import CacheRankLostError, ContractError
from tandemkv.cache_rank.protocol.step_ring import EntryKind, StepEntry
from tandemkv.inference_rank.links.sharded import (
    OpenedEpochs,
    ShardedConnection,
    ShardedSignals,
)

ENTRY = StepEntry(kind=EntryKind.DECODE, step=7, variant=0, num_cold=0, rows=())


class Part:
    """Signals of one cache rank; `answers` is whether it is there."""

    def __init__(self) -> None:
        self.answers, self.calls = True, list[str]()
        self.got: list[Any] = []

    def __getattr__(self, name: str) -> Callable[..., bool]:
        def called(*arguments: Any) -> bool:
            self.calls.append(name)
            self.got += arguments
            return self.answers

        return called


@pytest.fixture
def parts() -> list[Part]:
    return [Part(), Part(), Part()]


def test_each_gets_the_queries_of_its_heads_and_all_the_stream(parts: list[Part]) -> None:
    signals = ShardedSignals(parts)
    query = torch.arange(2 * 6 * 4).view(2, 6, 4)
    signals.put_query(3, query)
    signals.put_windows(3, [query, query[:1]])
    signals.put_stream(3, query, None)
    for number, part in enumerate(parts):
        own = query[:, 2 * number : 2 * number + 2]
        _, first, _, windows, _, stream, _ = part.got
        assert torch.equal(first, own)
        assert all(torch.equal(x, y) for x, y in zip(windows, (own, own[:1]), strict=True))
        assert stream is query


@pytest.mark.parametrize("away", [0, 1, 2])
def test_all_have_to_answer(parts: list[Part], away: int) -> None:
    signals = ShardedSignals(parts)
    waits: Sequence[Callable[[], bool]] = (
        lambda: signals.await_ready(0),
        lambda: signals.await_output(0, 1),
        lambda: signals.await_finished(3),
        lambda: signals.is_done(3),
        signals.end,
    )
    assert all(wait() for wait in waits)
    parts[away].answers = False
    assert not any(wait() for wait in waits)


def test_nobody_hears_of_a_step_if_one_has_not_ended_the_one_before(parts: list[Part]) -> None:
    signals = ShardedSignals(parts)
    assert signals.begin(ENTRY, None)
    assert [part.calls for part in parts] == [["await_finished", "begin"]] * 3
    assert [part.got[0] for part in parts] == [6] * 3
    parts[1].answers = False
    assert not signals.begin(ENTRY, None)
    assert not any("begin" in part.calls[2:] for part in parts)


def test_one_that_is_lost_in_between_leaves_a_step_that_others_have_heard_of(
    parts: list[Part],
) -> None:
    signals = ShardedSignals(parts)
    parts[1].begin = lambda *_: False  # type: ignore[method-assign]
    assert signals.begin(ENTRY, None), "its number is used up"
    assert "begin" in parts[2].calls


class Connection:
    """A connection to one cache rank."""

    def __init__(self, number: int, journal: list[str]) -> None:
        self._name, self._journal = str(number), journal
        self.lost_reason: str | None = None
        self.has_left = False
        self.epoch, self.step, self.confirmed = 1, 5, 5
        self.finished, self.fails, self.is_there = 5, False, True
        self.told = 1
        self.is_closed = False

    def open_connection(self, *, timeout_s: float) -> Any:
        self._journal.append("open " + self._name)
        if not self.is_there:
            raise CacheRankLostError("not there")
        self.is_closed = False
        welcome = SimpleNamespace(
            timing=self.told, traits=0, all_exact=False, keeps_queries=False, index_interval=0
        )
        return SimpleNamespace(welcome=welcome, is_gone=False, close=self._close)

    def _close(self) -> None:
        self.is_closed = True

    def adopt(self, _opened: Any) -> None:
        self._journal.append("adopt " + self._name)
        if self.fails:
            raise CacheRankLostError("not usable")
        self.lost_reason, self.has_left = None, False

    def has_finished(self, step: int) -> bool:
        return self.finished >= step

    def mark_lost(self, reason: str) -> None:
        self.lost_reason = self.lost_reason or reason

    def leave(self, reason: str) -> None:
        if self.lost_reason is None:
            self.lost_reason, self.has_left = reason, True


class World:
    """Three of them."""

    def __init__(self) -> None:
        self.journal: list[str] = []
        self.parts = [Connection(number, self.journal) for number in range(3)]
        self.whole = ShardedConnection(self.parts)  # type: ignore[arg-type]


@pytest.fixture
def world() -> World:
    return World()


def test_who_was_lost_is_met_first_and_named(world: World) -> None:
    """One that lives would wait, without a heartbeat, for one that loads for seconds."""
    world.parts[2].mark_lost("its process ended")
    assert world.whole.lost_reason == "cache rank 2: its process ended"
    world.whole.leave("another one was lost")
    assert world.whole.lost_reason == "cache rank 2: its process ended"
    opened = world.whole.open_connection(timeout_s=1.0)
    assert world.journal == ["open 2", "open 0", "open 1"]
    world.whole.adopt(opened)
    assert world.journal[3:] == ["adopt 0", "adopt 1", "adopt 2"]
    assert world.whole.lost_reason is None


def test_what_was_opened_is_released_if_one_is_not_there(world: World) -> None:
    world.parts[1].is_there = False
    with pytest.raises(CacheRankLostError):
        world.whole.open_connection(timeout_s=1.0)
    assert [part.is_closed for part in world.parts] == [True, False, False]


def test_what_was_opened_is_released_if_one_cannot_be_used(world: World) -> None:
    world.parts[0].fails = True
    with pytest.raises(CacheRankLostError, match="not usable"):
        world.whole.adopt(world.whole.open_connection(timeout_s=1.0))
    assert [part.is_closed for part in world.parts] == [False, True, True]


def test_ranks_that_tell_different_things_are_refused(world: World) -> None:
    world.parts[2].told = 4
    opened = world.whole.open_connection(timeout_s=1.0)
    with pytest.raises(ContractError, match="use --cache-ranks 1"):
        world.whole.adopt(opened)
    assert all(part.is_closed for part in world.parts)


def test_only_those_that_did_not_finish_are_lost(world: World) -> None:
    world.whole.step = 6
    assert [part.step for part in world.parts] == [6] * 3
    world.parts[0].finished = world.parts[2].finished = 6
    assert not world.whole.has_finished(6)
    world.whole.mark_lost("a step was not finished")
    assert [part.has_left for part in world.parts] == [True, False, True]
    assert world.whole.lost_reason == "cache rank 1: a step was not finished"


def test_an_epoch_that_one_has_ended_is_of_no_use() -> None:
    def opened(is_gone: bool) -> Any:
        return SimpleNamespace(is_gone=is_gone)

    assert not OpenedEpochs((opened(False), opened(False))).is_gone
    assert OpenedEpochs((opened(False), opened(True))).is_gone
