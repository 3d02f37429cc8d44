# SPDX-License-Identifier: Apache-2.0
"""Command line and result of the driver that runs decode alone."""

from __future__ import annotations

import argparse
import ast
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tandemkv.cache_rank.protocol.models.model_spec import read_model_spec
from tandemkv.cache_rank.protocol.settings.exchange_settings import CacheSettings
from tandemkv.server.evaluation.bench import decode, decode_steps
from tandemkv.server.evaluation.bench.configurations import BUILT_IN, Configuration
from tandemkv.server.evaluation.bench.decode import (
    DecodeRun,
    decode_rows,
    run_decode,
    write_model_config,
)
from tandemkv.server.evaluation.bench.decode_steps import (
    Point,
    capacity_tokens,
    decode_steps_argv,
    parse_result,
    trace_files,
)
from tandemkv.server.evaluation.bench.report import BenchError
from tandemkv.server.plan.shape import BUILT_IN_CONFIGS, find_shape

ROOT = Path(__file__).resolve().parents[4]
POINTS = (Point(8, 8192), Point(8, 65536))
RESULT = [
    {
        "batch": 8, "context": 8192, "waited_ms": {"median": 8.8, "p10": 8.7, "p90": 9.1},
        "queued_ms": {"median": 8.0, "p10": 7.9, "p90": 8.1}, "memory_gib": 30.0, "counters": {},
        "devices": ["model on cuda:0 H100", "engine on cuda:1 H100"],
    },
    {"batch": 8, "context": 65536, "error": "CUDA out of memory"},
]  # fmt: skip


def test_reads_points_and_errors() -> None:
    measured, failed = parse_result(json.dumps(RESULT), POINTS)
    assert [item.point for item in measured] == [POINTS[0]]
    assert measured[0].waited.p90 == 9.1
    assert measured[0].queued.median == 8.0
    assert measured[0].devices == ("model on cuda:0 H100", "engine on cuda:1 H100")
    rows = decode_rows({("1+1-shared", POINTS[0]): measured[0]})
    assert {row.note for row in rows} == {"model on cuda:0 H100; engine on cuda:1 H100"}
    assert failed == {POINTS[1]: "CUDA out of memory"}
    assert parse_result("", POINTS) == ([], {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[{"batch": 1, "context": 64}]', "1x64, which was not asked for"),
        ('[{"batch": 8, "context": 8192}]', "waited_ms"),
        ("[", "lacks"),
    ],
)
def test_other_results_are_refused(text: str, expected: str) -> None:
    with pytest.raises(BenchError, match=expected):
        parse_result(text, POINTS)


def test_argv_uses_options_that_the_driver_has() -> None:
    argv = decode_steps_argv(
        work_dir=Path("/w"), model_dir=Path("/m"), tokenizer_dir=Path("/t"), points=POINTS,
        steps=24, capacity=4096, flags=("--tp-size", "2"), profile=True,
    )  # fmt: skip
    assert argv[argv.index("--points") + 1] == "8x8192,8x65536"
    assert argv[-2:] == ("--tp-size", "2")
    source = ROOT.joinpath(*decode_steps.MODULE.split(".")[1:]).with_suffix(".py")
    own = {
        node.args[0].value
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "add_argument"
        and isinstance(node.args[0], ast.Constant)
    }
    assert {"--points", "--steps", "--out", "--trace"} <= own & set(argv)


def test_flags_are_what_sglang_parses() -> None:
    """Every flag of ours and of the built-in configurations exists in the pinned SGLang."""
    server_args = pytest.importorskip("sglang.srt.server_args")
    for configuration in BUILT_IN.values():
        parser = argparse.ArgumentParser()
        server_args.ServerArgs.add_cli_args(parser)
        settings = configuration.serve_settings(model_dir=Path("/m"), capacity_tokens=4096, batch=8)
        given = configuration.sglang_flags(settings)
        flags = ["triton" if word == "tandemkv" else word for word in given]
        argv = decode_steps_argv(
            work_dir=Path("/w"), model_dir=Path("/m"), tokenizer_dir=Path("/t"), points=POINTS,
            steps=4, capacity=4096, flags=flags,
        )  # fmt: skip
        parsed = parser.parse_args(argv[argv.index("--model-path") :])  # the driver's own precede
        assert parsed.tp_size == configuration.tp_size
        assert parsed.load_format == "dummy"


def test_rows_and_ratios_of_both_ways_to_run_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every child writes the result; ours is at twice the speed only when queued."""

    def child(_: object, folder: Path, *__: object) -> tuple[str, str]:
        result = json.loads(json.dumps(RESULT[:1]))
        if "ours" in folder.name:
            result[0]["queued_ms"]["median"] = 4.0
        (folder / decode_steps.RESULT_FILE).write_text(json.dumps(result))
        (folder / decode_steps.TRACE_FOLDER).mkdir()
        (folder / decode_steps.TRACE_FOLDER / "decode_rank0.json.gz").touch()
        return "exit code 1", "RuntimeError: gone"

    monkeypatch.setattr(decode, "run_child", child)
    run = DecodeRun(
        model_dir=tmp_path / "model", tokenizer_dir=tmp_path, points=POINTS,
        configurations={
            "dense-tp1": Configuration(is_reference=True), "ours": Configuration(),
        },
        work_dir=tmp_path,
    )  # fmt: skip
    result = run_decode(run, lambda _: None)
    rows = {row.figure: row.value for row in result.rows}
    assert rows["tpot_ratio_vs_tp1_8x8k"] == 1.0
    assert rows["queued_tpot_ratio_vs_tp1_8x8k"] == 0.5
    assert rows["queued_tpot_ms_ours_8x8k"] == 4.0
    assert [item.figure for item in result.failures] == [
        "tpot_ms_dense-tp1_8x64k", "tpot_ms_ours_8x64k",
    ]  # fmt: skip
    assert "RuntimeError: gone" in result.failures[0].reason
    assert len(result.traces["ours"]) == 1


def test_traces(tmp_path: Path) -> None:
    assert trace_files(tmp_path) == ()


@pytest.mark.parametrize(
    ("batch", "contexts", "tokens", "capacity"),
    [(8, [8192, 65536], 32, 8 * (65536 + 384)), (2, [64, 128], 4, 2 * 384), (1, [1], 2, 256)],
)
def test_capacity_is_whole_pages_and_one_that_the_settings_accept(
    batch: int, contexts: list[int], tokens: int, capacity: int
) -> None:
    assert capacity_tokens(batch, contexts, tokens) == capacity
    CacheSettings(capacity_tokens=capacity)


@pytest.mark.parametrize(
    ("point", "label"),
    [(Point(8, 65536), "8x64k"), (Point(1, 1000), "1x1000"), (Point(64, 1024), "64x1k")],
)
def test_labels(point: Point, label: str) -> None:
    assert point.label == label


@pytest.mark.parametrize("name", list(BUILT_IN_CONFIGS))
def test_a_written_config_is_read_back_as_the_same_shape(name: str, tmp_path: Path) -> None:
    write_model_config(BUILT_IN_CONFIGS[name], tmp_path, max_context=65536 + 32)
    shape = find_shape(str(tmp_path))
    assert shape.weight_bytes == find_shape(name).weight_bytes
    assert shape.kv_token_bytes == find_shape(name).kv_token_bytes
    same = replace(shape, name=name, max_context=find_shape(name).max_context)
    assert same == find_shape(name)
    spec = read_model_spec(tmp_path, dtype="bfloat16")
    assert spec.max_context == 131072
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] > 0
