# SPDX-License-Identifier: Apache-2.0
"""Prompts that another folder of ``tandemkv quality`` holds, instead of making them again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tandemkv.cache_rank.protocol.errors import SettingsError

from .samples import Sample, read_samples, samples_digest


@dataclass(frozen=True, slots=True)
class KeptSamples:
    """A folder with ``campaign.json`` and ``samples/``.

    Attributes
    ----------
    folder : Path
        Where it is.
    model : str
        Name of the model whose tokenizer made the prompts.
    corpus : dict
        ``corpus`` and ``corpus_absent`` of the report.
    described : dict
        What the report says of each task.
    """

    folder: Path
    model: str
    corpus: dict[str, Any]
    described: dict[str, Any]

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Read ``campaign.json``.

        Raises
        ------
        SettingsError
            If it is not there or not of this form.
        """
        path = folder / "campaign.json"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            corpus = {key: found[key] for key in ("corpus", "corpus_absent")}
            return cls(folder, str(found["model"]), corpus, dict(found["tasks"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SettingsError(
                f"samples_from={folder}: {path.name} cannot be read ({error}); give the --out of "
                "an earlier `tandemkv quality`, or of one with --samples-only"
            ) from error

    def check_model(self, name: str) -> None:
        """Refuse another model than the one whose tokens these are.

        Raises
        ------
        SettingsError
            If it is another.
        """
        if name != self.model:
            raise SettingsError(
                f"samples_from={self.folder}: the prompts there are tokens of {self.model}, not "
                f"of {name}; leave --samples-from out"
            )

    def samples_of(self, task: str) -> list[Sample]:
        """Return the prompts of a task.

        Raises
        ------
        SettingsError
            If there are none, or they are not those that ``campaign.json`` describes.
        """
        if task not in self.described:
            raise SettingsError(
                f"samples_from={self.folder}: nothing of task={task} there, only "
                f"{', '.join(sorted(self.described))}"
            )
        samples = read_samples(self.folder / "samples" / f"{task}.jsonl")
        if samples_digest(samples) != self.described[task].get("samples_digest"):
            raise SettingsError(
                f"samples_from={self.folder}: samples/{task}.jsonl was changed after "
                "campaign.json was written; make them anew with --samples-only"
            )
        return samples
