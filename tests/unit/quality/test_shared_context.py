# SPDX-License-Identifier: Apache-2.0
"""Several questions on one context: what is shared, what fits, and that answers can be read."""

from __future__ import annotations

import dataclasses
import re

import pytest

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.evaluation.corpus import Corpus
from tandemkv.server.evaluation.quality.samples import Sample
from tandemkv.server.evaluation.quality.tasks.base import TaskInputs
from tandemkv.server.evaluation.quality.tasks.registry import find_tasks
from tandemkv.server.evaluation.tokenizing import PromptBuilder

NAMES = ["niah_eight_keys", "records", "variable_value", "multi_document_numbers"]


def samples_of(name: str, inputs: TaskInputs, count: int = 10) -> list[Sample]:
    (task,) = find_tasks([name])
    return task.samples(dataclasses.replace(inputs, num_samples=count))


def texts(inputs: TaskInputs, sample: Sample) -> tuple[str, str]:
    decode = inputs.prompts.tokenizer.decode
    return decode(sample.context_ids), decode(sample.question_ids)


@pytest.mark.parametrize("name", NAMES)
def test_eight_questions_share_a_context_of_whole_pages_and_a_seed(
    name: str, inputs: TaskInputs
) -> None:
    """Of pages of 64 or 128 tokens at least 96 tokens are left to prefill for each question."""
    samples = samples_of(name, inputs)
    contexts = [tuple(sample.context_ids) for sample in samples]
    assert len(set(contexts[:8])) == 1
    assert len(set(contexts)) == 2
    assert [sample.notes["context"] for sample in samples] == [0] * 8 + [1] * 2
    for sample in samples:
        assert len(sample.context_ids) % 128 == 96
        assert 700 - 128 - 40 < len(sample.prompt_ids) <= 700
    assert len({tuple(sample.question_ids) for sample in samples[:8]}) == 8


@pytest.mark.parametrize("name", NAMES)
def test_every_answer_stands_in_its_context_once_and_is_a_number(
    name: str, inputs: TaskInputs
) -> None:
    for sample in samples_of(name, inputs):
        context, question = texts(inputs, sample)
        (answer,) = sample.answers
        assert re.fullmatch(r"\d{5,7}", answer)
        assert context.count(answer) == 1
        assert answer not in question


def test_keys_and_records_are_found_by_reading(inputs: TaskInputs) -> None:
    for sample in samples_of("niah_eight_keys", inputs):
        context, question = texts(inputs, sample)
        key = re.findall(r"magic number for (\S+) mentioned", question)[0]
        assert re.findall(rf"numbers for {key} is: (\d{{7}})\.", context) == sample.answers
        assert len(re.findall(r"is: \d{7}\.", context)) == 8
    depths = []
    for sample in samples_of("records", inputs, 8):
        context, question = texts(inputs, sample)
        key = re.findall(r"stored for record (\d{6})\?", question)[0]
        assert re.findall(rf"record {key}: (\d{{7}})", context) == sample.answers
        depths.append(context.index(sample.answers[0]) / len(context))
    assert depths == sorted(depths)
    assert depths[-1] - depths[0] > 0.5


def test_chains_lead_to_the_value(inputs: TaskInputs) -> None:
    for sample in samples_of("variable_value", inputs):
        context, question = texts(inputs, sample)
        name = re.findall(r"value of the variable (\w+) in", question)[0]
        assigned = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", context))
        hops = 0
        while name in assigned:
            name, hops = assigned[name], hops + 1
        assert ([name], hops) == (sample.answers, 3)


def test_documents_answer_with_one_or_two_of_them(inputs: TaskInputs) -> None:
    for i, sample in enumerate(samples_of("multi_document_numbers", inputs, 8)):
        context, question = texts(inputs, sample)
        if i % 2 == 0:
            name = re.findall(r"the badge number of (.+)\?", question)[0]
            found = re.findall(rf"badge number of {name} is (\d+)\.", context)
        else:
            name = re.findall(r"company that (.+) works for\?", question)[0]
            (firm,) = re.findall(rf"{name} works for (Firm \d+)\.", context)
            found = re.findall(rf"licence number of {firm} is (\d+)\.", context)
        assert found == sample.answers


def test_chat_encloses_the_context_and_ends_with_the_beginning_of_the_answer(
    inputs: TaskInputs,
) -> None:
    chat = dataclasses.replace(
        inputs, prompts=PromptBuilder(inputs.prompts.tokenizer, "chat"), num_samples=1
    )
    (sample,) = samples_of("records", chat, 1)
    context, question = texts(chat, sample)
    assert context.startswith("<user>Here is a list of records.")
    assert re.search(r"</user><assistant> The number stored for record \d{6} is$", question)


def test_a_late_question_and_a_later_turn_keep_the_shared_context(inputs: TaskInputs) -> None:
    plain = samples_of("niah_eight_keys", inputs)
    late, turn = (samples_of(f"niah_eight_keys+{how}", inputs) for how in ("late", "turn"))
    assert [s.prompt_ids for s in late] == [s.context_ids for s in plain]
    assert [s.prompt_ids for s in turn] == [s.prompt_ids for s in plain]
    assert {s.mode for s in turn} == {"follow_up"}


def test_long_generation_forces_what_follows(inputs: TaskInputs) -> None:
    for name, length in (("long_generation", 700), ("long_generation_short", 256)):
        for sample in samples_of(name, inputs, 2):
            assert (len(sample.context_ids), len(sample.forced_ids)) == (length, 100)
            assert sample.num_new_tokens == 100
            assert sample.notes["best"] == 1


def test_several_contexts_are_several_tasks(inputs: TaskInputs) -> None:
    names = ["niah_single", "perplexity@512", "long_generation_short"]
    found = find_tasks(names, [512, 1024])
    assert [task.name for task in found] == [
        "niah_single@512", "niah_single@1k", "perplexity@512", "long_generation_short",
    ]  # fmt: skip
    assert [task.context_tokens for task in found] == [512, 1024, 512, None]
    assert "1K" in found[1].title
    for task in found[:2]:
        assert task.context_tokens is not None
        longest = max(sample.num_tokens for sample in task.samples(inputs))
        assert task.context_tokens - 60 < longest <= task.context_tokens + 16
    assert [task.name for task in find_tasks(["niah_single"], [512])] == ["niah_single"]
    with pytest.raises(SettingsError, match="given twice"):
        find_tasks(["niah_single@512", "niah_single@512"])


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("perplexity@0", "at least 256 tokens"),
        ("perplexity@255", "at least 256 tokens"),
        ("perplexity@123456789012", "no number of tokens"),
    ],
)
def test_a_length_in_a_name_is_one_of_prompts(name: str, told: str) -> None:
    with pytest.raises(SettingsError, match=f"task={name}: .*{told}"):
        find_tasks([name])


def test_what_does_not_fit_says_so(inputs: TaskInputs) -> None:
    with pytest.raises(SettingsError, match="raise --context-tokens"):
        samples_of("niah_eight_keys", dataclasses.replace(inputs, context_tokens=150))
    with pytest.raises(SettingsError, match=r"needs \d+ tokens for its facts"):
        samples_of("multi_document_numbers", dataclasses.replace(inputs, context_tokens=300))
    with pytest.raises(SettingsError, match="no text in it"):
        samples_of("niah_eight_keys", dataclasses.replace(inputs, corpus=Corpus({"empty": ""})))
