# SPDX-License-Identifier: Apache-2.0
"""Find a task by its name."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.settings.token_count import read_token_count
from tandemkv.server.evaluation.quality.samples import Sample

from .base import Task, TaskInputs
from .forced_text import Continuation, LongGeneration, Mass, Perplexity
from .jsonl_file import JsonlFile
from .multi_document_qa import MultiDocumentQa
from .needles import NEEDLE_TASKS
from .numbers import NUMBER_TASKS
from .variable_tracking import VariableTracking

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        *(Perplexity(), Continuation(), Mass(), *NEEDLE_TASKS),
        *(VariableTracking(), MultiDocumentQa(), *NUMBER_TASKS),
        *(LongGeneration(is_short=False), LongGeneration(is_short=True)),
    )
}
FILE_PREFIX = "file:"
LATE_SUFFIX = "+late"
TURN_SUFFIX = "+turn"
_AT_CONTEXT = re.compile(r"(.+)@(\d+[km]?)", re.IGNORECASE)


class QuestionApart(Task):
    """A task whose question is not prefilled with the context.

    With `LATE_SUFFIX` the question is decoded after the context. With `TURN_SUFFIX` it comes in a
    second request, that of a later turn; the context was served before, alone.
    """

    def __init__(self, task: Task, suffix: str) -> None:
        self._task, self._suffix = task, suffix
        self.name = f"{task.name}_{suffix[1:]}"
        self.source = task.source
        if suffix == LATE_SUFFIX:
            self.title = f"{task.title}, late question"
            how = (
                "The question is decoded token by token after the context: what is resident when "
                "it begins was chosen without seeing it."
            )
        else:
            self.title = f"{task.title}, later turn"
            how = (
                "The context is sent alone first, and one token decoded; the question comes with "
                "the context repeated in a second request, of which what is cached is not "
                "computed again."
            )
        self.definition = f"{task.definition} {how}"

    def samples(self, inputs: TaskInputs) -> list[Sample]:
        """See `Task.samples`."""
        found, name = _samples(self._task, inputs), self._task.name
        if not all(s.mode == "generate" and s.question_ids for s in found):
            raise SettingsError(
                f"task={name}{self._suffix}: {name} asks no question; only tasks that do can have "
                "it after the context"
            )
        if self._suffix == LATE_SUFFIX:
            return [msgspec.structs.replace(s, late_question=True) for s in found]
        return [msgspec.structs.replace(s, mode="follow_up") for s in found]


class AtContext(Task):
    """A task at one of several context lengths, which is a part of its name."""

    def __init__(self, task: Task, tokens: int) -> None:
        short = f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)
        self._task, self._tokens = task, tokens
        self.name = f"{task.name}@{short}"
        self.title = f"{task.title}, {short.upper()}"
        self.definition, self.source = task.definition, task.source
        self.measure, self.context_tokens = task.measure, tokens  # type: ignore[misc]

    def samples(self, inputs: TaskInputs) -> list[Sample]:
        """See `Task.samples`."""
        return _samples(self._task, dataclasses.replace(inputs, context_tokens=self._tokens))


def _samples(task: Task, inputs: TaskInputs) -> list[Sample]:
    """Return a task's samples; those of the last few are kept, for its forms ask the same."""
    for known, known_inputs, found in _LAST:
        if known is task and known_inputs == inputs:
            return found
    found = task.samples(inputs)
    _LAST.appendleft((task, inputs, found))
    return found


_LAST: collections.deque[tuple[Task, TaskInputs, list[Sample]]] = collections.deque(maxlen=8)


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
        lengths = [int(read_token_count(match[2]))] if match else list(contexts)
        if match is None and (len(lengths) < 2 or task.name in _ONE_LENGTH):
            found.append(task)
        else:
            found += [AtContext(task, tokens) for tokens in lengths]
    known = [task.name for task in found]
    twice = next((name for name in known if known.count(name) > 1), None)
    if twice is not None:
        raise SettingsError(f"task={twice} is given twice")
    if not found:
        raise SettingsError(f"tasks: none given; known: {', '.join(TASKS)}")
    return found


def _find_task(name: str) -> Task:
    base = name.removesuffix(LATE_SUFFIX).removesuffix(TURN_SUFFIX)
    task: Task
    if base.startswith(FILE_PREFIX):
        task = JsonlFile(Path(base.removeprefix(FILE_PREFIX)).expanduser())
    elif base in TASKS:
        task = TASKS[base]
    else:
        raise SettingsError(
            f"task={base} is unknown; known: {', '.join(TASKS)}, or {FILE_PREFIX}PATH of a "
            f"JSONL file; {LATE_SUFFIX} at the end makes the question come late, {TURN_SUFFIX} "
            "in a later request, @8k sets the context"
        )
    if name == base + LATE_SUFFIX:
        return QuestionApart(task, LATE_SUFFIX)
    if name == base + TURN_SUFFIX:
        return QuestionApart(task, TURN_SUFFIX)
    if name != base:
        raise SettingsError(f"task={name}: a question is late or in a later turn, not both")
    return task


_ONE_LENGTH = {"long_generation_short"}
