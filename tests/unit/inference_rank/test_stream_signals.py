# SPDX-License-Identifier: Apache-2.0
"""Both sides of a step's flags in device memory, on a CPU: one thing is done after another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch

from tandemkv.cache_rank.protocol.gpu_flags import flag_specs, word_of
from tandemkv.cache_rank.protocol.head_shard import HeadShard
from tandemkv.cache_rank.protocol.memory.mapped_tensors import MappedTensors
from tandemkv.cache_rank.protocol.memory.shared_region import SEED_BUFFERS, FlagIndex
from tandemkv.cache_rank.protocol.step_flags import WORDS_APART, StepFlags
from tandemkv.cache_rank.protocol.step_ring import EntryKind, StepEntry, StepRow
from tandemkv.cache_rank.service.signals import StepAbortedError
from tandemkv.cache_rank.service.stream_signals import StreamSignals as EngineSide
from tandemkv.inference_rank.links import signals as link_signals
from tandemkv.inference_rank.links.base import DecodeRows
from tandemkv.inference_rank.links.signals import StreamSignals as LinkSide

LAYERS, BATCH, HIDDEN, HEADS, DIM = 3, 4, 8, 2, 4


@dataclass
class Connection:
    """What the link's side asks of a connection."""

    tensors: MappedTensors
    lost_reason: str | None = None
    announced: list[StepEntry] = field(default_factory=list)
    end_waits: Callable[[], None] | None = None
    shard: HeadShard = field(default_factory=HeadShard)

    def announce(self, entry: StepEntry) -> None:
        self.announced.append(entry)

    def mark_lost(self, reason: str) -> None:
        self.lost_reason = reason

    def is_lost(self) -> bool:
        return self.lost_reason is not None


@pytest.fixture
def connection() -> Connection:
    tensors = MappedTensors()
    tensors.allocate_all(flag_specs(LAYERS, BATCH))
    tensors.allocate("streams", (LAYERS, BATCH, HIDDEN), torch.float32)
    tensors.allocate("queries", (LAYERS, BATCH, HEADS, DIM), torch.float32)
    tensors.allocate("remote_outputs", (BATCH, HEADS, DIM), torch.float32, "inference")
    tensors.allocate("seed_queries", (SEED_BUFFERS, BATCH, HEADS, DIM), torch.float32)
    tensors.allocate("step_rows", (BATCH,), torch.int64)
    tensors.allocate("step_lengths", (BATCH,), torch.int64)
    tensors.allocate("flags", (FlagIndex(LAYERS).count, WORDS_APART), torch.int64)
    return Connection(tensors)


@pytest.fixture
def link(connection: Connection) -> LinkSide:
    return LinkSide([connection], LAYERS, timeout_s=0.05)  # type: ignore[list-item]


@pytest.fixture
def engine(connection: Connection) -> EngineSide:
    flags = StepFlags(connection.tensors["flags"])
    return EngineSide(connection.tensors, flags, LAYERS, timeout_s=0.05)


def _entry(step: int) -> StepEntry:
    rows = tuple(StepRow(row=row, generation=0, length=100) for row in (3, 1))
    return StepEntry(kind=EntryKind.DECODE, step=step, rows=rows)


def _step() -> DecodeRows:
    rows, lengths = torch.tensor([3, 1]), torch.tensor([101, 57])
    return DecodeRows(
        rows=rows, lengths=lengths, lengths_on_host=lengths, req_to_token=rows, num_cold=0
    )


def _is_lost(engine: EngineSide) -> bool:
    return bool(engine._lost.item())


@pytest.mark.parametrize("first", [1, 2**31 - 1, 2**32 + 7])
def test_a_step_goes_from_one_side_to_the_other(
    first: int, link: LinkSide, engine: EngineSide, connection: Connection
) -> None:
    """Flags of int32 wrap around after months."""
    for name in ("to_engine", "to_inference"):
        connection.tensors[name].fill_(word_of(first - 1))
    stream = torch.randn(2, HIDDEN)
    query = torch.randn(2, HEADS, DIM)
    for step in (first, first + 1):
        assert link.begin(_entry(step), _step())
        engine.begin(step)
        engine.await_begin()
        rows, lengths = engine.requests_of(_entry(step))
        assert rows.tolist() == [3, 1]
        assert lengths.tolist() == [101, 57]
        link.put_stream(0, stream)
        engine.await_input(0, 2)
        assert torch.equal(connection.tensors["streams"][0, :2], stream)
        engine.raise_ready(1)
        assert link.await_ready(1)
        link.put_query(2, query)
        engine.await_query(2, 2)
        torch.testing.assert_close(connection.tensors["queries"][2, :2], query)
        link.raise_end()
        link.end()
        engine.await_end()
        engine.settle()
        engine.finish()
    assert link.lost_step == 0
    assert not _is_lost(engine)
    assert [entry.step for entry in connection.announced] == [first, first + 1]
    assert link.is_done(first + 1)
    link._lost_on_host[0] = word_of(first + 1)
    assert link.is_done(first)
    assert not link.is_done(first + 1)


