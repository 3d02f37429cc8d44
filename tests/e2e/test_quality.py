# SPDX-License-Identifier: Apache-2.0
"""``tandemkv quality`` on real servers: stock SGLang and one policy, smallest sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rank_servers import environment, model_dir

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

TASKS = ("perplexity", "continuation", "mass", "niah_single", "niah_single+late")


def run(out: Path, *arguments: str) -> str:
    argv = [
        *(sys.executable, "-P", "-m", "tandemkv.server", "quality", model_dir()),
        *("--device", "cpu", "--out", str(out), "--samples", "1", "--context-tokens", "512"),
        *("--forced-tokens", "25", "--policies", "look_ahead", "--budgets", "25%"),
        *("--set", "selection.num_recent_tokens=16", "--tasks", ",".join(TASKS), *arguments),
    ]
    done = subprocess.run(
        argv, env=environment(), cwd="/", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quality")
    run(folder)
    return folder


@pytest.fixture(scope="module")
def rows(out: Path) -> dict[str, Any]:
    return {row["policy"]: row for row in json.loads((out / "report.json").read_text())["rows"]}


def test_every_task_is_in_the_report(rows: dict[str, Any]) -> None:
    assert list(rows) == ["dense", "look_ahead"]
    names = {task.replace("+", "_") for task in TASKS}
    assert set(rows["look_ahead"]["scores"]) == names
    assert set(rows["dense"]["scores"]) == names - {"mass"}


def test_decode_was_sparse_and_close_to_dense(rows: dict[str, Any]) -> None:
    ours = rows["look_ahead"]
    assert ours["attended_tokens"] == 128
    # 2 of 30 layers are exact, the others attend to at most 128 of at least 512 tokens.
    assert 0.2 < ours["scores"]["perplexity"]["attended_share"] < 0.32
    assert ours["moved_rows"] > 0
    assert abs(ours["scores"]["perplexity"]["change"]) < 25
    mass = ours["scores"]["mass"]
    assert 0.5 < mass["value"] <= mass["details"]["oracle_mass"] <= 1
    assert 0 < mass["details"]["recall"] <= 1


def test_the_same_command_measures_nothing_again(out: Path) -> None:
    results = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/*.json")}
    tasks = {p: t for p, t in results.items() if p.name != "configuration.json"}
    run(out)
    assert {path: path.stat().st_mtime_ns for path in tasks} == tasks
