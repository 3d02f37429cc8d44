# SPDX-License-Identifier: Apache-2.0
"""Find a task by its name."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.evaluation.quality.request import read_context
from tandemkv.server.evaluation.quality.samples import Sample

from .base import Task, TaskInputs
from .forced_text import FORCED_TASKS, LONG_TASKS
from .jsonl_file import jsonl_task
from .multi_document_qa import MULTI_DOCUMENT_QA
from .needles import NEEDLE_TASKS, VARIABLE_TRACKING
from .numbers import NUMBER_TASKS

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        *FORCED_TASKS, *NEEDLE_TASKS, VARIABLE_TRACKING, MULTI_DOCUMENT_QA, *NUMBER_TASKS,
        *LONG_TASKS,
    )
}  # fmt: skip
FILE_PREFIX = "file:"
LATE_SUFFIX = "+late"
TURN_SUFFIX = "+turn"
_AT_CONTEXT = re.compile(r"(.+)@(\d+[km]?)", re.IGNORECASE)


_APART: dict[str, tuple[str, str, dict[str, Any]]] = {
    LATE_SUFFIX: (
        "late question",
        "The question is decoded token by token after the context: what is resident when it begins "
        "was chosen without seeing it.",
        {"late_question": True},
    ),
    TURN_SUFFIX: (
        "later turn",
        "The context is sent alone first, and one token decoded; the question comes with the "
        "context repeated in a second request, of which what is cached is not computed again.",
        {"mode": "follow_up"},
    ),
}
"""Of each suffix: what it adds to title and definition, and what is other about a sample."""


def _question_apart(task: Task, suffix: str) -> Task:
    """Return a task whose question is not prefilled with the context.

    With `LATE_SUFFIX` the question is decoded after the context. With `TURN_SUFFIX` it comes in a
    second request, that of a later turn; the context was served before, alone.
    """
    title, how, other = _APART[suffix]

    def samples(inputs: TaskInputs) -> list[Sample]:
        found = _samples(task, inputs)
        if not all(s.mode == "generate" and s.question_ids for s in found):
            raise SettingsError(
                f"task={task.name}{suffix}: {task.name} asks no question; only tasks that do can "
                "have it after the context"
            )
        return [msgspec.structs.replace(sample, **other) for sample in found]

    return Task(
        name=f"{task.name}_{suffix[1:]}",
        title=f"{task.title}, {title}",
        definition=f"{task.definition} {how}",
        source=task.source,
        samples=samples,
    )


def _at_context(task: Task, tokens: int) -> Task:
    """Return a task at one of several context lengths, which is a part of its name."""
    short = f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)
    return dataclasses.replace(
        task,
        name=f"{task.name}@{short}",
        title=f"{task.title}, {short.upper()}",
        context_tokens=tokens,
        samples=lambda inputs: _samples(task, dataclasses.replace(inputs, context_tokens=tokens)),
    )


@functools.lru_cache(maxsize=8)
def _samples(task: Task, inputs: TaskInputs) -> list[Sample]:
    """Return a task's samples; those of the last few are kept, for its forms ask the same."""
    return task.samples(inputs)


def find_tasks(names: Sequence[str], contexts: Sequence[int] = ()) -> list[Task]:
    """Return the tasks of these names.

    `names` are keys of `TASKS`, or ``file:PATH``; with ``+late`` appended the question comes late,
    with ``+turn`` in a later request; with ``@8k`` the prompts have that length. Of several
    `contexts` every task without one of its own comes at each. Raises `SettingsError` if there is
    no such task, or a name comes twice.
    """
    found: list[Task] = []
    for name in names:
        match = _AT_CONTEXT.fullmatch(name)
        task = _find_task(match[1] if match else name)
        lengths = [read_context(match[2], f"task={name}")] if match else list(contexts)
        if match is None and (len(lengths) < 2 or task.name in _ONE_LENGTH):
            found.append(task)
        else:
            found += [_at_context(task, tokens) for tokens in lengths]
    known = [task.name for task in found]
    twice = next((name for name in known if known.count(name) > 1), None)
    if twice is not None:
        raise SettingsError(f"task={twice} is given twice")
    if not found:
        raise SettingsError(f"tasks: none given; known: {', '.join(TASKS)}")
    return found


def _find_task(name: str) -> Task:
    base = name.removesuffix(LATE_SUFFIX).removesuffix(TURN_SUFFIX)
    if base.startswith(FILE_PREFIX):
        task = jsonl_task(Path(base.removeprefix(FILE_PREFIX)).expanduser())
    elif base in TASKS:
        task = TASKS[base]
    else:
        raise SettingsError(
            f"task={base} is unknown; known: {', '.join(TASKS)}, or {FILE_PREFIX}PATH of a "
            f"JSONL file; {LATE_SUFFIX} at the end makes the question come late, {TURN_SUFFIX} "
            "in a later request, @8k sets the context"
        )
    suffix = name.removeprefix(base)
    if suffix and suffix not in _APART:
        raise SettingsError(f"task={name}: a question is late or in a later turn, not both")
    return _question_apart(task, suffix) if suffix else task


_ONE_LENGTH = {"long_generation_short"}
