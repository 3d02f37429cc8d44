# SPDX-License-Identifier: Apache-2.0
"""``tandemkv quality``: help, and refusals before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandemkv.server.cli.commands import app


def invoke(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["quality", *arguments], env={"COLUMNS": "200"})
    return found.exit_code, found.output


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory that looks like a model until its tokenizer is wanted."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_size": 16,
        "max_position_embeddings": 2048,
    }
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_help_names_tasks_and_options() -> None:
    code, text = invoke("--help")
    assert code == 0
    for word in (
        *("--policies", "--budgets", "--tasks", "--samples", "--out", "--jobs", "--corpus"),
        *("--as-served", "--grid", "--compare", "--pareto", "records", "@8k", "long_generation"),
        *("--report-only", "niah_multi_value", "file:PATH", "+late", "docs/quality.md"),
    ):
        assert word in text, word


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tasks", "no_such_task"), "task=no_such_task is unknown"),
        (("--policies", "look_ahed"), "policy='look_ahed' is unknown"),
        (("--budgets", "12,5%x"), "budget=5%x"),
        (
            ("--policies", "look_ahead+fetch=3"),
            "no setting fetch of selection, and no such option of this policy; did you mean fetch_",
        ),
        (("--policies", "look_ahead+xyzzy=3"), "`tandemkv serve --print-settings` has all"),
        (("--budgets", "20"), "budget=20 (20 tokens) is not possible for policy=look_ahead"),
        (("--policies", ",", "--no-dense"), "nothing to measure"),
        (("--set", "selection.fetch_capp=2"), "did you mean selection.fetch_cap?"),
        (("--set", "port=1"), "tandemkv quality sets port itself"),
        (("--set", "port =1"), "tandemkv quality sets port itself"),
        (("--set", "nothing"), "KEY=VALUE is required"),
        (("--corpus", "nowhere.txt"), "corpus nowhere.txt: cannot be read"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], message: str, model: Path, tmp_path: Path
) -> None:
    code, text = invoke(str(model), "--out", str(tmp_path / "out"), *arguments)
    assert code == 2
    assert message in " ".join(text.split())
    assert not (tmp_path / "out").exists()


def test_no_model_and_no_results(tmp_path: Path) -> None:
    assert invoke("--out", str(tmp_path)) == (
        2,
        "tandemkv: error: no model given: `tandemkv quality MODEL`, a directory or smollm2\n",
    )
    code, text = invoke("--out", str(tmp_path), "--report-only")
    assert code == 2
    assert "no campaign.json there" in text
