# SPDX-License-Identifier: Apache-2.0
"""Policies through SGLang's ModelRunner: where all is selected the tokens are stock's.

Over HTTP, `test_local` shows this of one policy in CI, and of others in slow tests. So it is with
slow steps (`test_policies`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from clusters import write_clusters
from program_runs import result, run_program
from tiny_models import LAYERS, LENGTHS, MODELS, STEPS, write_model

pytestmark = pytest.mark.timeout(600)

NAME = "qwen3"
COVERING = {
    "budget_tokens": 600, "num_recent_tokens": 32, "dense_while_fits": False,
    "index_dtype": "int8",
}  # fmt: skip
ALL: dict[str, dict[str, Any]] = {
    "look_ahead": {"policy": "look_ahead", "exact_layers": [0]},
    "late_layers": {"policy": "look_ahead", "late_layers": 1},
    "kascade": {"policy": "kascade", "anchors": [0, 1]},
    "async_spade": {"policy": "async_spade"},
    "shared_async_spade": {
        "policy": "async_spade", "share_layers": True, "anchors": [1], "exact_layers": [0],
    },
    "last_query": {"policy": "last_query"},
    "mean_query": {"policy": "mean_query"},
    "quest": {"policy": "quest"},
    "oracle": {"policy": "oracle"},
    "lfps": {"policy": "lfps"},
}  # fmt: skip
"""Everything is selected, nothing skipped; int8, so that the index is kept as well."""
LINEAR = ("qwen3-next", "qwen3.5")
OF_LINEAR: dict[str, dict[str, Any]] = {
    "late_layers": {"policy": "look_ahead", "late_layers": 2},
    "kascade": {"policy": "kascade", "anchors": [1]},
    "shared_async_spade": {"policy": "async_spade", "share_layers": True, "anchors": [1]},
    "quest": {"policy": "quest"},
    "exact_layer": {"policy": "look_ahead", "exact_layers": [0, 1]},
}
"""The same for a model whose layers 1 and 3 have K and V, and no others."""
ANOTHER_PROCESS = {"selection": COVERING | {"policy": "look_ahead"}, "cache_ranks": 1}
SELDOM = {"policy": "look_ahead", "exact_layers": [0], "refresh_every": 1000}
STRIDE = 4
SLOW = {"policy": "sync_kv", "budget_tokens": 96, "options": {"stride": STRIDE}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_model(NAME, folder / "models" / NAME)
    write_clusters(folder / "models" / NAME, folder / "clusters.json")
    trees: dict[str, Any] = {way: {"selection": COVERING | more} for way, more in ALL.items()}
    trees["seldom"] = {"selection": SELDOM}
    trees["slow"] = {"selection": SLOW | {"calibration": str(folder / "clusters.json")}}
    (folder / "ways.json").write_text(json.dumps(trees))
    run_program(folder, NAME, "--ways", str(folder / "ways.json"))
    return folder


def check_tokens(runs: Path, name: str, way: str) -> None:
    """Whatever the settings of `way`: all is selected, so the tokens are those of stock SGLang."""
    stock = result(runs / f"{name}-stock.safetensors")
    found = result(runs / f"{name}-{way}.safetensors")
    assert torch.equal(found["tokens"], stock["tokens"])
    assert float((found["logits"] - stock["logits"]).abs().max()) < 1e-4
    assert found["rows"].tolist() == [0, STEPS * len(LENGTHS), 0], "nothing was selected"


@pytest.mark.parametrize("way", ALL)
def test_all_selected_gives_the_tokens_of_stock(runs: Path, way: str) -> None:
    check_tokens(runs, NAME, way)


@pytest.fixture(scope="module", params=LINEAR)
def linear_runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, folder = request.param, tmp_path_factory.mktemp("linear")
    write_model(name, folder / "models" / name)
    base = COVERING | {"exact_layers": []}
    trees: dict[str, Any] = {way: {"selection": base | more} for way, more in OF_LINEAR.items()}
    (folder / "ways.json").write_text(json.dumps(trees | {"another": ANOTHER_PROCESS}))
    run_program(folder, name, "--ways", str(folder / "ways.json"))
    return folder / name


@pytest.mark.parametrize("way", OF_LINEAR)
def test_all_selected_beside_linear_attention(linear_runs: Path, way: str) -> None:
    check_tokens(linear_runs.parent, linear_runs.name, way)


def test_a_cache_rank_in_another_process_is_refused_by_the_inference_rank(
    linear_runs: Path,
) -> None:
    name = linear_runs.name
    assert not (linear_runs.parent / f"{name}-another.safetensors").exists()
    log = (linear_runs.parent / f"{name}-another.log").read_text()
    assert f"SettingsError: {MODELS[name].architecture} has layers of linear attention" in log


def test_slow_steps_attend_to_everything(runs: Path) -> None:
    """Every fourth step of the longer prompt, and the first; the shorter one is dense."""
    dense, sparse = LENGTHS
    found = result(runs / f"{NAME}-slow.safetensors")
    assert found["rows"].tolist() == [STEPS, STEPS, 0]
    slow = [step for step in range(STEPS) if step % STRIDE == 0]
    fast = (STEPS - len(slow)) * (4 + 96 + 16)
    whole = sum(sparse + 1 + step for step in slow) + sum(dense + 1 + s for s in range(STEPS))
    rows, attended, selections, fetched = found["counts"].tolist()
    assert (rows, attended) == (len(slow), fast + whole)
    assert selections == len(slow) * LAYERS
    assert fetched > 0


def test_the_first_step_behind_a_prompt_selects_however_seldom_others_do(runs: Path) -> None:
    """Until then no samples count, and the set is what the prompt's last queries chose."""
    found = result(runs / f"{NAME}-seldom.safetensors")
    assert found["rows"].tolist() == [STEPS, STEPS, 0], "the longer prompt alone is sparse"
    assert int(found["counts"][2]) == LAYERS - 1, "once in each sparse layer"
