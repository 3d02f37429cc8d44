# SPDX-License-Identifier: Apache-2.0
"""A decode step that is captured once and replayed does what one does that is queued anew.

Both sides' flags are in device memory, as on GPUs, on a CPU: the forward pass has raised all that
it will by the time the engine begins. A graph is played by calling what was captured (`tape`),
which knows the rehearsal alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import engine_world
import msgspec
import pytest
import torch
from engine_world import CONTEXT, LAYERS, QUERY_HEADS, ROWS1, World
from tape import Tape, record_kernels
from test_resume import Memory, versions_of, world_on

from tandemkv.cache_rank.calibration.resolve import Resolved
from tandemkv.cache_rank.engine import factory
from tandemkv.cache_rank.policies.base import HeadClusters, Selection, SelectionInput
from tandemkv.cache_rank.protocol.engine_program import DecodeKind
from tandemkv.cache_rank.protocol.gpu_flags import flag_specs
from tandemkv.cache_rank.protocol.head_shard import HeadShard
from tandemkv.cache_rank.protocol.memory.mapped_tensors import MappedTensors
from tandemkv.cache_rank.protocol.memory.shared_region import FlagIndex
from tandemkv.cache_rank.protocol.progress import BusyClock
from tandemkv.cache_rank.protocol.step_flags import WORDS_APART, StepFlags
from tandemkv.cache_rank.protocol.step_ring import SLOW, EntryKind, StepEntry, StepRow
from tandemkv.cache_rank.service.entry_runner import EntryRunner
from tandemkv.cache_rank.service.signals import HostSignals
from tandemkv.cache_rank.service.stream_signals import StreamSignals as EngineSide
from tandemkv.inference_rank.links.base import DecodeRows
from tandemkv.inference_rank.links.signals import StreamSignals as LinkSide

DIM, BATCH = 16, ROWS1 - 1
SELECTING = tuple(DecodeKind).index(DecodeKind.SELECTING)
ROWS, LENGTHS, GENERATIONS = [3, 1], [150, 200], [8, 7]
POLICIES = ("look_ahead", "oracle", "last_query")
NOBODY: list[int] = []
CLUSTERS = HeadClusters(clusters=((0, 0),) * LAYERS, representatives=((1,),) * LAYERS)


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    record_kernels(monkeypatch)


class Replays:
    """Graphs of a device that does one thing after another."""

    def __init__(self) -> None:
        self._tapes: dict[tuple[str, int], Tape] = {}
        self.num_captured = self.num_replayed = 0

    def capture(self, kind: str, size: int, body: Callable[[], None]) -> None:
        body()
        self.num_captured += 1
        self._tapes[kind, size] = Tape(runs_kernels=True).record(body)

    def forget(self) -> None:
        self._tapes.clear()

    def replay_of(self, kind: str, size: int) -> Callable[[], None] | None:
        tape = self._tapes.get((kind, size))

        def replay() -> None:
            assert tape is not None
            tape.play()
            self.num_replayed += 1

        return None if tape is None else replay


def _tensors(world: World) -> MappedTensors:
    tensors, queries = MappedTensors(), (BATCH, QUERY_HEADS, DIM)
    tensors.allocate_all(flag_specs(LAYERS, BATCH))
    tensors.allocate("streams", (LAYERS, BATCH, QUERY_HEADS * DIM), torch.float32)
    tensors.allocate("queries", (LAYERS, *queries), torch.float32)
    tensors.allocate("step_rows", (BATCH,), torch.int64)
    tensors.allocate("step_lengths", (BATCH,), torch.int64)
    tensors.allocate("req_to_token", (ROWS1, CONTEXT), torch.int32).copy_(world.table)
    tensors.allocate("flags", (FlagIndex(LAYERS).count, WORDS_APART), torch.int64)
    return tensors


class Played:
    """An engine of two requests, and the forward pass that it works beside."""

    def __init__(self, policy: str, **selection: object) -> None:
        self.memory = Memory()
        self.world = world_on(self.memory, policy=policy, **selection)
        self.num_cold = self.world.lengths.num_cold
        self.kept = versions_of(self.world, self.memory)
        self.tensors = _tensors(self.world)
        flags = StepFlags(self.tensors["flags"])
        connection = SimpleNamespace(
            tensors=self.tensors,
            lost_reason=None,
            is_lost=lambda: False,
            announce=lambda entry: None,
            end_waits=None,
            shard=HeadShard(),
        )
        self.link = LinkSide([connection], LAYERS, timeout_s=1.0)  # type: ignore[list-item]
        self.signals = EngineSide(self.tensors, flags, LAYERS, timeout_s=1.0)
        self.signals.confirm_prepared = lambda: None  # type: ignore[method-assign]
        self.runner = EntryRunner(
            self.world.rank,
            self.tensors,
            self.signals,
            self.kept,
            epoch=1,
            num_resident=self.world.width,
            is_gone=lambda: False,
            host=flags,
            warm_up=lambda: None,
        )
        self.random, self.step = torch.Generator().manual_seed(5), 0
        for row, length in zip(ROWS, LENGTHS, strict=True):
            self.world.prefill(row, length)
        self.kept.name(ROWS, GENERATIONS, epoch=1)
        self.kept.record(torch.tensor(ROWS), step=torch.tensor([0]))

    def prepare(self, size: int) -> Replays:
        """Let decode steps of `size` requests be replayed."""
        self.runner._graphs = found = Replays()  # type: ignore[assignment]
        self.step += 1
        rows = (StepRow(row=0, generation=0, length=1),) * size
        self.runner.run(
            StepEntry(kind=EntryKind.PREPARE, step=self.step, variant=SELECTING, rows=rows)
        )
        return found

    def decode(
        self, rows: list[int], lengths: list[int], num_cold: int | None = None,
        slow: list[int] = NOBODY,
    ) -> None:  # fmt: skip
        """Do a step of the forward pass, and the engine's beside it; `slow` are places."""
        self.step += 1
        size, shape = len(rows), (LAYERS, len(rows), QUERY_HEADS, DIM)
        cold = self.num_cold if num_cold is None else num_cold
        # As on GPUs where the host does not know the rows: it announces padding.
        entry = StepEntry(
            kind=EntryKind.DECODE, step=self.step, variant=SELECTING, num_cold=cold,
            rows=tuple(
                StepRow(row=0, generation=0, flags=SLOW if i in slow else 0) for i in range(size)
            ),
        )  # fmt: skip
        of_rows = torch.tensor(rows)
        of_lengths = torch.tensor(lengths)
        step = DecodeRows(
            rows=of_rows, lengths=of_lengths, lengths_on_host=of_lengths,
            req_to_token=self.world.table, num_cold=cold,
        )  # fmt: skip
        assert self.link.begin(entry, step)
        hidden, queries = (torch.randn(shape, generator=self.random) for _ in range(2))
        for layer in range(LAYERS):
            self.link.put_stream(layer, hidden[layer].flatten(1))
            self.link.put_query(layer, queries[layer])
        self.link.raise_end()
        self.link.end()
        self.runner.run(entry)
        self.link.await_finished(self.step)
        assert self.link.lost_step == 0
        assert not self.signals._lost.any()

    def state(self, rows: list[int]) -> list[torch.Tensor]:
        """Return sets, books and copies of `rows`; copies of other rows are nobody's."""
        found = [x[rows].clone() for layer in self.world.pools.resident for x in layer]
        for name, tensor in self.memory.tensors.items():
            if name.endswith("_versions"):
                found.append(tensor[:, :, rows].clone())
            elif name.startswith("resident_") or name == "row_stamps":
                found.append(tensor[:, rows].clone())
        return found


