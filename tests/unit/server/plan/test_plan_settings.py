# SPDX-License-Identifier: Apache-2.0
"""What `plan` says of settings that decide what it prints."""

from __future__ import annotations

import json
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tiny_model import CONFIG, write_model
from typer.testing import CliRunner

from tandemkv.server.cli.commands import app
from tandemkv.server.plan.footprint import memory_of
from tandemkv.server.plan.placement import Placement, PlacementKind, possible_placements
from tandemkv.server.plan.shape import find_shape
from tandemkv.server.plan.workload import Workload
from tandemkv.server.settings.sources import Sourced, load_settings

QWEN = find_shape("qwen3-8b")


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("COLUMNS", "400")
    return CliRunner()


def plan_of(runner: CliRunner, arguments: list[str]) -> dict[str, Any]:
    """Return the plan that `arguments` lead to, as JSON has it."""
    found: dict[str, Any] = json.loads(runner.invoke(app, [*arguments, "--json"]).stdout)
    return found


@pytest.mark.parametrize(("concurrency", "fits"), [(7, False), (5, True)])
def test_by_messages_the_gpu_of_the_model_holds_all_of_it(
    runner: CliRunner, concurrency: int, fits: bool
) -> None:
    arguments = "plan --model qwen3-8b --gpus 2 --gpu-memory 79 --cache-ranks 1 --context 64k"
    arguments += f" --concurrency {concurrency} --set transport=message"
    result = runner.invoke(app, arguments.split())
    assert result.exit_code == (0 if fits else 1)
    assert ("start it with" in result.output) is fits
    assert "not predicted" in result.output
    assert "times as long" not in result.output
    printed = plan_of(runner, arguments.split())
    (_, far), load = printed["placements"], Workload(**printed["workload"])
    own = memory_of(Placement(kind=PlacementKind.IN_PROCESS, tp_size=1), QWEN, load).inference
    assert far["bytes_per_gpu"]["inference"]["total"] == own.total
    assert far["predicted"] is None
    # Left open, there are as many cache ranks as `serve` would start.
    left_open = arguments.replace("--cache-ranks 1 ", "").split()
    assert plan_of(runner, left_open) == printed


def test_cache_ranks_at_addresses_have_gpus_of_their_own_hosts(runner: CliRunner) -> None:
    arguments = ["plan", "--model", "qwen3-8b", "--set", "link_keys=keys", "--set"]
    arguments.append("cache_rank_address=tcp://10.0.0.2:7400,tcp://10.0.0.3:7400")
    result = runner.invoke(app, arguments)
    assert "asked for: 1 inference + 2 cache GPUs, by messages" in result.output, result.output


def test_a_directory_comes_before_a_built_in_shape(
    runner: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = write_model(tmp_path / "Qwen3-8B")
    monkeypatch.chdir(tmp_path)
    arguments = ["plan", "--model", own.name, "--context", "1k"]
    result = runner.invoke(app, arguments)
    assert f"tandemkv serve {own.name} " in result.output, result.output
    assert plan_of(runner, arguments)["model"]["num_layers"] == CONFIG["num_hidden_layers"]


@pytest.mark.parametrize(
    ("flags", "said", "predicted"),
    [
        (
            ["dense_tokens=0"],
            "were given, requests of up to 1028 tokens attend to everything\n",
            [],
        ),
        (["dense_tokens=16k"], "given, requests of up to 16384 tokens attend to everything\n", []),
        (["dense_tokens=64k"], "at this load all do, and the predicted times are those of", []),
        (["dense_batch_tokens=0"], "tokens attend to everything, which is predicted", ["tokens"]),
        (["dense_batch_tokens=512k"], "524288 in all attend to everything; at this", ["tokens"]),
        (
            ["dense_tokens=0", "dense_batch_tokens=9k"],
            "requests of up to 1028 tokens and steps of no more than 9216 in all attend to",
            [],
        ),
        (["dense_while_fits=false"], "", []),
        (["policy=streaming"], "", []),
    ],
)
def test_dense_lengths_are_those_that_serve_takes(
    runner: CliRunner, flags: list[str], said: str, predicted: list[str]
) -> None:
    arguments = ["plan", "--model", "qwen3-8b"]
    for flag in flags:
        arguments += ["--set", f"selection.{flag}"]
    output = runner.invoke(app, arguments).output
    assert said in output
    assert ("to everything" in output) is bool(said)
    assert ("break-even" in output) is bool(predicted)
    assert list(plan_of(runner, arguments)["break_even"] or {}) == predicted


def test_steps_between_selections_are_told(runner: CliRunner) -> None:
    arguments = ["plan", "--model", "qwen3-8b"]
    assert "one of 4" not in runner.invoke(app, arguments).output
    arguments += ["--set", "selection.refresh_every=4"]
    assert "with --refresh-every 4 one of 4 does" in runner.invoke(app, arguments).output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--set device=cpu", "device=cpu: plan predicts what GPUs do"),
        ("--policy exact --set selection.fetch_cap=64", "policy=exact fetches nothing"),
        ("--policy quest --set selection.pool_before=1", "does not rank tokens by pooled scores"),
        ("--set selection.anchors=1,2", "has no anchor layers without --share-layers"),
        ("--context 64", "max_context=64 (from --context): "),
        ("--context 128 --concurrency 1", "=128 (from --context and --concurrency): "),
        ("--context 128 --concurrency 1 --cache-tokens 200", "=200 (from --cache-tokens): "),
    ],
)
def test_settings_that_serve_or_a_gpu_does_not_take(
    runner: CliRunner, arguments: str, message: str
) -> None:
    result = runner.invoke(app, ["plan", "--model", "qwen3-8b", *arguments.split()])
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_placement_that_the_settings_contradict_is_not_recommended(runner: CliRunner) -> None:
    arguments = ["plan", "--model", "qwen3-8b", "--gpus", "2", "--tp", "1", "--context", "32k"]
    assert "recommended: 1 inference + 1 cache GPU" in runner.invoke(app, arguments).output
    output = runner.invoke(app, [*arguments, "--set", "selection.dense_tokens=8k"]).output
    assert "recommended: cache rank in process, 1 GPU" in output
    assert "1+1 is not chosen from, because serve would refuse it: dense_tokens=8192" in output
    assert "serve refuses it as it is" not in output
    alone = ["plan", "--model", "qwen3-8b", "--gpus", "1", "--set", "standby=true"]
    output = runner.invoke(app, alone).output
    assert "serve refuses it as it is: standby needs a cache rank in a process" in output


