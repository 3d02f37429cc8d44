# SPDX-License-Identifier: Apache-2.0
"""Loads at the ends: all of it exact, all of it resident, more room than a GPU has."""

from __future__ import annotations

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from tandemkv.cache_rank.policies.registry import resolve_selection
from tandemkv.server.cli.commands import app
from tandemkv.server.plan.choose import break_even_batch_tokens, break_even_tokens
from tandemkv.server.plan.cost import predict_step
from tandemkv.server.plan.placement import Placement, PlacementKind
from tandemkv.server.plan.shape import find_shape
from tandemkv.server.plan.workload import Workload

QWEN = find_shape("qwen3-8b")


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner(env={"COLUMNS": "200"})


def test_exact_is_predicted_to_attend_to_everything() -> None:
    load = Workload.from_selection(
        resolve_selection({"policy": "exact"}), context_tokens=65536, concurrency=8
    )
    kinds = (PlacementKind.DENSE, PlacementKind.IN_PROCESS)
    stock, own = (
        predict_step(Placement(kind=kind, tp_size=1), QWEN, load).tpot_ms for kind in kinds
    )
    assert own >= stock


def test_a_request_that_is_resident_whole_has_no_break_even_of_its_own() -> None:
    load = Workload.from_selection(
        resolve_selection({"index_dtype": "int4"}), context_tokens=128, concurrency=512,
        capacity_tokens=65536,
    )  # fmt: skip
    assert break_even_tokens(QWEN, load, 1) == 128
    batch = [
        break_even_batch_tokens(QWEN, replace(load, concurrency=size), 1) for size in (256, 512)
    ]
    assert batch[0] == batch[1] > 0


def test_advice_names_the_room_that_is_too_much(runner: CliRunner) -> None:
    more = ["--context", "32k", "--concurrency", "8", "--cache-tokens", "2m"]
    found = runner.invoke(app, ["plan", "--model", "qwen3-8b", *more])
    assert "8 requests of 32768 tokens would, with --cache-tokens 262144" in " ".join(
        found.output.split()
    )


def test_the_command_has_the_chunk_that_was_planned_with(runner: CliRunner) -> None:
    for more, is_named in ([], False), (["--chunked-prefill-size", "2048"], True):
        found = runner.invoke(app, ["plan", "--model", "qwen3-8b", "--context", "16k", *more])
        assert ("--chunked-prefill-size 2048" in " ".join(found.output.split())) is is_named


def test_a_chunk_that_serve_would_refuse_is_refused(runner: CliRunner) -> None:
    words = ["plan", "--model", "qwen3-8b", "--context", "16k", "--chunked-prefill-size"]
    found = runner.invoke(app, [*words, "1000"])
    assert found.exit_code == 2
    assert "1000 must be a multiple of the 128 tokens of a page; use 1024" in found.output
    assert runner.invoke(app, [*words, "1088"]).exit_code == 2
    assert runner.invoke(app, [*words, "1088", "--recent-tokens", "64"]).exit_code == 0


def test_the_command_has_the_dtype_that_was_planned_with(runner: CliRunner) -> None:
    for more, is_named in ([], False), (["--dtype", "float16"], True):
        found = runner.invoke(app, ["plan", "--model", "qwen3-8b", "--context", "16k", *more])
        assert ("--dtype float16" in " ".join(found.output.split())) is is_named


@pytest.mark.parametrize(
    ("model", "is_shipped"), [("smollm2", True), ("qwen3-8b", False), ("qwen3-30b-a3b", False)]
)
def test_a_file_that_serve_will_ask_for_is_named(
    runner: CliRunner, model: str, is_shipped: bool
) -> None:
    words = ["plan", "--model", model, "--context", "4k", "--policy", "sync_kv"]
    output = " ".join(runner.invoke(app, words).output.split())
    needs = "serve refuses it as it is: policy=sync_kv: no calibration is shipped for this model"
    assert (needs in output) is not is_shipped