@pytest.mark.parametrize("missing", ["ready", "input"])
def test_what_was_not_raised_for_half_a_turn_is_not_raised(
    missing: str, link: LinkSide, engine: EngineSide, connection: Connection
) -> None:
    """A large batch may be rare, and come after the flags of int32 have wrapped around."""
    stream = torch.randn(BATCH, HIDDEN)
    first, last = 2**31 - 2, 2**31 + 2
    for step in (1, 2**30, *range(first, last + 1)):
        connection.tensors["to_inference"][0, 0] = word_of(step - 1)  # those between are done
        size = BATCH if step in (1, last) else 1
        sent = {"input": size, "ready": size}
        if step == last:
            sent[missing] = 1  # of the others nothing is there yet
        assert link.begin(_entry(step), _step())
        engine.begin(step)
        engine.await_begin()
        assert not _is_lost(engine)
        link.put_stream(0, stream[: sent["input"]])
        engine.await_input(0, size)
        assert _is_lost(engine) == (step == last and missing == "input")
        engine.put_output(1, torch.ones(sent["ready"], HEADS, DIM))
        assert link.await_output(1, size)
        link.end()
        assert link.lost_step == (word_of(last) if step == last else 0)
        engine.settle()


def test_flags_that_an_engine_on_another_host_raises_are_kept_up_there(
    connection: Connection,
) -> None:
    """Nobody else knows when; beside the model they are those of several engines."""
    flags, tensors = StepFlags(connection.tensors["flags"]), connection.tensors
    far, near = (
        EngineSide(tensors, flags, LAYERS, timeout_s=0.05, is_far=is_far)
        for is_far in (True, False)
    )
    near.begin(2**31 + 4)
    near.begin_counted(2**31 + 5)
    assert not tensors["to_inference"].any()
    far.begin(2**31 + 4)
    assert (tensors["to_inference"] == word_of(2**31 + 3)).all()
    far.raise_ready(1)
    far.begin_counted(2**31 + 5)
    assert tensors["to_inference"][2, 0] == word_of(2**31 + 4)
    far.abort()
    far.begin_counted(2**31 + 2**30)
    assert (tensors["to_inference"][1] == word_of(2**31 + 3)).all(), "what is lost stays so"
    assert not tensors["to_engine"].any()


def test_what_an_engine_may_still_read_is_not_written_to(
    link: LinkSide, connection: Connection
) -> None:
    """Results of a step are taken before the engine has finished it, and then it is lost."""
    names = ("streams", "queries", "seed_queries", "step_rows", "step_lengths")

    def begin(number: int) -> list[torch.Tensor]:
        rows, step = torch.tensor([number, 0]), _step()
        assert link.begin(_entry(number), replace(step, rows=rows, lengths=rows + 7))
        link.put_stream(0, torch.full((2, HIDDEN), float(number)))
        link.put_query(0, torch.full((2, HEADS, DIM), float(number)))
        link.put_windows(0, [torch.full((3, HEADS, DIM), float(number))])
        link.end()
        return [connection.tensors[name].clone() for name in names]

    first = begin(1)
    assert all(written.any() for written in first)
    assert link.is_done(1)
    link.end_waits()  # nobody on the host has seen it yet
    assert all(torch.equal(a, b) for a, b in zip(begin(2), first, strict=True))
    assert not link.is_done(2)


@pytest.mark.parametrize("begins", [True, False])
def test_a_loss_just_as_waits_begin_is_seen(
    link: LinkSide, connection: Connection, monkeypatch: pytest.MonkeyPatch, *, begins: bool
) -> None:
    """It has ended them, and that is undone before anybody can see that it is lost."""
    link.mask()
    monkeypatch.setattr(link._seldom, "forget", lambda: connection.mark_lost("a test"))
    assert not (link.begin(_entry(1), _step()) if begins else link.await_finished(1))
    assert not connection.announced
    assert link._lost.all(), "waits end at once"


def test_what_is_masked_when_flags_are_due_is_made_up_for(
    link: LinkSide, connection: Connection
) -> None:
    words = connection.tensors["to_engine"]
    assert link.begin(_entry(1), None)
    connection.tensors["to_inference"][0, 0] = 2**30 - 1
    link.end_waits()  # nobody on the host has seen it yet
    assert link.begin(_entry(2**30), None)
    link.end()
    assert not words[1:].any()
    link.mask()
    link.forget_lost()
    connection.tensors["to_inference"][0, 0] = 2**30
    assert link.begin(_entry(2**30 + 1), None)  # of a new epoch
    assert (words[1:] == 2**30).all()


