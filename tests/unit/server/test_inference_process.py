# SPDX-License-Identifier: Apache-2.0
"""The command that becomes SGLang: what it execs, and that it waits for the cache rank."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tiny_model import write_model
from typer.testing import CliRunner

from tandemkv.cache_rank.protocol.memory.descriptor_holder import DescriptorHolder
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings.rank_settings import (
    RUN_DIR_VARIABLE,
    SETTINGS_VARIABLE,
    RankSettings,
)
from tandemkv.server.cli.commands import app
from tandemkv.server.launch import inference_process
from tandemkv.server.launch.supervision import LaunchError

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", CONFIG)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


def invoke(model: Path, run_dir: Path, *more: str) -> object:
    arguments = ["inference-rank", "--model", str(model), "--run-dir", str(run_dir)]
    small = ["--device", "cpu", "--port", "0", "--cache-tokens", "1024", "--max-context", "512"]
    return CliRunner().invoke(app, [*arguments, *small, *more])


def test_waits_for_the_cache_rank_then_becomes_sglang(
    monkeypatch: pytest.MonkeyPatch, model: Path, run_dir: Path
) -> None:
    answers = iter(["nobody there", "nobody there", "loading", None])
    execs: list[tuple[str, tuple[str, ...], dict[str, str]]] = []
    monkeypatch.setattr(inference_process, "_PAUSE_S", 0.0)
    monkeypatch.setattr(inference_process, "cache_rank_detail", lambda _: next(answers))
    monkeypatch.setattr(os, "execve", lambda *given: execs.append(given))
    result = invoke(model, run_dir, "--budget-tokens", "128", "--", "--log-level", "info")
    assert result.exit_code == 0, result.output
    assert result.stderr.count("waiting for the cache rank") == 2  # each reason once
    ((program, argv, env),) = execs
    assert program == argv[0]
    assert "sglang.launch_server" in argv
    assert argv[-2:] == ("--log-level", "info")
    assert argv[argv.index("--context-length") + 1] == "512"
    assert Path(env[RUN_DIR_VARIABLE]) == run_dir
    assert RankSettings.model_validate_json(env[SETTINGS_VARIABLE]).selection.budget_tokens == 128
    assert RunDir.open(run_dir).token  # made, private
    assert result.stderr.count("memory is not held beyond this rank's life") == 1


def test_says_nothing_of_memory_that_is_held(
    monkeypatch: pytest.MonkeyPatch, model: Path, run_dir: Path
) -> None:
    directory = RunDir.create(run_dir)
    holder = DescriptorHolder(directory.holder_socket, directory.token)
    monkeypatch.setattr(inference_process, "cache_rank_detail", lambda _: None)
    monkeypatch.setattr(os, "execve", lambda *_: None)
    try:
        result = invoke(model, run_dir)
    finally:
        holder.close()
    assert result.exit_code == 0, result.output
    assert "held" not in result.stderr


def test_gives_up_and_says_what_to_start(
    monkeypatch: pytest.MonkeyPatch, model: Path, run_dir: Path
) -> None:
    monkeypatch.setattr(inference_process, "_PAUSE_S", 0.0)
    monkeypatch.setattr(inference_process, "cache_rank_detail", lambda _: "nobody there")
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("started SGLang"))
    result = invoke(model, run_dir, "--start-timeout-s", "0.01")
    assert result.exit_code == 1
    assert "nobody there; start `tandemkv cache-rank --run-dir" in result.stderr


def test_the_wait_is_an_error_of_the_launch(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="no cache rank after 0 s"):
        inference_process.wait_for_cache_rank(RunDir.create(tmp_path / "run"), 0.0, lambda _: None)


def test_wrong_settings_are_refused_before_anything_is_made(model: Path, run_dir: Path) -> None:
    result = invoke(model, run_dir, "--budget-tokens", "5")
    assert result.exit_code == 2
    assert not run_dir.exists()


@pytest.mark.parametrize("more", [(), ("--cache-ranks", "2"), ("--transport", "shared")])
def test_several_cache_ranks_are_not_waited_for(
    model: Path, run_dir: Path, more: tuple[str, ...]
) -> None:
    result = invoke(model, run_dir, "--tp", "2", *more)
    assert result.exit_code == 2
    assert "only `tandemkv serve` starts as many" in result.stderr
    assert not run_dir.exists()