def test_a_calibration_of_the_models_own_weights_is_known(
    runner: CliRunner, tmp_path: Path
) -> None:
    name = "smollm2-135m-instruct.kascade.json"
    own = json.loads((files("tandemkv.cache_rank.calibration") / "data" / name).read_text())
    file = tmp_path / "own.json"
    base = ["plan", "--model", "smollm2", "--context", "4k", "--policy", "kascade"]
    for changed, is_refused in (("", False), ("0", True)):
        own["model"]["model_hash"] = changed + own["model"]["model_hash"][len(changed) :]
        file.write_text(json.dumps(own))
        output = runner.invoke(app, [*base, "--set", f"selection.calibration={file}"]).output
        assert ("was made with other weights" in output) is is_refused


@pytest.mark.parametrize(
    ("policy", "refused"),
    [
        ("kascade", "head maps of shipped smollm2-135m-instruct.kascade.json lead from one GPU"),
        ("sync_kv", "policy=sync_kv selects once for KV heads that lie on several ranks; use --tp"),
        ("sfi", ""),
    ],
)
def test_a_model_stays_on_one_gpu_where_serve_leaves_it_there(
    runner: CliRunner, policy: str, refused: str
) -> None:
    base = ["plan", "--model", "smollm2", "--gpus", "3", "--context", "4k", "--policy", policy]
    found = plan_of(runner, base)
    assert found["recommended"] == "in-process-tp1"
    assert not any(x["name"] == "in-process-tp3" for x in found["placements"])
    asked = runner.invoke(app, [*base, "--tp", "3"])
    assert (asked.exit_code, refused in asked.output) == (2 if refused else 0, True)
    other = plan_of(runner, [*base[:-1], "look_ahead"])
    assert any(x["name"] == "in-process-tp3" for x in other["placements"])
    own_heads = ["plan", "--model", "qwen3-8b", "--gpus", "2", "--policy", "kascade"]
    assert plan_of(runner, own_heads)["recommended"] == "in-process-tp2"


def test_requests_that_share_fewer_tokens_are_planned_as_short_ones(runner: CliRunner) -> None:
    base = ["plan", "--model", "qwen3-8b", "--concurrency", "8", "--gpus", "2"]
    shared = [*base, "--context", "64k", "--cache-tokens", "128k"]
    output = runner.invoke(app, shared).output
    assert "planned for 8 requests of 16384 tokens, which share --cache-tokens 131072" in output
    assert "--cache-tokens 131072 --max-context 65536" in output
    short, found = plan_of(runner, [*base, "--context", "16k"]), plan_of(runner, shared)
    for one, other in zip(short["placements"], found["placements"], strict=True):
        assert one["predicted"] == other["predicted"]
        parts = [x["bytes_per_gpu"]["inference"]["kv"] for x in (one, other)]
        assert parts[0] == parts[1]
    assert short["break_even"] == found["break_even"]
    enough = runner.invoke(app, [*base, "--context", "64k", "--cache-tokens", "512k"]).output
    assert "planned for" not in enough


def test_the_longest_request_is_that_of_the_option_whatever_a_variable_says(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["plan", "--model", "qwen3-8b", "--context", "128k", "--concurrency", "1"]
    expected = runner.invoke(app, arguments)
    assert expected.exit_code == 0
    monkeypatch.setenv("TANDEMKV_SERVE_MAX_CONTEXT", "200k")
    assert runner.invoke(app, arguments).output == expected.output


def test_every_placement_can_be_started() -> None:
    for gpus in range(1, 17):
        dense, *own = possible_placements(QWEN, gpus)
        assert dense.flags == ()
        for placement in own:
            flags = dict(pairwise(placement.flags))
            is_separate = placement.kind is PlacementKind.SEPARATE
            want = placement.num_cache_gpus if is_separate else 0
            assert flags["--cache-ranks"] == str(want)
            assert int(flags.get("--tp", "1")) + want == placement.num_gpus
            settings = load_settings(
                {
                    "model": Sourced("m", "test"),
                    "cache_ranks": Sourced(flags["--cache-ranks"], "test"),
                    "tensor_parallel": Sourced(flags.get("--tp", "1"), "test"),
                },
                {},
            )
            assert settings.wished_link == (None if is_separate else "local")
