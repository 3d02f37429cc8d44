# SPDX-License-Identifier: Apache-2.0
"""Find a task by its name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.quality.samples import Sample

from .base import Task, TaskInputs
from .continuation import Continuation
from .jsonl_file import JsonlFile
from .mass import Mass
from .multi_document_qa import MultiDocumentQa
from .niah_multi_key import NiahMultiKey
from .niah_multi_value import NiahMultiValue
from .niah_single import NiahSingle
from .perplexity import Perplexity
from .variable_tracking import VariableTracking

TASKS: dict[str, type[Task]] = {
    "perplexity": Perplexity,
    "continuation": Continuation,
    "mass": Mass,
    "niah_single": NiahSingle,
    "niah_multi_key": NiahMultiKey,
    "niah_multi_value": NiahMultiValue,
    "variable_tracking": VariableTracking,
    "multi_document_qa": MultiDocumentQa,
}
FILE_PREFIX = "file:"
LATE_SUFFIX = "+late"
TURN_SUFFIX = "+turn"


class LateQuestion(Task):
    """A task whose question is decoded after the context instead of prefilled with it."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.name = f"{task.name}_late"
        self.title = f"{task.title}, late question"
        self.definition = (
            f"{task.definition} The question is decoded token by token after the context: what is "
            "resident when it begins was chosen without seeing it."
        )
        self.source = task.source

    def samples(self, inputs: TaskInputs) -> list[Sample]:
        """See `Task.samples`."""
        found = _with_questions(self._task, inputs, LATE_SUFFIX)
        return [msgspec.structs.replace(s, late_question=True) for s in found]


class LaterTurn(Task):
    """A task whose question is that of a later turn: the context was served before, alone."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.name = f"{task.name}_turn"
        self.title = f"{task.title}, later turn"
        self.definition = (
            f"{task.definition} The context is sent alone first, and one token decoded; the "
            "question comes with the context repeated in a second request, of which what is cached "
            "is not computed again."
        )
        self.source = task.source

    def samples(self, inputs: TaskInputs) -> list[Sample]:
        """See `Task.samples`."""
        found = _with_questions(self._task, inputs, TURN_SUFFIX)
        return [msgspec.structs.replace(s, mode="follow_up") for s in found]


def _with_questions(task: Task, inputs: TaskInputs, suffix: str) -> list[Sample]:
    found = task.samples(inputs)
    if not all(s.mode == "generate" and s.question_ids for s in found):
        raise SettingsError(
            f"task={task.name}{suffix}: {task.name} asks no question; only tasks that do can have "
            "it after the context"
        )
    return found


def find_tasks(names: Sequence[str]) -> list[Task]:
    """Return the tasks of these names.

    Parameters
    ----------
    names : sequence of str
        Keys of `TASKS`, or ``file:PATH``; with ``+late`` appended the question comes late, with
        ``+turn`` in a later request.

    Raises
    ------
    SettingsError
        If there is no such task, or a name comes twice.
    """
    found: list[Task] = []
    for name in names:
        base = name.removesuffix(LATE_SUFFIX).removesuffix(TURN_SUFFIX)
        task: Task
        if base.startswith(FILE_PREFIX):
            task = JsonlFile(Path(base.removeprefix(FILE_PREFIX)).expanduser())
        elif base in TASKS:
            task = TASKS[base]()
        else:
            raise SettingsError(
                f"task={base} is unknown; known: {', '.join(TASKS)}, or {FILE_PREFIX}PATH of a "
                f"JSONL file; {LATE_SUFFIX} at the end makes the question come late, {TURN_SUFFIX} "
                "in a later request"
            )
        if name == base + LATE_SUFFIX:
            task = LateQuestion(task)
        elif name == base + TURN_SUFFIX:
            task = LaterTurn(task)
        elif name != base:
            raise SettingsError(f"task={name}: a question is late or in a later turn, not both")
        if task.name in {other.name for other in found}:
            raise SettingsError(f"task={name} is given twice")
        found.append(task)
    if not found:
        raise SettingsError(f"tasks: none given; known: {', '.join(TASKS)}")
    return found
