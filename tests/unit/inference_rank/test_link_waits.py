# SPDX-License-Identifier: Apache-2.0
"""Link ``shared``: what a step waits for that has layers which wait for nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandemkv.cache_rank.policies.registry import selection_values
from tandemkv.cache_rank.protocol.engine_program import DecodeKind, EngineProgram
from tandemkv.cache_rank.protocol.errors import CacheRankLostError
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings
from tandemkv.cache_rank.protocol.step_ring import EntryKind, StepEntry
from tandemkv.inference_rank.links.base import DecodeRows, ExtendRow, StepLostError
from tandemkv.inference_rank.links.shared import SharedLink

MODEL = ModelSpec(
    architecture="LlamaForCausalLM", num_layers=2, num_qo_heads=2, num_kv_heads=1,
    head_dim=4, hidden_size=8, max_context=64, dtype="float32", model_hash="0",
)  # fmt: skip


class Signals:
    """Notes what is announced and waited for, in order."""

    is_captured = False

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.is_there = True

    def begin(self, entry: StepEntry, _step: DecodeRows | None) -> bool:
        if self.is_there:
            self.asked.append((entry.kind, entry.step, [row.row for row in entry.rows]))
        return self.is_there

    def await_finished(self, step: int) -> bool:
        self.asked.append(("finished", step))
        return self.is_there

    def give_up(self) -> None:
        """The engine has nothing to wait for."""

    def forget_lost(self) -> None:
        """The connection alone knows."""

    def end(self) -> bool:
        return True


@pytest.fixture
def signals() -> Signals:
    return Signals()


@pytest.fixture(params=["last_query"])
def link(signals: Signals, request: pytest.FixtureRequest) -> SharedLink:
    values = selection_values({"policy": request.param, "budget_tokens": 100, "exact_layers": []})
    settings = RankSettings.model_validate({"selection": values})
    program = EngineProgram(MODEL, settings, page_size=1)
    connection: Any = SimpleNamespace(program=program, step=0, epoch=1, lost_reason=None)
    return SharedLink(connection, signals, generation_of=lambda row: row, rows_on_host=lambda: None)  # type: ignore[arg-type]


def begin(link: SharedLink, kind: DecodeKind) -> None:
    rows, lengths = torch.tensor([1, 2]), torch.tensor([50, 60])
    step = DecodeRows(
        rows=rows, lengths=lengths, lengths_on_host=lengths, req_to_token=rows, num_cold=0
    )
    link.begin_decode(kind, step)


def test_sets_of_requests_that_were_dense_are_asked_for_before_the_step(
    link: SharedLink, signals: Signals
) -> None:
    link.seed_identity(torch.tensor([2, 0]), None)  # row 0 only fills up the batch
    begin(link, DecodeKind.SELECTING)
    assert signals.asked == [(EntryKind.GROW, 1, [2]), (EntryKind.DECODE, 2, [1, 2])]
    assert link.pass_step == 2
    begin(link, DecodeKind.SELECTING)
    assert signals.asked[2:] == [(EntryKind.DECODE, 3, [1, 2])], "once"


def test_a_step_that_asks_for_nothing_else_waits_for_them(
    link: SharedLink, signals: Signals
) -> None:
    link.seed_identity(torch.tensor([2]), None)
    begin(link, DecodeKind.DENSE)
    assert signals.asked == [(EntryKind.GROW, 1, [2]), ("finished", 1)]
    assert link.pass_step == 1, "its results are of use only if the wait was answered"


@pytest.mark.parametrize("is_prompt", [False, True])
def test_a_step_that_asks_for_nothing_waits_for_the_steps_before(
    link: SharedLink, signals: Signals, is_prompt: bool
) -> None:
    """The engine may still write the sets that it attends to."""
    begin(link, DecodeKind.DENSE)
    assert signals.asked == []
    if is_prompt:
        table = torch.arange(50)
        link.begin_extend([ExtendRow(row=1, prefix_len=0, length=50, table=table, window=(0, 50))])
        link.end_extend()
    else:
        begin(link, DecodeKind.SELECTING)
    link.pass_step = None  # as `PassLog` does before a pass
    begin(link, DecodeKind.DENSE)
    assert signals.asked[1:] == [("finished", 1)]
    assert link.pass_step == 1
    link.pass_step = None
    begin(link, DecodeKind.DENSE)
    assert signals.asked[2:] == [], "they are done"
    assert link.pass_step is None


def test_a_step_that_waits_in_vain_is_lost(link: SharedLink, signals: Signals) -> None:
    begin(link, DecodeKind.SELECTING)
    signals.is_there = False
    with pytest.raises(StepLostError):
        begin(link, DecodeKind.DENSE)
    assert link.is_void
    link.rewind()
    link.seed_identity(torch.tensor([2]), None)
    with pytest.raises(StepLostError):
        begin(link, DecodeKind.DENSE)
    assert link.is_void


class Part:
    """Notes what an engine is to make ready."""

    def __init__(self) -> None:
        self.asked: list[tuple[DecodeKind, int]] = []

    def ask_to_prepare(self, *, variant: int, size: int) -> None:
        self.asked.append((tuple(DecodeKind)[variant], size))

    def await_prepared(self) -> None:
        """It is at once."""

    def taken(self) -> list[tuple[DecodeKind, int]]:
        asked, self.asked = self.asked, []
        return asked


def prepared(link: SharedLink, signals: Signals) -> Part:
    """Let the engine be one that prepares steps; every step is waited for in whole."""
    signals.is_captured, part = True, Part()
    signals.drain = lambda: True  # type: ignore[attr-defined]
    link._connection.parts = [part]  # type: ignore[misc, assignment]
    return part


def test_the_engine_of_a_new_epoch_captures_what_a_step_takes_when_it_comes_first(
    link: SharedLink, signals: Signals
) -> None:
    """Requests that go on wait for their own graph, and those that it takes its memory from."""
    signals.is_captured = True
    signals.mask = signals.raise_end = lambda: None  # type: ignore[attr-defined]
    is_whole = True

    def drain() -> bool:
        signals.asked.append(("drained",))
        return is_whole

    signals.drain = drain  # type: ignore[attr-defined]
    part, selecting = Part(), DecodeKind.SELECTING
    link._connection.parts = [part]  # type: ignore[misc, assignment]
    for size in (4, 2, 1):
        rows = torch.ones(size, dtype=torch.int64)
        rehearsal = DecodeRows(
            rows=rows, lengths=rows, lengths_on_host=rows, req_to_token=rows, num_cold=0,
            is_rehearsal=True,
        )  # fmt: skip
        link.begin_decode(selecting, rehearsal)
    prompts = DecodeKind.DENSE, 0
    assert part.taken() == [prompts, (selecting, 4), (selecting, 2), (selecting, 1)]
    begin(link, selecting)
    assert part.taken() == []
    assert signals.asked == [(EntryKind.DECODE, 1, [0, 0])]

    link.rewind()
    signals.asked = []
    begin(link, selecting)
    assert part.taken() == [(selecting, 4), (selecting, 2)]
    assert signals.asked == [("drained",), (EntryKind.DECODE, 2, [0, 0])], "and before the step"
    begin(link, selecting)
    assert part.taken() == []
    assert signals.asked[2:] == [(EntryKind.DECODE, 3, [0, 0])]
    link.begin_extend([ExtendRow(row=1, prefix_len=0, length=50, table=rows, window=None)])
    assert part.taken() == [prompts]

    link.rewind()
    is_whole = False
    begin(link, selecting)
    assert part.taken() == [], "a step was lost: nothing is asked of that epoch"
    link.rewind()
    is_whole = True
    begin(link, DecodeKind.INDEXING)
    assert part.taken() == [prompts], "what is not captured is loaded, and not within the step"
    link.rewind()
    begin(link, selecting)
    link._ready.add((DecodeKind.DENSE, 1))  # a decode step of one request, which is no prompt
    part.taken()
    link.begin_extend([ExtendRow(row=1, prefix_len=0, length=50, table=rows, window=None)])
    assert part.taken() == [prompts]


@pytest.mark.parametrize("link", ["sfi", "own_policy:WorstFirst"], indirect=True)
def test_a_step_that_nobody_captures_is_made_ready_when_it_comes_first(
    link: SharedLink, signals: Signals
) -> None:
    """SGLang rehearses none of them; in each epoch the engine does, before the step."""
    part = prepared(link, signals)
    selecting, prompts = (DecodeKind.SELECTING, 2), (DecodeKind.DENSE, 0)
    table = torch.arange(50)
    for epoch in (1, 2):
        if epoch == 2:
            link.rewind()
        if epoch == 1:
            link.begin_extend([ExtendRow(row=1, prefix_len=0, length=50, table=table)])
            assert part.taken() == [prompts]
        begin(link, DecodeKind.SELECTING)
        assert part.taken() == ([selecting] if epoch == 1 else [prompts, selecting])
        begin(link, DecodeKind.SELECTING)
        assert part.taken() == []
        begin(link, DecodeKind.INDEXING)
        assert part.taken() == [(DecodeKind.INDEXING, 2)]


def test_an_epoch_of_a_number_that_recurs_is_made_ready_as_well(
    link: SharedLink, signals: Signals
) -> None:
    """A host that takes the place of another counts its epochs from 1."""
    part = prepared(link, signals)
    for _ in range(2):
        begin(link, DecodeKind.SELECTING)
        assert part.taken() == [(DecodeKind.DENSE, 0)]
        link.rewind()


def test_an_engine_that_is_lost_while_it_captures_is_found_lost_by_the_step(
    link: SharedLink, signals: Signals
) -> None:
    signals.is_captured, signals.is_there = True, False
    signals.drain = lambda: True  # type: ignore[attr-defined]

    def lose() -> None:
        raise CacheRankLostError("it did not get ready")

    part = Part()
    part.await_prepared = lose  # type: ignore[method-assign]
    link._connection.parts = [part]  # type: ignore[misc, assignment]
    begin(link, DecodeKind.SELECTING)
    assert link.is_void
    assert part.taken()