def test_what_one_engine_is_told_takes_one_launch_each(
    link: LinkSide, engine: EngineSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in every layer of every step; a wait in another kernel is of one word."""
    launched: list[str] = []

    def counted(name: str) -> Callable[..., None]:
        run: Callable[..., None] = getattr(link_signals, name)

        def call(*args: object, **kwargs: object) -> None:
            launched.append(name)
            run(*args, **kwargs)

        return call

    for name in ("send_rows", "raise_flags", "wait_flags"):
        monkeypatch.setattr(link_signals, name, counted(name))

    def launches(made: Callable[[], object]) -> list[str]:
        launched.clear()
        made()
        return launched.copy()

    hidden, query = torch.randn(2, HIDDEN), torch.randn(2, HEADS, DIM)
    assert launches(lambda: link.begin(_entry(1), _step())) == ["wait_flags", "raise_flags"]
    assert launches(lambda: link.put_stream(1, hidden)) == ["send_rows"]
    assert launches(lambda: link.put_query(1, query)) == ["send_rows"]
    assert launches(lambda: link.ready_wait(1)) == []
    engine.begin(1)
    engine.raise_ready(1)
    assert launches(lambda: link.await_ready(1)) == ["wait_flags"]
    engine.put_output(2, query)
    assert launches(lambda: link.await_output(2, 2)) == ["wait_flags"]
    assert launches(link.raise_end) == ["raise_flags"]
    assert launches(link.end) == []
    awaited, raised = link.ready_wait(1), engine._words.ready(1)
    assert awaited is not None
    assert (awaited.flags.data_ptr(), len(awaited.flags)) == (raised.data_ptr(), 1)
    assert link.lost_step == 0


def test_an_exact_layer_gets_its_output_from_where_the_k_v_are(
    link: LinkSide, engine: EngineSide, connection: Connection
) -> None:
    assert link.begin(_entry(1), _step())
    engine.begin(1)
    query, output = torch.randn(2, HEADS, DIM), torch.randn(2, HEADS, DIM)
    link.put_query(1, query)
    engine.await_query(1, 2)
    engine.put_output(1, output)
    assert link.await_output(1, 2)
    assert torch.equal(connection.tensors["remote_outputs"][:2], output)
    engine.settle()
    engine.finish()
    link.raise_end()
    link.end()
    assert link.lost_step == 0
    assert link.begin(_entry(2), _step())
    link.await_output(1, 2)  # each row's flag is the step before's
    link.raise_end()
    link.end()
    assert link.lost_step == 2


def test_a_row_whose_output_is_missing_is_waited_for(link: LinkSide, engine: EngineSide) -> None:
    assert link.begin(_entry(1), _step())
    engine.begin(1)
    engine.put_output(1, torch.randn(1, HEADS, DIM))
    link.await_output(1, 2)
    link.raise_end()
    link.end()
    assert link.lost_step == 1


def test_a_stream_that_is_sent_beside_arrives_before_it_is_joined(
    connection: Connection, engine: EngineSide
) -> None:
    link = LinkSide([connection], LAYERS, timeout_s=0.05, sends_beside=True)  # type: ignore[list-item]
    assert link.begin(_entry(1), _step())
    engine.begin(1)
    stream = torch.randn(2, HIDDEN)
    link.put_stream(2, stream)
    link.join_sent()
    engine.await_input(2, 2)
    assert torch.equal(connection.tensors["streams"][2, :2], stream)
    assert not _is_lost(engine)


def test_what_was_not_answered_in_time_is_told_with_the_next_step(
    link: LinkSide, engine: EngineSide, connection: Connection
) -> None:
    assert link.begin(_entry(1), _step())
    engine.begin(1)
    engine.settle()
    engine.finish()
    assert link.begin(_entry(2), _step())
    link.await_ready(0)  # nobody has raised it
    link.raise_end()
    link.end()
    assert link.lost_step == 2
    assert not link.begin(_entry(3), _step())
    assert connection.lost_reason is not None
    assert "step 2" in connection.lost_reason
    engine.begin(3)
    engine.await_begin()
    assert _is_lost(engine)  # nothing was raised for a step that was not begun


def test_a_loss_ends_the_waits_of_the_step_that_is_under_way(
    link: LinkSide, engine: EngineSide, connection: Connection
) -> None:
    """Nobody waits for a dead engine until the limit: whoever finds it lost tells the GPU."""
    assert link.begin(_entry(1), _step())
    assert connection.end_waits is not None
    connection.end_waits()
    connection.lost_reason = "its process ended"
    link.await_ready(0)
    link.put_stream(0, torch.zeros(2, HIDDEN))
    link.raise_end()
    link.end()
    assert not link.is_done(1)
    engine.begin(1)
    engine.await_input(0, 2)
    assert _is_lost(engine)  # what came after the loss was not raised
    link.forget_lost()
    connection.lost_reason = None
    assert link.begin(_entry(2), _step())
    assert link.lost_step == 0


@pytest.mark.parametrize("waits_first", [False, True])
def test_what_an_epoch_did_not_answer_does_not_end_the_next_one(
    link: LinkSide, engine: EngineSide, connection: Connection, waits_first: bool
) -> None:
    """The process was killed while a pass waited for it, and no other pass was begun since."""
    assert link.begin(_entry(1), _step())
    link.await_ready(0)
    link.end()
    assert link.lost_step == 1
    connection.lost_reason = "its process ended"
    link.forget_lost()
    connection.lost_reason = None  # it is back, and has done step 2
    engine.begin(2)
    engine.settle()
    assert link.lost_step == 0
    if waits_first:
        assert link.await_finished(2)
        assert link.lost_step == 0
    assert link.begin(_entry(3), _step())
    assert connection.lost_reason is None
    engine.begin(3)
    engine.await_begin()
    assert not _is_lost(engine)


def test_a_prompt_tells_too_that_it_was_not_answered_in_time(
    link: LinkSide, engine: EngineSide, connection: Connection
) -> None:
    assert link.begin(_entry(1), None)
    engine.begin(1)
    link.await_ready(0)  # its buffer of prompt queries is not free
    link.raise_input(2)
    link.end()  # no end of a decode step follows
    assert link.lost_step == 1
    assert not link.is_done(1)
    assert not link.begin(_entry(2), _step())
    assert connection.lost_reason is not None
    assert "step 1" in connection.lost_reason


def test_a_step_that_is_not_announced_waits_for_the_one_before(
    link: LinkSide, engine: EngineSide, connection: Connection
) -> None:
    assert link.begin(_entry(1), _step())
    engine.begin(1)
    engine.settle()
    assert link.await_finished(1)
    assert link.lost_step == 0
    assert link.begin(_entry(2), _step())
    assert link.await_finished(2)  # queued; the engine does not come to its end
    assert link.lost_step == 2
    assert not link.is_done(2)
    connection.lost_reason = "its process ended"
    assert not link.await_finished(2)


def test_flags_of_a_step_that_was_given_up_satisfy_no_later_wait(
    link: LinkSide, engine: EngineSide
) -> None:
    assert link.begin(_entry(1), _step())
    link.put_stream(0, torch.zeros(2, HIDDEN))
    engine.begin(2)
    engine.await_input(0, 2)
    assert _is_lost(engine)


def test_a_rehearsal_neither_waits_nor_raises(link: LinkSide, engine: EngineSide) -> None:
    link.mask()
    link.await_ready(0)
    link.put_stream(0, torch.zeros(2, HIDDEN))
    link.raise_end()
    link.end()
    engine.begin(0)
    with engine.masked():
        engine.await_begin()
        engine.raise_ready(0)
        engine.settle()
        engine.finish()
    assert link.lost_step == 0
    assert link.begin(_entry(1), _step())
    assert link.lost_step == 0


def test_a_step_of_the_engine_stops_once_a_wait_was_given_up(
    link: LinkSide, engine: EngineSide
) -> None:
    """But not a rehearsal, in which every wait is."""
    engine.begin(1)
    assert link.begin(_entry(1), _step())
    engine.await_begin()
    engine.stop_if_lost()
    with engine.masked():
        engine.await_query(0, 2)
        engine.stop_if_lost()
    engine.stop_if_lost()
    engine.await_query(0, 2)
    with pytest.raises(StepAbortedError, match="step 1 was lost"):
        engine.stop_if_lost()


def test_an_abort_ends_the_waits_of_the_engine(link: LinkSide, engine: EngineSide) -> None:
    engine.begin(1)
    engine.abort()
    engine.await_begin()
    engine.raise_ready(0)
    assert link.begin(_entry(1), _step())
    link.await_ready(0)
    link.raise_end()
    link.end()
    assert link.lost_step == 1  # an engine that has given up raises nothing


def test_an_abort_from_any_thread_goes_to_the_engines_gpu_and_back_to_no_other(
    engine: EngineSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread begins on the first GPU: to go back to a stream of it would take memory there."""
    entered: list[object] = []

    def enter(what: object) -> contextlib.nullcontext[None]:
        entered.append(what)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "device", enter)
    monkeypatch.setattr(torch.cuda, "stream", enter)
    stream = SimpleNamespace(device=torch.device("cuda", 1))
    engine._beside = stream  # type: ignore[assignment]
    engine.abort()
    assert entered == [stream.device, stream]
    assert _is_lost(engine)
