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
        found = self._task.samples(inputs)
        if not all(s.mode == "generate" and s.question_ids for s in found):
            raise SettingsError(
                f"task={self._task.name}{LATE_SUFFIX}: {self._task.name} asks no question; only "
                "tasks that do can have it late"
            )
        return [msgspec.structs.replace(s, late_question=True) for s in found]


def find_tasks(names: Sequence[str]) -> list[Task]:
    """Return the tasks of these names.

    Parameters
    ----------
    names : sequence of str
        Keys of `TASKS`, or ``file:PATH``; with ``+late`` appended the question comes late.

    Raises
    ------
    SettingsError
        If there is no such task, or a name comes twice.
    """
    found: list[Task] = []
    for name in names:
        base = name.removesuffix(LATE_SUFFIX)
        task: Task
        if base.startswith(FILE_PREFIX):
            task = JsonlFile(Path(base.removeprefix(FILE_PREFIX)).expanduser())
        elif base in TASKS:
            task = TASKS[base]()
        else:
            raise SettingsError(
                f"task={base} is unknown; known: {', '.join(TASKS)}, or {FILE_PREFIX}PATH of a "
                f"JSONL file; {LATE_SUFFIX} at the end makes the question come late"
            )
        if base != name:
            task = LateQuestion(task)
        if task.name in {other.name for other in found}:
            raise SettingsError(f"task={name} is given twice")
        found.append(task)
    if not found:
        raise SettingsError(f"tasks: none given; known: {', '.join(TASKS)}")
    return found
