# SPDX-License-Identifier: Apache-2.0
"""Rows of bench_serving's result, drawings, and the commands."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.cli.commands import app
from tandemkv.server.evaluation import provenance
from tandemkv.server.evaluation.bench import command as bench_command
from tandemkv.server.evaluation.bench.command import parse_points
from tandemkv.server.evaluation.bench.decode_steps import Point
from tandemkv.server.evaluation.bench.plot import draw, tpot_series
from tandemkv.server.evaluation.bench.report import (
    BenchError,
    Gpu,
    Report,
    Row,
    make_report,
    write_report,
)
from tandemkv.server.evaluation.bench.serving import ServeLoad, bench_serving_argv, serving_rows

LOAD = ServeLoad(url="http://127.0.0.1:30000", tokenizer="t", concurrency=2, output_tokens=5)
RESULT: dict[str, Any] = {
    "duration": 0.3,
    "output_lens": [5, 5, 5, 0, 3, 5],
    "ttfts": [0.001, 0.1, 0.3, 0.0, 0.2, 0.0],
    "itls": [[0.001] * 4, [0.010, 0.010, 0.040, 0.020], [0.02, 0.02, 0.02, 0.06], [], [0.01], []],
    "errors": ["", "", "", "HTTP 503\ncache rank lost", "", ""],
}
"""A warm-up, two that are whole, a refused one, and two that ended with an error event."""


def test_serving_rows_by_hand() -> None:
    rows, failures = serving_rows(LOAD, "{}\n" + json.dumps(RESULT) + "\n")
    found = {row.figure: row for row in rows}
    assert found["ttft_ms_serve_2x4096"].value == pytest.approx(200.0)
    assert found["tpot_ms_serve_2x4096"].value == pytest.approx(25.0)  # of 20 and 30
    assert found["tpot_ms_serve_2x4096"].n == 2
    assert found["itl_ms_serve_2x4096"].value == pytest.approx(20.0)  # of all eight
    assert found["itl_ms_serve_2x4096"].n == 8
    assert found["longest_gap_ms_serve_2x4096"].value == pytest.approx(50.0)
    assert found["output_tokens_per_s_serve_2x4096"].value == pytest.approx(15 / 0.3)
    assert [(item.figure, item.reason) for item in failures] == [
        ("request_3_serve_2x4096", "HTTP 503 cache rank lost"),
        ("request_4_serve_2x4096", "ended early, 3 tokens"),
        ("request_5_serve_2x4096", "ended early, 5 tokens"),
    ]
    throughput = found.pop("output_tokens_per_s_serve_2x4096")
    assert {row.note for row in found.values()} == {f"seed {LOAD.seed}"}
    assert throughput.n == 3
    told = f"seed {LOAD.seed}, with the first request, which was a warm-up before"
    assert throughput.note == told


def test_a_first_request_that_failed_is_in_no_row() -> None:
    failed = {**RESULT, "errors": ["HTTP 503", *RESULT["errors"][1:]]}
    throughput = serving_rows(LOAD, json.dumps(failed))[0][-1]
    assert (throughput.value, throughput.n) == (pytest.approx(10 / 0.3), 2)
    assert throughput.note == f"seed {LOAD.seed}"


def test_answers_that_come_at_once_have_no_time_per_token() -> None:
    at_once = {**RESULT, "itls": [[] for _ in RESULT["errors"]]}
    rows, _ = serving_rows(LOAD, json.dumps(at_once))
    assert [row.figure for row in rows] == [
        "ttft_ms_serve_2x4096", "output_tokens_per_s_serve_2x4096",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "wrote no result"),
        (json.dumps(RESULT)[:-9], "last line of bench_serving's result is not JSON"),
        ('{"completed": 1}', "lacks 'errors'"),
        (json.dumps({**RESULT, "ttfts": [1.0]}), "6, 1, 6, 6 .*not that of SGLang 0.5.17"),
        (json.dumps({**RESULT, "errors": list("vwxyza")}), "no request was completed: v"),
        (json.dumps({**RESULT, "output_lens": [5] + [4] * 5}), "completed: ended early, 4 tokens"),
    ],
)
def test_results_that_say_nothing_are_refused(text: str, expected: str) -> None:
    with pytest.raises(BenchError, match=expected):
        serving_rows(LOAD, text)


@pytest.mark.parametrize("url", ["http://10.0.0.5:30000", "http://example.com", "127.0.0.1:1", ""])
def test_only_this_machine_is_put_under_load(url: str) -> None:
    with pytest.raises(SettingsError, match="url="):
        ServeLoad(url=url, tokenizer="t")


def test_prompts_are_others_each_time_and_names_those_of_figures() -> None:
    assert ServeLoad(tokenizer="t").seed != ServeLoad(tokenizer="t").seed
    with pytest.raises(SettingsError, match="name=TandemKV: lower-case letters"):
        ServeLoad(tokenizer="t", name="TandemKV")


def test_serving_argv_is_what_sglang_parses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    serving = pytest.importorskip("sglang.benchmark.serving")
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr(serving, "run_benchmark", seen.append)
    argv = bench_serving_argv(LOAD, Path("/t"), tmp_path / "r.jsonl")
    monkeypatch.setattr("sys.argv", ["bench_serving", *argv[4:]])
    serving.cli_main()
    assert seen[0].base_url == LOAD.url
    assert seen[0].dataset_name == "random-ids"
    assert seen[0].max_concurrency == 2
    assert (seen[0].num_prompts, seen[0].seed) == (33, LOAD.seed)
    assert seen[0].output_details


def report(*names: str) -> Report:
    rows = []
    for name in names:
        for batch in (1, 8):
            for context, label in ((8192, "8k"), (65536, "64k")):
                value = 5 + batch * context / 65536
                row = Row(f"tpot_ms_{name}_{batch}x{label}", value, "ms", value - 1, value + 1, 9)
                rows.append(row)
    rows.append(Row("tpot_ratio_vs_tp2_8x64k", 0.5, ""))
    gpu = Gpu(name="NVIDIA H200", count=2, memory_bytes=1, driver="1")
    return make_report("decode", rows, command=[], gpu=gpu)


def test_series_of_reports() -> None:
    lines = tpot_series([report("in-process-tp2", "dense-tp2"), report("1+1")])
    assert [(line.name, line.batch) for line in lines][:2] == [("dense-tp2", 1), ("dense-tp2", 8)]
    assert {line.name for line in lines} == {"dense-tp2", "in-process-tp2", "1+1"}
    assert [context for context, _ in lines[0].points] == [8192, 65536]
    assert lines[1].points[1][1].value == 13.0
    # A configuration that two reports have is no obstacle to drawing the others.
    chosen = tpot_series([report("a", "dense-tp2"), report("a", "1+1")], ["1+1", "dense-tp2"])
    assert {line.name for line in chosen} == {"1+1", "dense-tp2"}
    assert [line.batch for line in tpot_series([report("1+1")], batch=8)] == [8]


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(SettingsError, match="no tpot_ms"):
        tpot_series([make_report("kernels", [], command=[])])
    with pytest.raises(SettingsError, match=r"no tpot_ms_\* row of batch 2"):
        tpot_series([report("a")], batch=2)
    with pytest.raises(SettingsError, match="is there twice"):
        tpot_series([report("a"), report("a")])
    with pytest.raises(SettingsError, match="--config b: none of these reports has it"):
        tpot_series([report("a")], ["a", "b"])


def test_drawings(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    reports = [report("dense-tp2", "in-process-tp2")]
    svg, png = draw(reports, tmp_path / "deep" / "tpot")
    text = svg.read_text(encoding="utf-8")
    for part in ("in-process-tp2", "batch 8", "64K", "ms per output token", "2 x NVIDIA H200"):
        assert part in text
    assert png.read_bytes().startswith(b"\x89PNG")
    again, _ = draw(reports, tmp_path / "again")
    assert again.read_text(encoding="utf-8") == text  # the same reports give the same file


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("8x64k", (Point(8, 65536),)),
        ("1x8k, 2x1000", (Point(1, 8192), Point(2, 1000))),
        ("8X8K", (Point(8, 8192),)),
        ("1x1m", (Point(1, 1 << 20),)),
    ],
)
def test_points(text: str, points: tuple[Point, ...]) -> None:
    assert parse_points(text) == points


@pytest.mark.parametrize("text", ["", "8", "0x8k", "8x0", "8x8g", "1x8k,1x8192"])
def test_wrong_points_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="--points"):
        parse_points(text)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("COLUMNS", "200")
    return CliRunner()


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("decode", "--points --config --shape --profile --tokenizer --out"),
        ("kernels", "--out"),
        ("serve", "--url --tokenizer --concurrency --input-tokens"),
        ("plot", "--out"),
    ],
)
def test_help(runner: CliRunner, command: str, options: str) -> None:
    result = runner.invoke(app, ["bench", command, "--help"])
    assert result.exit_code == 0
    assert [option for option in options.split() if option not in result.output] == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["decode", "--profile"], "--work-dir"),
        (["decode", "--config", "magic"], "magic is unknown"),
        (["decode", "--points", "many"], "batch x context"),
        (["plot", "/nonexistent.json"], "cannot be read"),
        (["serve", "--tokenizer", ".", "--url", "http://10.1.1.1:1"], "only a server on this"),
    ],
)
def test_bad_input_is_exit_code_2(runner: CliRunner, arguments: list[str], expected: str) -> None:
    result = runner.invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert expected in result.stderr


def test_decode_without_a_gpu_starts_nothing(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(provenance, "query_gpu", lambda: None)
    arguments = ["bench", "decode", "--tokenizer", str(tmp_path), "--out", str(tmp_path / "x.json")]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert "no GPU is visible; run it on one, or let `tandemkv plan` predict" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_serve_says_which_package_it_needs(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench_command, "find_spec", lambda _: None)
    result = runner.invoke(app, ["bench", "serve", "--tokenizer", str(tmp_path)])
    assert result.exit_code == 2
    assert "`pip install datasets`" in result.stderr


def test_plot_command(runner: CliRunner, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "decode.json"
    write_report(report("dense-tp1"), path)
    for name in ("x", "qwen2.5", "qwen2.7.svg"):
        result = runner.invoke(app, ["bench", "plot", str(path), "--out", str(tmp_path / name)])
        assert result.exit_code == 0
        for kind in ("svg", "png"):
            assert (tmp_path / f"{name.removesuffix('.svg')}.{kind}").is_file()
