# SPDX-License-Identifier: Apache-2.0
"""Files in the formats of LongBench, RULER and AIME."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.evaluation.quality.samples import Sample
from tandemkv.server.evaluation.quality.scorers import SCORERS
from tandemkv.server.evaluation.quality.tasks.base import TaskInputs
from tandemkv.server.evaluation.quality.tasks.registry import find_tasks

RULER = {
    "index": 0,
    "input": "Memorize it.\nOne of them for x is: 12.\nWhat is it for x?",
    "outputs": ["12", "13"],
    "answer_prefix": " It is",
}
LONGBENCH = {
    "input": "Who?",
    "context": "Ada did it.",
    "answers": ["Ada", "Ada L."],
    "dataset": "hotpotqa",
}
AIME = {"problem": "What is 40 + 2?", "answer": "042"}
TEMPLATE = {"hotpotqa": "Read:\n{context}\nNow answer.\nQuestion: {input}\nAnswer:"}


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def load(path: Path, inputs: TaskInputs) -> list[Sample]:
    (task,) = find_tasks([f"file:{path}"])
    return task.samples(inputs)


def parts(inputs: TaskInputs, sample: Sample) -> tuple[str, str]:
    decode = inputs.prompts.tokenizer.decode
    return decode(sample.context_ids), decode(sample.question_ids)


def test_ruler(tmp_path: Path, inputs: TaskInputs) -> None:
    (sample,) = load(write(tmp_path / "niah.jsonl", RULER), inputs)
    assert parts(inputs, sample) == (
        "Memorize it.\nOne of them for x is: 12.",
        "\nWhat is it for x? It is",
    )
    assert (sample.answers, sample.scorer) == (["12", "13"], "string_match_all")
    assert SCORERS[sample.scorer]("12", sample.answers) == 0.5
    (sample,) = load(write(tmp_path / "qa_1.jsonl", RULER), inputs)
    assert SCORERS[sample.scorer]("12", sample.answers) == 1


def test_files_of_ruler_are_named_after_their_folders(tmp_path: Path, inputs: TaskInputs) -> None:
    files = [write(tmp_path / f"{name}/validation.jsonl", RULER) for name in ("qa_1", "vt")]
    files[0] = tmp_path / "vt/../qa_1/../qa_1/validation.jsonl"
    tasks = find_tasks([f"file:{path}" for path in files])
    assert [task.name for task in tasks] == ["file_qa_1", "file_vt"]
    assert [task.samples(inputs)[0].scorer for task in tasks] == [
        "string_match_part",
        "string_match_all",
    ]


def test_longbench_with_its_templates(tmp_path: Path, inputs: TaskInputs) -> None:
    path = write(tmp_path / "data" / "hotpotqa_e.jsonl", LONGBENCH, LONGBENCH)
    with pytest.raises(SettingsError, match=r"dataset2prompt\.json is needed"):
        load(path, inputs)
    write(tmp_path / "config" / "dataset2prompt.json", TEMPLATE)
    first, second = load(path, inputs)
    assert parts(inputs, first) == (
        "Read:\nAda did it.",
        "\nNow answer.\nQuestion: Who?\nAnswer:",
    )
    assert (first.num_new_tokens, first.scorer) == (32, "qa_f1")
    assert (first.name, second.name) == ("0", "1")


def test_aime(tmp_path: Path, inputs: TaskInputs) -> None:
    (sample,) = load(write(tmp_path / "aime.jsonl", AIME), inputs)
    assert "What is 40 + 2?" in parts(inputs, sample)[0]
    assert "\\boxed{}" in parts(inputs, sample)[0]
    assert sample.num_new_tokens == 4096
    assert SCORERS[sample.scorer]("thus \\boxed{42}", sample.answers) == 1
    shorter = dataclasses.replace(inputs, max_new_tokens=9)
    assert load(tmp_path / "aime.jsonl", shorter)[0].num_new_tokens == 9


def test_a_long_prompt_loses_its_middle(tmp_path: Path, inputs: TaskInputs) -> None:
    words = " ".join(f"w{i}" for i in range(2000))
    path = write(tmp_path / "long.jsonl", RULER | {"input": f"start {words} end\nWhat?"})
    (sample,) = load(path, inputs)
    assert len(sample.prompt_ids) == 700
    assert sample.notes["tokens_cut_out"] == 2002 + len(sample.question_ids) - 700
    context, question = parts(inputs, sample)
    assert context.startswith("start w0 ")
    assert context.endswith(" w1999 end")
    assert question == "\nWhat? It is"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no line in it"),
        ("{", "line 1: not valid JSON"),
        ("[1]", "line 1: a JSON object is required"),
        ('{"a": 1}', "fields a are those of no known format"),
        ('{"input": "x", "outputs": ["1"]}\n{"input": "x"}', "line 2: not in the format of RULER"),
        ('{"problem": "x", "answer": "y"}', "line 1: not in the format of AIME"),
        ('{"input": "x", "context": "", "answers": [], "dataset": "new"}', "dataset=new has no"),
        ('{"input": "x", "outputs": []}', r"line 1: .* a list of answers is required, not \[\]"),
        ('{"input": "x", "outputs": "123"}', "line 1: .* a list of answers is required, not '123'"),
    ],
)
def test_errors_name_file_and_line(
    text: str, message: str, tmp_path: Path, inputs: TaskInputs
) -> None:
    (tmp_path / "f.jsonl").write_text(text)
    with pytest.raises(SettingsError, match=message):
        load(tmp_path / "f.jsonl", inputs)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        find_tasks([f"file:{tmp_path}/none.jsonl"])


def test_a_file_that_is_no_text_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "packed.jsonl"
    path.write_bytes(b"\x1f\x8b\x08\x00")
    with pytest.raises(SettingsError, match=r"not UTF-8 text .*; convert it, and unpack"):
        find_tasks([f"file:{path}"])