Play = Callable[..., Played]


@pytest.fixture
def play() -> Iterator[Play]:
    """Make what is played, with its memory until the test's end."""
    made: list[Played] = []

    def playing(policy: str, **selection: object) -> Played:
        made.append(Played(policy, **selection))
        return made[-1]

    yield playing
    for played in made:
        played.tensors.close()


def _are_equal(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_that_is_replayed_does_what_one_does_that_is_queued(policy: str, play: Play) -> None:
    queued, replayed = play(policy), play(policy)
    graphs = replayed.prepare(2)
    queued.prepare(2).forget()  # a rehearsal counts as a step in the books
    before = queued.state(ROWS)
    for number in range(1, 6):
        # In each order: what is replayed knows requests by their place in the batch alone.
        order = [0, 1] if number % 2 else [1, 0]
        for played in (queued, replayed):
            played.decode([ROWS[i] for i in order], [LENGTHS[i] + number for i in order])
        assert _are_equal(queued.state(ROWS), replayed.state(ROWS)), number
    assert graphs.num_replayed == 5
    assert not _are_equal(queued.state(ROWS), before)
    stamps = replayed.kept.stamps[:, ROWS]
    assert stamps[..., 2].sort(0).values.tolist() == [[5, 5], [6, 6], [7, 7]]
    assert stamps[..., :2].tolist() == [[[1, 8], [1, 7]]] * 3
    assert replayed.kept.restore(ROWS, GENERATIONS, step=6) == [True, True]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_rehearsal_leaves_the_requests_of_the_step_before_alone(policy: str, play: Play) -> None:
    """What the step before was about is still where the next one's requests will come."""
    played = play(policy)
    played.decode(ROWS, [n + 1 for n in LENGTHS])
    before = played.state([1, 2, 3])
    played.prepare(2)
    # Of a step that is still to come the forward pass would not wait.
    assert played.signals._words.finished.tolist() == [played.step]
    assert _are_equal(played.state([1, 2, 3]), before)
    assert not played.signals._lost.any()
    played.decode(ROWS, [n + 2 for n in LENGTHS])
    assert not _are_equal(played.state([1, 2, 3]), before)


@pytest.mark.parametrize("policy", POLICIES)
def test_copies_are_of_the_step_that_ended_though_the_next_has_sent_its_requests(
    policy: str, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing holds the other GPU back once the step is finished."""
    undisturbed, overtaken = play(policy), play(policy)
    settle = overtaken.signals.settle

    def settle_and_go_on() -> None:
        settle()
        goes_on = overtaken.signals._lost == 0  # not behind a rehearsal
        overtaken.tensors["step_rows"].copy_(goes_on * 2)
        overtaken.tensors["step_lengths"].copy_(1 + goes_on * 98)

    monkeypatch.setattr(overtaken.signals, "settle", settle_and_go_on)
    for played in (undisturbed, overtaken):
        played.prepare(2)
        for number in range(1, 4):
            played.decode(ROWS, [n + number for n in LENGTHS])
    assert _are_equal(undisturbed.state([1, 2, 3]), overtaken.state([1, 2, 3]))


def test_a_replayed_step_goes_by_the_longest_request_of_its_announcement(play: Play) -> None:
    played = play("look_ahead")
    played.prepare(2)
    selections = []
    for number, num_cold in enumerate([None, 1000, LENGTHS[0] + 5, None], 1):
        played.decode(ROWS, [n + number for n in LENGTHS], num_cold)
        selections.append(played.world.rank.counters()["selections_total"])
    layers = len(played.world.rank.program.selecting)
    assert selections == [2 * layers, 2 * layers, 3 * layers, 5 * layers]


def test_graphs_count_steps_and_are_told_where_others_came_between(play: Play) -> None:
    """A number that is written for each step would be a kernel more before the graph."""
    played, written = play("last_query"), []
    played.prepare(2)
    fill = played.signals._step.fill_
    played.signals._step.fill_ = lambda step: (written.append(step), fill(step))  # type: ignore
    for _ in range(3):
        played.decode(ROWS, [n + played.step for n in LENGTHS])
    first = played.step - 2
    assert written == [first - 1]  # whatever the rehearsal has counted
    played.decode(ROWS[:1], [LENGTHS[0] + played.step])  # queued, for it was not prepared
    queued = played.step
    played.decode(ROWS, [n + played.step for n in LENGTHS])
    assert written == [first - 1, queued]
    assert played.signals._step.tolist() == [played.step]
    played.signals.begin_counted(played.step + 3)
    assert written[2:] == [played.step + 2]


def test_a_size_that_was_not_prepared_is_queued(play: Play) -> None:
    played = play("look_ahead")
    graphs = played.prepare(2)
    played.decode([1], [LENGTHS[1] + 1])
    assert graphs.num_replayed == 0
    assert played.kept.restore([1, 3], [7, 8], step=3) == [True, True]
    assert played.kept.stamps[:, 1, 2].max() == 3
    assert played.runner.delays.values() == {}  # the step was announced at no time
    assert played.world.rank.counters()["steps_total"] == 1


@pytest.mark.parametrize("tells_all", [False, True])
@pytest.mark.parametrize("policy", ["last_query", "look_ahead"])
def test_what_is_selected_for_the_next_step_is_told_where_it_goes_to_another_host(
    policy: str, tells_all: bool, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = {"late_layers": 1, "exact_layers": ()} if policy == "look_ahead" else {}
    played = play(policy, **late)
    program, raised, fetched = played.world.rank.program, list[int](), list[int]()
    monkeypatch.setattr(program, "tells_all", tells_all)
    fetch = played.world.rank.fetch

    def noted(layer: int, size: int) -> None:
        fetch(layer, size)
        fetched.append(layer)

    def ready(layer: int) -> None:
        assert fetched[-1] == layer, "behind its rows"
        raised.append(layer)

    monkeypatch.setattr(played.world.rank, "fetch", noted)
    monkeypatch.setattr(played.signals, "raise_ready", ready)
    played.decode(ROWS, [n + 1 for n in LENGTHS])
    awaited = [x for x in program.selecting if program.awaits(DecodeKind.SELECTING, x)]
    assert len(awaited) < len(program.selecting)
    assert sorted(raised) == (program.selecting if tells_all else awaited)
    assert sorted(fetched) == program.selecting


@pytest.mark.parametrize(
    ("layers", "distance", "late"), [(16, 8, 7), (12, 4, 7), (10, 2, 7), (9, 0, 8)]
)
def test_a_late_layer_is_selected_once_its_newest_page_is_indexed(
    layers: int, distance: int, late: int, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It scores what leaves the ring next: with int4 a token of the page that a step completes.

    In the lane of some late layers nothing is selected where the last entry is, or at all.
    """
    model = msgspec.structs.replace(engine_world.MODEL, num_layers=layers)
    monkeypatch.setattr(engine_world, "MODEL", model)
    for module in (engine_world, sys.modules[__name__]):
        monkeypatch.setattr(module, "LAYERS", layers)
    played = play(
        "look_ahead", options={"distance": distance}, late_layers=late, exact_layers=(),
        index_dtype="int4",
    )  # fmt: skip
    rank, done = played.world.rank, list[tuple[str, int]]()
    append, choose_late = rank.append, rank.choose_late

    def appended(layer: int, size: int) -> None:
        done.append(("append", layer))
        append(layer, size)

    def chosen(layer: int, hidden: torch.Tensor) -> None:
        done.append(("late", layer))
        choose_late(layer, hidden)

    monkeypatch.setattr(rank, "append", appended)
    monkeypatch.setattr(rank, "choose_late", chosen)
    played.decode(ROWS, [208, 160])
    assert [layer for name, layer in done if name == "late"] == list(range(late))
    assert sorted(layer for name, layer in done if name == "append") == list(range(layers))
    for layer in range(late):
        assert done.index(("append", layer)) < done.index(("late", layer))


@pytest.fixture
def calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "resolve_calibration", lambda *_: Resolved(clusters=CLUSTERS))


@pytest.mark.parametrize("policy", ["sfi", "sync_kv"])
@pytest.mark.usefixtures("calibrated")
def test_a_step_that_nobody_captures_is_rehearsed_and_queued_anew(
    policy: str, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = play(policy, fetch_cap=32)
    rank, asked = played.world.rank, list[tuple[tuple[int, int], ...]]()
    select = rank._policy.select

    def noted(request: SelectionInput) -> Selection:
        asked.append(tuple(request.owners))
        return select(request)

    monkeypatch.setattr(rank._policy, "select", noted)
    played.decode(ROWS, [n + 1 for n in LENGTHS], slow=[0, 1])
    asked.clear()
    before = played.state([1, 2, 3])
    graphs = played.prepare(2)
    assert _are_equal(played.state([1, 2, 3]), before)
    assert asked == [], "a rehearsal is about nobody"
    for number, slow in enumerate(([1], [], [0], [0, 1]), 2):
        before = [x[ROWS].clone() for layer in played.world.pools.resident for x in layer]
        asked.clear()
        played.decode(ROWS, [n + number for n in LENGTHS], slow=slow)
        found = [x[ROWS] for layer in played.world.pools.resident for x in layer]
        for place in (0, 1):
            changed = any(
                not torch.equal(a[place], b[place]) for a, b in zip(found, before, strict=True)
            )
            assert changed is (place in slow), number
        layers = len(rank.program.selecting) if slow else 0
        assert asked == [tuple((ROWS[i], 1) for i in slow)] * layers
    assert (graphs.num_captured, graphs.num_replayed) == (0, 0)
    assert played.kept.restore(ROWS, GENERATIONS, step=played.step + 1) == [True, True]


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.usefixtures("calibrated")
def test_only_a_step_that_is_captured_runs_to_its_end_when_it_is_lost(
    is_captured: bool, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy whose methods are called anew would keep the queries of another step."""
    played = play("look_ahead" if is_captured else "sync_kv")
    played.decode(ROWS, [n + 1 for n in LENGTHS], slow=[0, 1])
    chosen: list[int] = []
    monkeypatch.setattr(played.world.rank, "choose", lambda layer, _: chosen.append(layer))
    monkeypatch.setattr(played.world.rank, "fetch", lambda *_: None)
    rows = (StepRow(row=0, generation=0, flags=SLOW),) * 2
    played.signals.abort()  # its waits are in vain from now on
    played.runner.run(
        StepEntry(kind=EntryKind.DECODE, step=played.step + 1, variant=SELECTING, rows=rows)
    )
    assert chosen == (played.world.rank.program.selecting if is_captured else [])


def test_a_chunk_that_seeds_nothing_tells_after_each_layer_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine on a CPU may be layers behind: one that tells nothing for long counts as lost."""
    memory = Memory()
    world = world_on(memory, policy="oracle", index_dtype="int8")
    tensors = _tensors(world)
    flags = StepFlags(tensors["flags"])
    for layer in range(LAYERS):
        flags.raise_to(FlagIndex(LAYERS).input(layer), 1)
    told: list[int] = []
    extend = world.rank.extend

    def extend_and_look(layer: int, slots: torch.Tensor) -> None:
        told.append(flags.value(FlagIndex.PROGRESS))
        extend(layer, slots)

    monkeypatch.setattr(world.rank, "extend", extend_and_look)
    runner = EntryRunner(
        world.rank,
        tensors,
        HostSignals(flags, LAYERS, is_gone=lambda: False, clock=BusyClock()),
        None,
        epoch=1,
        num_resident=world.width,
        is_gone=lambda: False,
        host=flags,
        warm_up=lambda: None,
    )
    rows = (StepRow(row=ROWS[0], generation=8, length=LENGTHS[0]),)
    runner.run(StepEntry(kind=EntryKind.EXTEND, step=1, rows=rows))
    assert len(told) > 1
    assert told == list(range(len(told)))
    assert flags.value(FlagIndex.FINISHED) == 1
    tensors.close()
