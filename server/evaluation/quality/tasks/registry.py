# SPDX-License-Identifier: Apache-2.0
"""Find a task by its name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.evaluation.quality.samples import Sample

from .base import Task, TaskInputs
from .forced_text import Continuation, Mass, Perplexity
from .jsonl_file import JsonlFile
from .multi_document_qa import MultiDocumentQa
from .needles import NEEDLE_TASKS
from .variable_tracking import VariableTracking

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        *(Perplexity(), Continuation(), Mass(), *NEEDLE_TASKS),
        *(VariableTracking(), MultiDocumentQa()),
    )
}
FILE_PREFIX = "file:"
LATE_SUFFIX = "+late"
TURN_SUFFIX = "+turn"


class QuestionApart(Task):
    """A task whose question is not prefilled with the context.

    Parameters
    ----------
    task : Task
        The task.
    suffix : str
        `LATE_SUFFIX`: the question is decoded after the context. `TURN_SUFFIX`: it comes in a
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
        found, name = self._task.samples(inputs), self._task.name
        if not all(s.mode == "generate" and s.question_ids for s in found):
            raise SettingsError(
                f"task={name}{self._suffix}: {name} asks no question; only tasks that do can have "
                "it after the context"
            )
        if self._suffix == LATE_SUFFIX:
            return [msgspec.structs.replace(s, late_question=True) for s in found]
        return [msgspec.structs.replace(s, mode="follow_up") for s in found]


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
            task = TASKS[base]
        else:
            raise SettingsError(
                f"task={base} is unknown; known: {', '.join(TASKS)}, or {FILE_PREFIX}PATH of a "
                f"JSONL file; {LATE_SUFFIX} at the end makes the question come late, {TURN_SUFFIX} "
                "in a later request"
            )
        if name == base + LATE_SUFFIX:
            task = QuestionApart(task, LATE_SUFFIX)
        elif name == base + TURN_SUFFIX:
            task = QuestionApart(task, TURN_SUFFIX)
        elif name != base:
            raise SettingsError(f"task={name}: a question is late or in a later turn, not both")
        if task.name in {other.name for other in found}:
            raise SettingsError(f"task={name} is given twice")
        found.append(task)
    if not found:
        raise SettingsError(f"tasks: none given; known: {', '.join(TASKS)}")
    return found
