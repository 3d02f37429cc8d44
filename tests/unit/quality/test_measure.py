# SPDX-License-Identifier: Apache-2.0
"""What is asked of a server, and what is taken from its answers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tandemkv.server.evaluation.quality.measure import measure
from tandemkv.server.evaluation.quality.results import TaskResult
from tandemkv.server.evaluation.quality.samples import Sample
from tandemkv.server.evaluation.quality.servers import MeasurementError


class Numbers:
    """Token 5 is the text " 5"."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        del skip_special_tokens
        return "".join(f" {i}" for i in ids)


def ask(server: Any, samples: Sequence[Sample], **options: Any) -> TaskResult:
    given: dict[str, Any] = {
        "concurrency": 2,
        "ends": frozenset({0}),
        "continuations": {},
        "on_answer": lambda sample: None,
    }
    return measure(
        server,
        task="t",
        digest="d",
        samples=samples,
        tokenizer=Numbers(),  # type: ignore[arg-type]
        **(given | options),
    )


def asking(**options: Any) -> Sample:
    given: dict[str, Any] = {
        "name": "a",
        "mode": "generate",
        "context_ids": [1, 2],
        "question_ids": [7, 8],
        "num_new_tokens": 3,
        "answers": ["9", "10"],
        "scorer": "string_match_all",
    }
    return Sample(**(given | options))


def forcing(mode: str = "force") -> Sample:
    return Sample(name="f", mode=mode, context_ids=[1, 2], forced_ids=[9, 4, 5], num_new_tokens=3)  # type: ignore[arg-type]


def test_answers_are_scored(fake_server: Any) -> None:
    server = fake_server()
    found = ask(server, [asking(), asking(name="b", answers=["10", "77"])])
    assert [(a.name, a.text, a.score) for a in found.answers] == [
        ("a", " 9 10 11", 1.0),
        ("b", " 9 10 11", 0.5),
    ]
    assert all(body["input_ids"] == [1, 2, 7, 8] for body in server.asked)


def test_an_answer_ends_where_the_model_ends_it(fake_server: Any) -> None:
    server = fake_server(answers={(1, 2, 7, 8): [9, 0, 10]})
    assert ask(server, [asking()]).answers[0].text == " 9"


@pytest.mark.parametrize("is_stock", [False, True])
def test_a_late_question_is_decoded_by_ours_and_prefilled_by_stock(
    is_stock: bool, fake_server: Any
) -> None:
    server = fake_server(is_stock=is_stock)
    (answer,) = ask(server, [asking(late_question=True)]).answers
    assert (answer.text, answer.score) == (" 9 10 11", 1.0)
    (body,) = server.asked
    assert body["input_ids"] == ([1, 2, 7, 8] if is_stock else [1, 2])
    if not is_stock:
        assert body["sampling_params"]["custom_params"] == {"forced_token_ids": [7, 8]}
        assert body["sampling_params"]["max_new_tokens"] == 5


@pytest.mark.parametrize("is_stock", [False, True])
def test_a_later_turn_repeats_the_context(is_stock: bool, fake_server: Any) -> None:
    server = fake_server(is_stock=is_stock)
    (answer,) = ask(server, [asking(mode="follow_up")]).answers
    assert (answer.text, answer.score) == (" 9 10 11", 1.0)
    first, second = server.asked
    assert (first["input_ids"], first["sampling_params"]["max_new_tokens"]) == ([1, 2], 1)
    assert second["input_ids"] == [1, 2, 7, 8]
    assert "custom_params" not in second["sampling_params"]


def test_a_turn_that_was_half_forgotten_is_an_error(fake_server: Any) -> None:
    server = fake_server(num_kept=60)
    with pytest.raises(MeasurementError, match=r"of the 100 tokens .* only 60 cached"):
        ask(server, [asking(mode="follow_up", context_ids=list(range(100)))])


def test_a_turn_that_was_forgotten_is_an_error(fake_server: Any) -> None:
    with pytest.raises(MeasurementError, match=r"of the 2 tokens .* only 0 cached"):
        ask(fake_server(num_kept=0), [asking(mode="follow_up")])


def test_forced_tokens_but_the_first_count(fake_server: Any) -> None:
    for is_stock in (False, True):
        (answer,) = ask(fake_server(is_stock=is_stock), [forcing()]).answers
        assert answer.nll == [0.5, 0.5]


