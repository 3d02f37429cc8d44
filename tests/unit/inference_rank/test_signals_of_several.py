# SPDX-License-Identifier: Apache-2.0
"""Flags in device memory between one forward pass and three engines, on a CPU.

One thing is done after another here: a wait ends at once, and what is missing then is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from tandemkv.cache_rank.protocol.gpu_flags import flag_specs, word_of
from tandemkv.cache_rank.protocol.head_shard import HeadShard, parts_of
from tandemkv.cache_rank.protocol.memory.mapped_tensors import MappedTensors
from tandemkv.cache_rank.protocol.memory.shared_region import FlagIndex
from tandemkv.cache_rank.protocol.step_flags import WORDS_APART, StepFlags
from tandemkv.cache_rank.protocol.step_ring import EntryKind, StepEntry, StepRow
from tandemkv.cache_rank.service.stream_signals import StreamSignals as EngineSide
from tandemkv.inference_rank.links.base import DecodeRows
from tandemkv.inference_rank.links.signals import StreamSignals as LinkSide

LAYERS, BATCH, HIDDEN, HEADS, GROUP, DIM = 3, 4, 8, 5, 2, 4
COUNT = 3


@dataclass
class Connection:
    """What the link's side asks of a connection to one of them."""

    tensors: MappedTensors
    shard: HeadShard
    lost_reason: str | None = None
    announced: list[StepEntry] = field(default_factory=list)
    end_waits: Callable[[], None] | None = None

    def announce(self, entry: StepEntry) -> None:
        self.announced.append(entry)

    def mark_lost(self, reason: str) -> None:
        self.lost_reason = self.lost_reason or reason

    def is_lost(self) -> bool:
        return self.lost_reason is not None


def mapped(shard: HeadShard, common: MappedTensors) -> MappedTensors:
    """Return what the forward pass and the engine of `shard` map."""
    own, query = MappedTensors(), (shard.part(HEADS * GROUP), DIM)
    to_engine, _ = flag_specs(LAYERS, BATCH, COUNT)
    own.allocate_all([to_engine])
    own.allocate("streams", (LAYERS, BATCH, HIDDEN), torch.float32)
    own.allocate("queries", (LAYERS, BATCH, *query), torch.float32)
    own.allocate("seed_queries", (2, 9, *query), torch.float32)
    own.allocate("remote_outputs", (BATCH, *query), torch.float32, "inference")
    own.allocate("step_rows", (BATCH,), torch.int64)
    own.allocate("step_lengths", (BATCH,), torch.int64)
    own.allocate("flags", (FlagIndex(LAYERS).count, WORDS_APART), torch.int64)
    own.borrow(common)
    return own


@pytest.fixture
def connections() -> list[Connection]:
    common = MappedTensors()
    common.allocate_all([flag_specs(LAYERS, BATCH, COUNT)[1]])
    return [Connection(mapped(shard, common), shard) for shard in parts_of(COUNT, HEADS)]


@pytest.fixture
def link(connections: list[Connection]) -> LinkSide:
    return LinkSide(connections, LAYERS, timeout_s=0.02, sends_beside=True)  # type: ignore[arg-type]


@pytest.fixture
def engines(connections: list[Connection]) -> list[EngineSide]:
    return [
        EngineSide(
            each.tensors, StepFlags(each.tensors["flags"]), LAYERS, timeout_s=0.02, index=number
        )
        for number, each in enumerate(connections)
    ]


def begun(link: LinkSide, engines: list[EngineSide], number: int, size: int = 2) -> bool:
    """Announce step `number`, and let the engines begin it."""
    rows, lengths = torch.arange(1, size + 1), torch.arange(101, size + 101)
    entry = StepEntry(
        kind=EntryKind.DECODE,
        step=number,
        rows=tuple(StepRow(row=row, generation=0, length=100) for row in rows.tolist()),
    )
    step = DecodeRows(
        rows=rows, lengths=lengths, lengths_on_host=lengths, req_to_token=rows, num_cold=0
    )
    if not link.begin(entry, step):
        return False
    for engine in engines:
        engine.begin(number)
        engine.await_begin()
        assert [x.tolist() for x in engine.requests_of(entry)] == [rows.tolist(), lengths.tolist()]
    return True


def ended(link: LinkSide, engines: list[EngineSide]) -> int:
    """End the step on both sides; returns the first that was lost."""
    link.raise_end()
    link.end()
    for engine in engines:
        engine.await_end()
        engine.settle()
        engine.finish()
    return link.lost_step


def test_each_gets_the_stream_and_the_queries_of_its_heads(
    link: LinkSide, engines: list[EngineSide], connections: list[Connection]
) -> None:
    for step in (1, 2):
        stream, query = torch.randn(2, HIDDEN), torch.randn(2, HEADS * GROUP, DIM)
        assert begun(link, engines, step)
        link.put_stream(0, stream)
        link.join_sent()
        link.put_query(1, query)
        link.put_windows(1, [query, query[:1]])
        link.raise_input(2)
        for engine, each in zip(engines, connections, strict=True):
            engine.await_input(0, 2)
            engine.await_query(1, 2)
            engine.await_input(2)
            own = each.shard.of(query, 1)
            assert torch.equal(each.tensors["streams"][0, :2], stream)
            assert torch.equal(each.tensors["queries"][1, :2], own)
            assert torch.equal(each.tensors["seed_queries"][1, :3], torch.cat((own, own[:1])))
            engine.raise_ready(2)
        assert link.await_ready(2)
        assert ended(link, engines) == 0
    assert not any(bool(engine._lost.item()) for engine in engines)
    assert [[entry.step for entry in each.announced] for each in connections] == [[1, 2]] * COUNT


