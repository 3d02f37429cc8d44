# SPDX-License-Identifier: Apache-2.0
"""Tasks from JSONL files that the user has: LongBench, RULER, AIME. Nothing is downloaded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.evaluation.corpus import read_text
from tandemkv.server.evaluation.quality.samples import Sample
from tandemkv.server.evaluation.tokenizing import Prompt

from .base import Task, TaskInputs, question_sample

PROMPTS_FILE = "dataset2prompt.json"
"""LongBench's templates; looked for beside the data, in config/ beside it, and one folder up."""

_LONGBENCH: dict[str, tuple[str, int]] = {
    "narrativeqa": ("qa_f1", 128),
    "qasper": ("qa_f1", 128),
    "multifieldqa_en": ("qa_f1", 64),
    "hotpotqa": ("qa_f1", 32),
    "2wikimqa": ("qa_f1", 32),
    "musique": ("qa_f1", 32),
    "gov_report": ("rouge_l", 512),
    "qmsum": ("rouge_l", 512),
    "multi_news": ("rouge_l", 512),
    "trec": ("class_match", 64),
    "triviaqa": ("first_line_f1", 32),
    "samsum": ("first_line_rouge_l", 128),
    "passage_count": ("number_share", 32),
    "passage_retrieval_en": ("number_share", 32),
    "lcc": ("code_similarity", 64),
    "repobench-p": ("code_similarity", 64),
}
"""Scorer and answer length of each English dataset (LongBench, arXiv:2308.14508)."""

_SUBSETS = ("validation", "test")
"""RULER names its files after these, in a folder of each task's name."""
_RULER_TOKENS = 128
_AIME_TOKENS = 4096
_AIME_PROMPT = (
    "Solve the following problem. Reason step by step and put the final answer, a whole number, "
    "into \\boxed{{}}.\n\n{problem}\n\n"
)


@dataclass(frozen=True, slots=True)
class Record:
    """One line as a question."""

    context: str
    answers: list[str]
    scorer: str
    num_new_tokens: int
    question: str = ""
    answer_prefix: str = ""


def jsonl_task(path: Path) -> Task:
    """Return a task of the first lines of a file in the format of LongBench, RULER or AIME.

    LongBench: ``input``, ``context``, ``answers``, ``dataset``. RULER: ``input``, ``outputs``, and
    ``answer_prefix`` where the prefix is not part of the input. AIME: ``problem`` or ``question``,
    and ``answer``. A prompt that is longer than the context loses its middle, as in LongBench; the
    sample's notes say so. The task has the file's name, or its folder's where the file is named for
    a subset, as RULER's ``qa_1/validation.jsonl`` is. Raises `SettingsError` if the file is
    missing, empty, or in none of these formats.
    """
    lines = _read_lines(path)
    kind = _format_of(path, lines[0])
    read, source = _FORMATS[kind]

    def sample(inputs: TaskInputs, index: int) -> Sample:
        what = f"{path}, line {index + 1}"
        try:
            record = read(path, lines[index])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise SettingsError(
                f"{what}: not in the format of {kind} ({type(error).__name__}: {error})"
            ) from error
        full = inputs.prompts.build(record.context, record.question, record.answer_prefix)
        prompt = _without_middle(full, inputs.context_tokens, what)
        return question_sample(
            inputs, index, prompt, record.answers,
            num_new_tokens=record.num_new_tokens, scorer=record.scorer,
            tokens_cut_out=len(full) - len(prompt),
        )  # fmt: skip

    return Task(
        name="file_" + re.sub(r"\W+", "_", _name_of(path)),
        title=_name_of(path),
        definition=f"{len(lines)} lines of {path.name}, format {kind}.",
        source=source,
        samples=lambda inputs: [
            sample(inputs, i) for i in range(min(inputs.num_samples, len(lines)))
        ],
    )


def _name_of(path: Path) -> str:
    whole = path.resolve() if ".." in path.parts else path.absolute()  # a link has a name, too
    folder = whole.parent.name
    return folder if folder and path.stem in _SUBSETS else path.stem


