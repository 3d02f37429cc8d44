# SPDX-License-Identifier: Apache-2.0
"""Command line and result of the driver that runs decode alone."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tandemkv.server.evaluation.bench import decode, decode_steps
from tandemkv.server.evaluation.bench.configurations import Configuration
from tandemkv.server.evaluation.bench.decode import DecodeRun, decode_rows, run_decode
from tandemkv.server.evaluation.bench.decode_steps import (
    decode_steps_argv,
    parse_result,
    trace_files,
)
from tandemkv.server.evaluation.bench.measured import Point
from tandemkv.server.evaluation.bench.report import BenchError
from tandemkv.server.plan.shape import BUILT_IN_SHAPES

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
    assert measured[0].queued is not None
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


def test_rows_and_ratios_of_both_ways_to_run_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every child writes the result; ours is at twice the speed only when queued."""

    def child(argv: tuple[str, ...], env: object, folder: Path, timeout_s: float) -> str:
        result = json.loads(json.dumps(RESULT[:1]))
        if "ours" in folder.name:
            result[0]["queued_ms"]["median"] = 4.0
        (folder / decode_steps.RESULT_FILE).write_text(json.dumps(result))
        (folder / decode_steps.TRACE_FOLDER).mkdir()
        (folder / decode_steps.TRACE_FOLDER / "decode_rank0.json.gz").touch()
        (folder / "stderr.log").write_text("RuntimeError: gone\n")
        return "exit code 1"

    monkeypatch.setattr(decode, "_wait", child)
    run = DecodeRun(
        shape=BUILT_IN_SHAPES["qwen3-8b"], tokenizer_dir=tmp_path, points=POINTS,
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
