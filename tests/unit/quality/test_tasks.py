# SPDX-License-Identifier: Apache-2.0
"""Tasks: the same samples every time, within the length, and solvable from the prompt alone."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.evaluation.corpus import Corpus, built_in_corpus, read_corpus
from tandemkv.server.evaluation.quality.samples import (
    Sample,
    read_samples,
    samples_digest,
    write_samples,
)
from tandemkv.server.evaluation.quality.scorers import SCORERS
from tandemkv.server.evaluation.quality.tasks.base import TaskInputs, fitting
from tandemkv.server.evaluation.quality.tasks.registry import TASKS, find_tasks
from tandemkv.server.evaluation.tokenizing import Prompt, PromptBuilder

ASKING = [
    "niah_single",
    "niah_multi_key",
    "niah_multi_value",
    "variable_tracking",
    "multi_document_qa",
]
SHARED = ["niah_eight_keys", "records", "variable_value", "multi_document_numbers"]
FORCING = ["perplexity", "continuation", "mass", "long_generation", "long_generation_short"]


def text_of(inputs: TaskInputs, sample: Sample) -> str:
    return inputs.prompts.tokenizer.decode(sample.context_ids + sample.question_ids)


def test_every_task_is_tested() -> None:
    assert {*ASKING, *SHARED, *FORCING} == set(TASKS)


@pytest.mark.parametrize("name", [*ASKING, *SHARED, *FORCING])
def test_samples_are_the_same_every_time(name: str, inputs: TaskInputs) -> None:
    (task,), (again,) = find_tasks([name]), find_tasks([name])
    first = task.samples(inputs)
    assert first == again.samples(inputs)
    fewer = dataclasses.replace(inputs, num_samples=2)
    assert task.samples(fewer) == first[:2]
    assert len({sample.name for sample in first}) == 4


@pytest.mark.parametrize("name", [*ASKING, *SHARED])
def test_another_seed_asks_something_else(name: str, inputs: TaskInputs) -> None:
    (task,) = find_tasks([name])
    other = task.samples(dataclasses.replace(inputs, seed=1))
    assert [s.answers for s in other] != [s.answers for s in task.samples(inputs)]


@pytest.mark.parametrize("name", ASKING)
def test_prompts_fill_the_context_and_no_more(name: str, inputs: TaskInputs) -> None:
    (task,) = find_tasks([name])
    for sample in task.samples(inputs):
        assert 600 <= len(sample.prompt_ids) <= 700


@pytest.mark.parametrize("name", [*ASKING, *SHARED])
def test_the_right_answer_scores_one_and_another_nothing(name: str, inputs: TaskInputs) -> None:
    (task,) = find_tasks([name])
    samples = task.samples(inputs)
    wrong = {answer for sample in samples for answer in sample.answers}
    for sample in samples:
        score = SCORERS[sample.scorer]
        assert score(" " + ", ".join(sample.answers) + ".", sample.answers) == 1
        assert score(" ".join(wrong - set(sample.answers)), sample.answers) == 0


@pytest.mark.parametrize("name", ["niah_single", "niah_multi_key", "niah_multi_value"])
def test_needles_can_be_found_by_reading(name: str, inputs: TaskInputs) -> None:
    (task,) = find_tasks([name])
    for sample in task.samples(inputs):
        text = text_of(inputs, sample)
        key = re.findall(r"magic numbers? for (\S+) mentioned", text)[-1]
        hidden = re.findall(r"magic numbers for (\S+) is: (\d{7})\.", text)
        assert sorted(v for k, v in hidden if k == key) == sorted(sample.answers)
        assert len(hidden) == (1 if name == "niah_single" else 4)


def test_single_needles_lie_at_their_depth(inputs: TaskInputs) -> None:
    (task,) = find_tasks(["niah_single"])
    for sample in task.samples(dataclasses.replace(inputs, context_tokens=2000)):
        text = text_of(inputs, sample)
        found = text.index(sample.answers[0]) / len(text)
        assert found == pytest.approx(float(sample.notes["depth"]), abs=0.05)


def test_variables_can_be_followed(inputs: TaskInputs) -> None:
    (task,) = find_tasks(["variable_tracking"])
    for sample in task.samples(inputs):
        text = text_of(inputs, sample)
        body = text.rpartition("hidden in the following text.")[2]
        value = re.findall(r"assigned the value (\d+) in the text above", body)[-1]
        names: list[str] = []
        for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", body):
            if source == value or source in names:
                names.append(name)
        assert names == sample.answers
        assert len(names) == 5


def test_documents_hold_the_answers_of_both_kinds(inputs: TaskInputs) -> None:
    (task,) = find_tasks(["multi_document_qa"])
    for i, sample in enumerate(task.samples(inputs)):
        text = text_of(inputs, sample)
        if i % 2 == 0:
            (name,) = re.findall(r"was (.+) born\?", text)
            found = re.findall(rf"{name} was born in \d+ in the city of (\w+)", text)
        else:
            (name,) = re.findall(r"company that employs (.+) have its seat\?", text)
            (firm,) = re.findall(rf"{name} works for (.+?) and spends", text)
            found = re.findall(rf"company {firm} has its seat in the city of (\w+)", text)
        assert found == sample.answers
        assert sample.notes["distractors"] > 5


def test_forced_texts_continue_the_prefix(inputs: TaskInputs, corpus: Corpus) -> None:
    (task,) = find_tasks(["perplexity"])
    samples = task.samples(inputs)
    assert [s.name for s in samples] == ["first", "second", "first, part 2", "second, part 2"]
    for sample in samples:
        assert (len(sample.prompt_ids), len(sample.forced_ids)) == (700, 40)
        text = inputs.prompts.tokenizer.decode(sample.context_ids + sample.forced_ids)
        assert text.strip() in corpus.texts[sample.name.split(",")[0]]


def test_a_late_question_is_not_in_the_prompt(inputs: TaskInputs) -> None:
    early, late = find_tasks(["niah_single", "niah_single+late"])
    for one, other in zip(early.samples(inputs), late.samples(inputs), strict=True):
        assert one.prompt_ids == other.prompt_ids + other.question_ids
        assert (other.late_question, late.name) == (True, "niah_single_late")


def test_a_later_turn_asks_the_same(inputs: TaskInputs) -> None:
    early, turn = find_tasks(["niah_single", "niah_single+turn"])
    for one, other in zip(early.samples(inputs), turn.samples(inputs), strict=True):
        assert other.prompt_ids == one.prompt_ids
        assert (other.mode, turn.name, other.late_question) == (
            "follow_up",
            "niah_single_turn",
            False,
        )
    with pytest.raises(SettingsError, match="not both"):
        find_tasks(["niah_single+turn+late"])
    with pytest.raises(SettingsError, match="asks no question"):
        find_tasks(["perplexity+turn"])[0].samples(inputs)


class CharacterTokenizer:
    """A token a character, as texts without spaces nearly have."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(map(ord, text))

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, ids))