def _read_lines(path: Path) -> list[dict[str, Any]]:
    texts = read_text(path, "task file").split("\n")  # not at what JSON may have in texts
    found = []
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except ValueError as error:
            raise SettingsError(f"{path}, line {number}: not valid JSON ({error})") from error
        if not isinstance(line, dict):
            raise SettingsError(f"{path}, line {number}: a JSON object is required")
        found.append(line)
    if not found:
        raise SettingsError(f"task file:{path}: there is no line in it")
    return found


def _format_of(path: Path, line: dict[str, Any]) -> str:
    if {"input", "context", "answers"} <= line.keys():
        return "LongBench"
    if {"input", "outputs"} <= line.keys():
        return "RULER"
    if "answer" in line and {"problem", "question", "Problem"} & line.keys():
        return "AIME"
    raise SettingsError(
        f"task file:{path}: fields {', '.join(sorted(line))} are those of no known format; known: "
        "LongBench (input, context, answers), RULER (input, outputs), AIME (problem, answer)"
    )


def _longbench(path: Path, line: dict[str, Any]) -> Record:
    name = str(line.get("dataset") or _name_of(path)).removesuffix("_e")
    if name not in _LONGBENCH:
        raise SettingsError(
            f"{path}: dataset={name} has no scorer here; known: {', '.join(_LONGBENCH)}"
        )
    scorer, num_new_tokens = _LONGBENCH[name]
    template = _longbench_template(path, name)
    before, marker, after = template.partition("{context}")
    if not marker:
        raise SettingsError(f"{path}: the template of {name} has no {{context}}")
    asked = str(line["input"])
    return Record(
        context=before.replace("{input}", asked) + str(line["context"]),
        question=after.replace("{input}", asked),
        answers=_references(line["answers"]),
        scorer=scorer,
        num_new_tokens=num_new_tokens,
    )


def _longbench_template(path: Path, name: str) -> str:
    folders = (path.parent, path.parent / "config", path.parent.parent / "config")
    for folder in folders:
        if (folder / PROMPTS_FILE).is_file():
            templates = json.loads((folder / PROMPTS_FILE).read_text(encoding="utf-8"))
            return str(templates[name])
    raise SettingsError(
        f"{path}: LongBench's {PROMPTS_FILE} is needed beside it or in config/ "
        "(it comes with LongBench's code)"
    )


def _ruler(path: Path, line: dict[str, Any]) -> Record:
    text, prefix = str(line["input"]), str(line.get("answer_prefix") or "")
    # RULER's question is the last line of its input.
    context, newline, question = text.rpartition("\n")
    return Record(
        context=context,
        question=newline + question,
        answer_prefix=prefix,
        answers=_references(line["outputs"]),
        scorer="string_match_part" if "qa" in _name_of(path).lower() else "string_match_all",
        num_new_tokens=_RULER_TOKENS,
    )


def _references(found: Any) -> list[str]:
    if not isinstance(found, list) or not found:  # a text would be taken for a list of letters
        raise ValueError(f"a list of answers is required, not {found!r:.40}")
    return [str(answer) for answer in found]


def _aime(_: Path, line: dict[str, Any]) -> Record:
    problem = next(line[key] for key in ("problem", "question", "Problem") if key in line)
    return Record(
        context=_AIME_PROMPT.format(problem=problem),
        answers=[str(int(str(line["answer"]).strip()))],
        scorer="final_number",
        num_new_tokens=_AIME_TOKENS,
    )


_FORMATS: dict[str, tuple[Callable[[Path, dict[str, Any]], Record], str]] = {
    "LongBench": (_longbench, "LongBench, arXiv:2308.14508"),
    "RULER": (_ruler, "RULER, arXiv:2404.06654"),
    "AIME": (_aime, "American Invitational Mathematics Examination"),
}


def _without_middle(prompt: Prompt, limit: int, what: str) -> Prompt:
    room = limit - len(prompt.question_ids)
    if room < 2:
        raise SettingsError(
            f"{what}: the question alone has {len(prompt.question_ids)} tokens; "
            "raise --context-tokens"
        )
    ids = prompt.context_ids
    if len(ids) <= room:
        return prompt
    half = room // 2
    return Prompt(ids[: room - half] + ids[-half:], prompt.question_ids)
