# SPDX-License-Identifier: Apache-2.0
"""Prompts of another folder: the same ones, or a refusal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.evaluation.quality.prompts import Prompts
from tandemkv.server.evaluation.quality.samples import samples_digest, write_samples
from tandemkv.server.evaluation.quality.tasks.base import TaskInputs
from tandemkv.server.evaluation.quality.tasks.registry import find_tasks


@pytest.fixture
def folder(tmp_path: Path, inputs: TaskInputs) -> Path:
    (task,) = find_tasks(["niah_single"])
    samples = task.samples(inputs)
    write_samples(tmp_path / "samples" / "niah_single.jsonl", samples)
    described = {
        "model": "m",
        "corpus": [{"name": "first"}],
        "corpus_absent": [],
        "tasks": {"niah_single": {"samples_digest": samples_digest(samples)}},
    }
    (tmp_path / "campaign.json").write_text(json.dumps(described))
    return tmp_path


def test_the_same_samples_come_back(folder: Path, inputs: TaskInputs) -> None:
    kept = Prompts.kept(folder, ["niah_single"], "m")
    (task,) = find_tasks(["niah_single"])
    assert kept.samples["niah_single"] == task.samples(inputs)
    assert kept.corpus == {"corpus": [{"name": "first"}], "corpus_absent": []}


def test_what_is_not_there_or_was_changed_is_refused(folder: Path) -> None:
    with pytest.raises(SettingsError, match="tokens of m, not of other"):
        Prompts.kept(folder, ["niah_single"], "other")
    with pytest.raises(SettingsError, match="nothing of task=mass there, only niah_single"):
        Prompts.kept(folder, ["mass"], "m")
    path = folder / "samples" / "niah_single.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(SettingsError, match="was changed after"):
        Prompts.kept(folder, ["niah_single"], "m")
    with pytest.raises(SettingsError, match="--samples-only"):
        Prompts.kept(folder / "nowhere", ["niah_single"], "m")
