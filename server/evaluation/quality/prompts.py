# SPDX-License-Identifier: Apache-2.0
"""The prompts of a campaign: made from texts, or those that another folder holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypedDict

import msgspec

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.evaluation.corpus import Corpus
from tandemkv.server.evaluation.tokenizing import PromptBuilder, Tokenizer

from .request import Request
from .samples import Sample, read_samples, samples_digest
from .tasks.base import Task, TaskInputs


class TaskDescription(TypedDict):
    """What the report says of a task, and what configurations are made from."""

    title: str
    definition: str
    source: str
    measure: str
    samples: int
    samples_digest: str
    context_tokens: int
    forced_tokens: int
    seed: int
    prompt_style: str
    longest_tokens: int


@dataclass(frozen=True, slots=True)
class Prompts:
    """Samples by task, and what the report says of them."""

    samples: Mapping[str, Sequence[Sample]]
    tasks: dict[str, TaskDescription]
    corpus: dict[str, Any]
    """``corpus`` and ``corpus_absent``: texts with hashes, built-in texts that are missing."""

    @classmethod
    def make(
        cls,
        request: Request,
        tasks: Sequence[Task],
        tokenizer: Tokenizer,
        corpus: Corpus,
        note: Callable[[str], None],
    ) -> Self:
        """Make them from `corpus`.

        Raises `SettingsError` if the corpus or the length does not allow it.
        """
        inputs = TaskInputs(
            prompts=PromptBuilder(tokenizer, request.prompt_style),
            corpus=corpus,
            context_tokens=request.contexts[0],
            num_samples=request.samples,
            num_forced_tokens=request.forced_tokens,
            num_long_tokens=request.long_tokens,
            seed=request.seed,
            max_new_tokens=request.max_new_tokens,
        )
        samples, described = {}, {}
        for task in tasks:
            note(f"samples of {task.name}")
            samples[task.name] = found = task.samples(inputs)
            described[task.name] = describe_task(request, task, found)
        about = {"corpus": corpus.describe(), "corpus_absent": list(corpus.absent)}
        return cls(samples, described, about)

    @classmethod
    def kept(cls, folder: Path, tasks: Sequence[str], model: str) -> Self:
        """Read them from a folder with ``campaign.json`` and ``samples/``.

        `folder` is the ``--out`` of an earlier campaign, whose prompts must be tokens of the
        `model` that is measured. Raises `SettingsError` if a file is missing, incomplete, was
        changed, or is of another model.
        """
        path = folder / "campaign.json"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            corpus = {key: found[key] for key in ("corpus", "corpus_absent")}
            made_for, described = str(found["model"]), dict(found["tasks"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SettingsError(
                f"samples_from={folder}: {path.name} cannot be read ({error}); give the --out of "
                "an earlier `tandemkv quality`, or of one with --samples-only"
            ) from error
        if model != made_for:
            raise SettingsError(
                f"samples_from={folder}: the prompts there are tokens of {made_for}, not of "
                f"{model}; leave --samples-from out"
            )
        about = {name: _kept_description(folder, name, described) for name in tasks}
        samples = {name: _kept_samples(folder, name, about[name]) for name in tasks}
        return cls(samples, about, corpus)

    @property
    def longest(self) -> int:
        """Tokens of the longest request at its end."""
        return max(sample.num_tokens for found in self.samples.values() for sample in found)


def describe_task(request: Request, task: Task, samples: Sequence[Sample]) -> TaskDescription:
    """Return what the report says of a task whose samples were made for `request`."""
    return {
        "title": task.title,
        "definition": task.definition,
        "source": task.source,
        "measure": task.measure,
        "samples": len(samples),
        "samples_digest": samples_digest(samples),
        "context_tokens": task.context_tokens or request.contexts[0],
        "forced_tokens": request.long_tokens if task.measure == "long" else request.forced_tokens,
        "seed": request.seed,
        "prompt_style": request.prompt_style,
        "longest_tokens": max(sample.num_tokens for sample in samples),
    }


def _kept_description(folder: Path, task: str, described: Mapping[str, Any]) -> TaskDescription:
    if task not in described:
        raise SettingsError(
            f"samples_from={folder}: nothing of task={task} there, only "
            f"{', '.join(sorted(described))}"
        )
    try:
        return msgspec.convert(described[task], TaskDescription)
    except msgspec.ValidationError as error:
        raise SettingsError(
            f"samples_from={folder}: campaign.json does not say all of task={task} ({error}); make "
            "them anew with --samples-only"
        ) from error


def _kept_samples(folder: Path, task: str, about: TaskDescription) -> list[Sample]:
    samples = read_samples(folder / "samples" / f"{task}.jsonl")
    if samples_digest(samples) != about["samples_digest"]:
        raise SettingsError(
            f"samples_from={folder}: samples/{task}.jsonl was changed after campaign.json was "
            "written; make them anew with --samples-only"
        )
    return samples