@pytest.mark.parametrize("end", ["。", ""])
def test_needles_are_spread_over_texts_without_spaces(inputs: TaskInputs, end: str) -> None:
    sentences = "".join(chr(0x4E00 + i % 997) * 20 + end for i in range(400))
    own = dataclasses.replace(
        inputs,
        prompts=PromptBuilder(CharacterTokenizer(), "raw"),  # type: ignore[arg-type]
        corpus=Corpus({"text": sentences}),
        context_tokens=4096,
        num_samples=8,
    )
    needles, keys = find_tasks(["niah_single", "niah_eight_keys"])
    if end:
        assert all(len(sample.prompt_ids) > 4000 for sample in needles.samples(own))
    else:  # the text is one sentence, and a prompt without it no haystack
        with pytest.raises(SettingsError, match=r"niah_single: the prompt has .* texts with"):
            needles.samples(own)
    text = own.prompts.tokenizer.decode(keys.samples(own)[0].context_ids)
    places = [found.start() / len(text) for found in re.finditer("One of the special", text)]
    assert len(places) == 8
    assert all(i / 8 - 0.1 < place < (i + 1) / 8 + 0.1 for i, place in enumerate(places))


def test_chat_puts_the_question_into_the_turn_and_the_prefix_after_it(inputs: TaskInputs) -> None:
    prompts = PromptBuilder(inputs.prompts.tokenizer, "chat")
    (task,) = find_tasks(["niah_single"])
    (sample, *_) = task.samples(dataclasses.replace(inputs, prompts=prompts))
    text = text_of(inputs, sample)
    assert text.startswith("<user>A special magic number")
    assert re.search(r"provided text\?</user><assistant> The special magic number for \S+", text)


