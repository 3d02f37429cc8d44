# SPDX-License-Identifier: Apache-2.0
"""Several cache ranks of one inference rank: who gets what, and whose answer counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandemkv.cache_rank.protocol.errors import CacheRankLostError, ContractError
from tandemkv.cache_rank.protocol.head_shard import HeadShard
from tandemkv.cache_rank.protocol.memory.shared_region import FlagIndex
from tandemkv.cache_rank.protocol.step_ring import EntryKind, StepEntry
from tandemkv.inference_rank.links.sharded import OpenedEpochs, ShardedConnection
from tandemkv.inference_rank.links.signals import HostSignals

ENTRY = StepEntry(kind=EntryKind.DECODE, step=7, variant=0, num_cold=0, rows=())


class Rank:
    """The connection to one of three cache ranks; `answers` is whether it is there."""

    def __init__(self, index: int = 0) -> None:
        self.shard = HeadShard(index, 3, 3)
        self.answers = True
        self.lost_reason: str | None = None
        self.calls: list[tuple[str, Any]] = []
        self.tensors = {
            "streams": torch.zeros(5, 2, 7),
            "queries": torch.zeros(5, 2, 2, 4),
            "seed_queries": torch.zeros(2, 9, 2, 4),
        }

    def wait(self, flag: int, step: int | None = None) -> bool:
        self.calls.append(("wait", step))
        return self.answers

    def await_finish(self, step: int) -> bool:
        return self.answers

    def announce(self, entry: StepEntry) -> None:
        self.calls.append(("announce", entry))

    def raise_to(self, flag: int) -> None:
        self.calls.append(("raise", flag))


@pytest.fixture
def ranks() -> list[Rank]:
    return [Rank(index) for index in range(3)]


def signals_of(ranks: list[Rank]) -> HostSignals:
    return HostSignals(ranks, 5)  # type: ignore[arg-type]


def test_each_gets_the_queries_of_its_heads_and_all_the_stream(ranks: list[Rank]) -> None:
    signals, at = signals_of(ranks), FlagIndex(5)
    query, stream = torch.randn(2, 6, 4), torch.randn(2, 7)
    signals.put_query(3, query)
    signals.put_windows(3, [query, query[:1]])
    signals.put_stream(3, stream)
    for number, rank in enumerate(ranks):
        own = query[:, 2 * number : 2 * number + 2]
        assert torch.equal(rank.tensors["queries"][3], own)
        assert torch.equal(rank.tensors["seed_queries"][1, :3], torch.cat((own, own[:1])))
        assert torch.equal(rank.tensors["streams"][3], stream)
        assert rank.calls == [("raise", at.query(3)), ("raise", at.input(3))]


def test_nothing_is_put_for_one_that_is_lost(ranks: list[Rank]) -> None:
    ranks[1].lost_reason = "its process ended"
    signals_of(ranks).put_query(3, torch.ones(2, 6, 4))
    assert [bool(rank.tensors["queries"].any()) for rank in ranks] == [True, False, True]


@pytest.mark.parametrize("away", [0, 1, 2])
def test_all_have_to_answer(ranks: list[Rank], away: int) -> None:
    signals = signals_of(ranks)
    waits: Sequence[Callable[[], bool]] = (
        lambda: signals.await_ready(0),
        lambda: signals.await_output(0, 1),
        lambda: signals.await_finished(3),
        lambda: signals.is_done(3),
        signals.end,
    )
    assert all(wait() for wait in waits)
    ranks[away].answers = False
    assert not any(wait() for wait in waits)


def test_nobody_hears_of_a_step_if_one_has_not_ended_the_one_before(ranks: list[Rank]) -> None:
    signals = signals_of(ranks)
    assert signals.begin(ENTRY, None)
    assert [rank.calls for rank in ranks] == [[("wait", 6), ("announce", ENTRY)]] * 3
    ranks[1].answers = False
    assert not signals.begin(ENTRY, None)
    assert not any(call[0] == "announce" for rank in ranks for call in rank.calls[2:])


def test_one_that_is_lost_in_between_leaves_a_step_that_others_have_heard_of(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(flag: int, step: int | None = None) -> bool:
        ranks[1].lost_reason = "its process ended"
        return True

    monkeypatch.setattr(ranks[1], "wait", wait)
    assert signals_of(ranks).begin(ENTRY, None), "its number is used up"
    assert ("announce", ENTRY) in ranks[2].calls
    assert not ranks[1].calls


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
        welcome = SimpleNamespace(traits=self.told)
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
