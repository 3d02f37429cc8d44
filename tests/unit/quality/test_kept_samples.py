# SPDX-License-Identifier: Apache-2.0
"""Prompts of another folder: the same ones, or a refusal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.quality.kept_samples import KeptSamples
from tandemkv.server.quality.samples import samples_digest, write_samples
from tandemkv.server.quality.tasks.base import TaskInputs
from tandemkv.server.quality.tasks.registry import find_tasks


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
    kept = KeptSamples.of(folder)
    kept.check_model("m")
    (task,) = find_tasks(["niah_single"])
    assert kept.samples_of("niah_single") == task.samples(inputs)
    assert kept.corpus == {"corpus": [{"name": "first"}], "corpus_absent": []}


def test_what_is_not_there_or_was_changed_is_refused(folder: Path) -> None:
    kept = KeptSamples.of(folder)
    with pytest.raises(SettingsError, match="tokens of m, not of other"):
        kept.check_model("other")
    with pytest.raises(SettingsError, match="nothing of task=mass there, only niah_single"):
        kept.samples_of("mass")
    path = folder / "samples" / "niah_single.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(SettingsError, match="was changed after"):
        kept.samples_of("niah_single")
    with pytest.raises(SettingsError, match="--samples-only"):
        KeptSamples.of(folder / "nowhere")