def test_chat_takes_templates_that_strip_what_is_said(
    inputs: TaskInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of Llama 3 and Gemma do."""
    tokenizer = inputs.prompts.tokenizer
    monkeypatch.setattr(
        type(tokenizer),
        "apply_chat_template",
        lambda _, messages, **__: f"<user>{messages[0]['content'].strip()}</user><assistant>",
    )
    context, question = PromptBuilder(tokenizer, "chat").build("A text.", " A question?", " It is")
    assert tokenizer.decode(context) == "<user>A text."
    assert tokenizer.decode(question) == " A question?</user><assistant> It is"


def test_chat_refuses_a_template_that_leaves_out_what_is_said(
    inputs: TaskInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = inputs.prompts.tokenizer
    monkeypatch.setattr(type(tokenizer), "apply_chat_template", lambda *_, **__: "<assistant>")
    with pytest.raises(SettingsError, match="leaves out or changes what a user says"):
        PromptBuilder(tokenizer, "chat")


def test_errors_say_what_is_missing(inputs: TaskInputs, tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"task=no_such_task is unknown; known: perplexity, .*file:"
    ):
        find_tasks(["no_such_task"])
    with pytest.raises(SettingsError, match="given twice"):
        find_tasks(["mass", "mass"])
    with pytest.raises(SettingsError, match="none given"):
        find_tasks([])
    (late,) = find_tasks(["perplexity+late"])
    with pytest.raises(SettingsError, match="asks no question"):
        late.samples(inputs)
    (task,) = find_tasks(["perplexity"])
    with pytest.raises(SettingsError, match=r"longest text has \d+ tokens"):
        task.samples(dataclasses.replace(inputs, context_tokens=10**6))
    (task,) = find_tasks(["niah_single"])
    with pytest.raises(SettingsError, match="raise --context-tokens"):
        task.samples(dataclasses.replace(inputs, context_tokens=30))
    with pytest.raises(SettingsError, match="no sentence"):
        task.samples(dataclasses.replace(inputs, corpus=Corpus({"empty": "  "})))
    (tmp_path / "empty").mkdir()
    with pytest.raises(SettingsError, match="no text there"):
        read_corpus([tmp_path / "empty"])


def test_a_corpus_of_files_folders_and_json(tmp_path: Path) -> None:
    (tmp_path / "texts" / "sub").mkdir(parents=True)
    (tmp_path / "texts" / "b.txt").write_text("two")
    (tmp_path / "texts" / "sub" / "a.md").write_text("one")
    (tmp_path / "texts" / "picture.png").write_bytes(b"\xff\x00")
    (tmp_path / "more.json").write_text('{"three": "3"}')
    found = read_corpus([tmp_path / "texts", tmp_path / "more.json"])
    assert found.texts == {"b.txt": "two", "sub/a.md": "one", "three": "3"}
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="not UTF-8"):
        read_corpus([tmp_path / "bad.txt"])
    package = read_corpus([Path("package:pytest")])
    assert list(package.texts) == ["package:pytest"]
    assert "unit and functional testing" in package.texts["package:pytest"]
    with pytest.raises(SettingsError, match="no such package is installed"):
        read_corpus([Path("package:no_such_package")])
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(SettingsError, match="object of name to text"):
        read_corpus([tmp_path / "list.json"])


def test_the_built_in_corpus_is_long_and_stable() -> None:
    first, second = built_in_corpus(), built_in_corpus()
    assert first == second
    assert max(map(len, first.texts.values())) > 100_000
    assert len(first.texts) + len(first.absent) == 5


def test_samples_survive_their_file(inputs: TaskInputs, tmp_path: Path) -> None:
    (task,) = find_tasks(["niah_multi_value+late"])
    samples = task.samples(inputs)
    write_samples(tmp_path / "s" / "x.jsonl", samples)
    assert read_samples(tmp_path / "s" / "x.jsonl") == samples
    assert samples_digest(read_samples(tmp_path / "s" / "x.jsonl")) == samples_digest(samples)
    assert samples_digest(samples[1:]) != samples_digest(samples)
    (tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(SettingsError, match="not a file of samples"):
        read_samples(tmp_path / "bad.jsonl")


def test_samples_that_cannot_be_written_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"cannot be written \(.*\); name another folder with"):
        write_samples(tmp_path / "file" / "x.jsonl", [])


@pytest.mark.parametrize("sizes", [(1,), (3, 40, 1, 1, 25), (7,) * 50, (40, 1)])
@pytest.mark.parametrize("limit", [5, 6, 100, 1000, 5003])
def test_the_longest_prompt_that_fits_is_found_in_few_steps(
    sizes: tuple[int, ...], limit: int
) -> None:
    """Whatever the sizes say; well if they are right."""
    lengths = [3, 40, 1, 1, 25]
    built: list[int] = []

    def build(count: int) -> Prompt:
        built.append(count)
        return Prompt([0] * (5 + sum(lengths[i % 5] for i in range(count))), [])

    prompt, count = fitting(build, limit, what="x", sizes=sizes)
    assert len(prompt) <= limit < len(build(count + 1))
    assert len(prompt) == len(build(count))
    assert len(built) <= 2 + (8 if len(sizes) == 5 else 40)
    assert len(set(built)) >= len(built) - 2