@pytest.mark.parametrize("away", range(COUNT))
@pytest.mark.parametrize("wait", ["ready", "in a kernel", "output", "finished"])
def test_all_have_to_answer(
    link: LinkSide, engines: list[EngineSide], away: int, wait: str
) -> None:
    others = [engine for number, engine in enumerate(engines) if number != away]
    for step in (1, 2):
        assert begun(link, engines, step)
        answering = engines if step == 1 else others
        for engine in answering:
            if wait == "output":
                engine.put_output(1, torch.ones(2, engine._outputs.shape[1], DIM))  # type: ignore[union-attr]
            else:
                engine.raise_ready(1)
        if wait == "output":
            link.await_output(1, 2)
        elif wait == "ready":
            link.await_ready(1)
        elif wait == "in a kernel":
            awaited = link.ready_wait(1)
            assert awaited is not None
            awaited.now()
        if wait == "finished":
            for engine in answering:
                engine.settle()
            link.await_finished(step)
            assert link.lost_step == (0 if step == 1 else 2)
        else:
            assert ended(link, engines) == (0 if step == 1 else 2)


def test_outputs_are_put_together(
    link: LinkSide, engines: list[EngineSide], connections: list[Connection]
) -> None:
    assert begun(link, engines, 1)
    want = torch.randn(2, HEADS * GROUP, DIM)
    for engine, each in zip(engines, connections, strict=True):
        engine.put_output(1, each.shard.of(want, 1))
    assert link.await_output(1, 2)
    found = torch.cat([each.tensors["remote_outputs"][:2] for each in connections], 1)
    assert torch.equal(found, want)
    assert ended(link, engines) == 0


def test_rows_of_a_larger_step_answer_for_no_smaller_one(
    link: LinkSide, engines: list[EngineSide]
) -> None:
    """Where the flags of whom lie depends on how many requests there are."""
    for step, size, answering in ((1, 4, engines), (2, 2, engines), (3, 2, engines[:2])):
        assert begun(link, engines, step, size)
        for engine in answering:
            engine.put_output(1, torch.ones(size, engine._outputs.shape[1], DIM))  # type: ignore[union-attr]
        link.await_output(1, size)
        assert ended(link, engines) == (3 if step == 3 else 0)


@pytest.mark.parametrize("num_answering", [COUNT, COUNT - 1])
def test_one_that_has_not_answered_for_half_a_turn_of_the_flags_is_missed(
    num_answering: int, link: LinkSide, engines: list[EngineSide], connections: list[Connection]
) -> None:
    first, last = 2**31 - 2, 2**31 + 2
    for step in (1, 2**30, *range(first, last + 1)):
        words = connections[0].tensors["to_inference"]
        words[0, :COUNT] = word_of(step - 1)  # those between are done
        size = 4 if step in (1, last) else 1
        assert begun(link, engines, step, size)
        for engine in engines[: num_answering if step == last else COUNT]:
            engine.put_output(1, torch.ones(size, engine._outputs.shape[1], DIM))  # type: ignore[union-attr]
        link.await_output(1, size)
        is_missed = step == last and num_answering < COUNT
        assert ended(link, engines) == (word_of(last) if is_missed else 0)


def test_one_that_is_found_lost_ends_the_waits_and_the_others_are_not_taken_for_lost(
    link: LinkSide, engines: list[EngineSide], connections: list[Connection]
) -> None:
    assert begun(link, engines, 1)
    assert connections[1].end_waits is not None
    connections[1].end_waits()
    connections[1].lost_reason = "its process ended"
    link.await_ready(0)
    link.put_query(1, torch.zeros(2, HEADS * GROUP, DIM))
    link.raise_end()
    link.end()
    assert not link.is_done(1)
    assert not link.await_finished(1)
    assert not begun(link, engines, 2)
    assert [each.lost_reason for each in connections] == [None, "its process ended", None]
    engines[0].await_query(1, 2)
    assert bool(engines[0]._lost.item())  # what came after the loss was not raised


def test_where_nobody_is_found_lost_nobody_has_answered_in_time(
    link: LinkSide, engines: list[EngineSide], connections: list[Connection]
) -> None:
    assert begun(link, engines, 1)
    engines[0].raise_ready(0)
    link.await_ready(0)
    assert ended(link, engines) == 1
    assert not begun(link, engines, 2)
    assert all("step 1" in (each.lost_reason or "") for each in connections)
    link.forget_lost()
    for each in connections:
        each.lost_reason = None
    for engine in engines:  # of a new epoch
        engine._lost.zero_()
    assert begun(link, engines, 2)
    assert link.lost_step == 0
