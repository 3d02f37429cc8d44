# SPDX-License-Identifier: Apache-2.0
"""Prompts of another folder: the same ones, or a refusal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.evaluation.quality.prompts import Prompts, describe_task
from tandemkv.server.evaluation.quality.request import Request
from tandemkv.server.evaluation.quality.samples import write_samples
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
        "tasks": {"niah_single": describe_task(Request(model="m"), task, samples)},
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


@pytest.mark.parametrize("name", ["context_tokens", "measure", "longest_tokens", "seed"])
def test_a_task_that_is_not_described_whole_is_refused_before_it_is_measured(
    name: str, folder: Path
) -> None:
    path = folder / "campaign.json"
    found = json.loads(path.read_text())
    del found["tasks"]["niah_single"][name]
    path.write_text(json.dumps(found))
    with pytest.raises(SettingsError, match=f"niah_single .*`{name}`.* --samples-only"):
        Prompts.kept(folder, ["niah_single"], "m")
    path.write_text(json.dumps(found | {"tasks": {"niah_single": 5}}))
    with pytest.raises(SettingsError, match="does not say all of task=niah_single"):
        Prompts.kept(folder, ["niah_single"], "m")