def test_agreement_compares_what_would_have_been_chosen_after_dense_s_text(
    fake_server: Any,
) -> None:
    sample = Sample(name="c", mode="continue", context_ids=[1, 2], num_new_tokens=4)
    dense = ask(fake_server(is_stock=True, answers={(1, 2): [3, 4, 9, 10]}), [sample]).answers[0]
    assert dense.tokens == [3, 4, 9, 10]
    assert dense.agrees == [True, True, True]
    assert dense.tokens is not None
    server = fake_server()
    (answer,) = ask(server, [sample], continuations={"c": dense.tokens}).answers
    # After 4 it would say 5, not 9; after dense's 9 it says 10 too.
    assert answer.agrees == [True, False, True]


def test_a_server_that_does_not_force_is_an_error(fake_server: Any) -> None:
    server = fake_server(forces=False)
    with pytest.raises(MeasurementError, match="did not force the tokens"):
        ask(server, [forcing()])
    with pytest.raises(MeasurementError, match="did not force the question"):
        ask(server, [asking(late_question=True, question_ids=[50, 51])])
    with pytest.raises(MeasurementError, match="HTTP 503"):
        ask(fake_server(fails=True), [forcing()])


def test_counters_of_the_task_alone(fake_server: Any) -> None:
    server = fake_server()
    ask(server, [asking()])
    found = ask(server, [asking(), asking(name="b")])
    assert found.attended_share == 0.25
    assert found.fetched_rows_per_step == 2.5
    assert (found.decode_steps, found.request_steps) == (8, 8)
    assert ask(fake_server(is_stock=True), [asking()]).attended_share is None


def test_steps_of_every_kind_count(fake_server: Any) -> None:
    found = ask(fake_server(exact_rows=1), [asking()])
    assert found.request_steps == 4 + 1


def test_probes_are_averaged_by_step_and_layer(tmp_path: Path, fake_server: Any) -> None:
    path = tmp_path / "probes.jsonl"
    lines = [
        {"decode_step": 8, "row": 1, "layer": 2, "mass": [0.5, 0.7], "x": 1.0},
        {"decode_step": 8, "row": 1, "layer": 3, "mass": [1.0, 1.0], "x": 0.5},
        {"decode_step": 16, "row": 1, "layer": 2, "mass": [0.2, 0.2], "x": 0.0},
    ]
    for line in lines:
        line |= {"oracle_mass": [1.0, 1.0], "recall": [line.pop("x")] * 2}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    probes = ask(fake_server(probe_file=path), [forcing("probe")]).probes
    assert probes is not None
    assert probes.mass == pytest.approx([0.8, 0.2])
    assert probes.recall == pytest.approx([0.75, 0.0])
    assert probes.oracle_mass == [1.0, 1.0]
    assert probes.mass_by_layer == pytest.approx({"2": 0.4, "3": 1.0})
    assert ask(fake_server(probe_file=tmp_path / "no"), [forcing("probe")]).probes is None


def test_probes_of_one_request_are_neighbours(tmp_path: Path, fake_server: Any) -> None:
    """Whatever is decoded beside it: the interval takes blocks of neighbours."""
    path = tmp_path / "probes.jsonl"
    with path.open("w") as file:
        for step, row in itertools.product((8, 16), (1, 2)):
            line = {key: [row + step / 100] for key in ("mass", "oracle_mass", "recall")}
            file.write(json.dumps({"decode_step": step, "row": row, "layer": 2, **line}) + "\n")
    probes = ask(fake_server(probe_file=path), [forcing("probe")]).probes
    assert probes is not None
    assert probes.mass == pytest.approx([1.08, 1.16, 2.08, 2.16])


@pytest.mark.parametrize("is_stock", [False, True])
def test_the_likeliest_tokens_come_with_the_log_likelihoods_if_wanted(
    is_stock: bool, fake_server: Any
) -> None:
    """The fake model always adds one to the last token."""
    sample = Sample(
        name="f", mode="force", context_ids=[1, 2], forced_ids=[9, 4, 5], num_new_tokens=3,
        notes={"best": 1},
    )  # fmt: skip
    (answer,) = ask(fake_server(is_stock=is_stock), [sample]).answers
    assert (answer.nll, answer.best) == ([0.5, 0.5], [10, 5])
    (plain,) = ask(fake_server(is_stock=is_stock), [forcing()]).answers
    assert plain.best is None


def test_questions_on_one_context_follow_each_other(fake_server: Any) -> None:
    """Others may be asked in between; the first is done before the second is sent."""
    server = fake_server()
    samples = [asking(name=str(i), question_ids=[7, i], notes={"context": i % 2}) for i in range(6)]
    found = ask(server, samples)
    assert [answer.name for answer in found.answers] == [str(i) for i in range(6)]
    asked = [body["input_ids"][-1] for body in server.asked]
    assert [i for i in asked if i % 2 == 0] == [0, 2, 4]
    assert [i for i in asked if i % 2] == [1, 3, 5]
