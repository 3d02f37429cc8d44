# SPDX-License-Identifier: Apache-2.0
"""Link ``shared``: what a step waits for that has layers which wait for nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandemkv.cache_rank.policies.registry import selection_values
from tandemkv.cache_rank.protocol.engine_program import DecodeKind, EngineProgram
from tandemkv.cache_rank.protocol.messages import Timing
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

    is_captured = sends_beside = False

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


@pytest.fixture
def link(signals: Signals) -> SharedLink:
    values = selection_values({"policy": "last_query", "budget_tokens": 100, "exact_layers": []})
    settings = RankSettings.model_validate({"selection": values})
    program = EngineProgram(MODEL, settings, timing=Timing.NEXT_STEP, all_exact=False)
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
