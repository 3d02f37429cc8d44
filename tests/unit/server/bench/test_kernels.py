# SPDX-License-Identifier: Apache-2.0
"""Rows of `bench kernels`, with the reference implementations of a CPU in the kernels' place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tandemkv.server.cli.commands import app
from tandemkv.server.evaluation import provenance
from tandemkv.server.evaluation.bench import kernels
from tandemkv.server.evaluation.bench.report import BenchError, Row, Spread
from tandemkv.server.evaluation.provenance import Gpu
from tandemkv.server.plan import constants
from tandemkv.server.plan.device_timings import DeviceTimings, Sizes
from tandemkv.server.plan.measure import Timed

TINY = Sizes(
    batch=2, qo_heads=4, kv_heads=2, head_dim=16, hidden=64, intermediate=96, k=32, resident=132,
    fetch_cap=8, missing=8, copy_bytes=1 << 16, weight_rows=128, num_matrices=2,
)  # fmt: skip


def test_each_kernel_has_a_time_and_what_reads_much_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "LENGTHS", (256, 512))
    monkeypatch.setattr(kernels, "SAMPLES", (8,))
    timings = DeviceTimings(torch.device("cpu"), TINY)
    monkeypatch.setattr(timings, "copy", lambda: Timed(2e9, 1000.0))

    def out_of_memory() -> Timed:
        raise RuntimeError("out\nof memory")

    monkeypatch.setattr(timings, "predict", out_of_memory)
    told: list[str] = []
    rows, failures = kernels.kernel_rows(timings, told.append)
    assert rows[:2] == [
        Row("copy_device_us", 1000.0, "us"), Row("copy_device_bandwidth", 2000.0, "GB/s"),
    ]  # fmt: skip
    figures = {row.figure for row in rows}
    assert {"score_keys_int4_8x256_us", "score_keys_int4_8x256_bandwidth", "fetch_us"} <= figures
    assert "score_topk_int4_8x512_bandwidth" not in figures
    assert all(row.value > 0 for row in rows)
    assert [(x.figure, x.reason) for x in failures] == [
        ("predict_query", "RuntimeError: out of memory")
    ]
    assert len(told) == 1 + 2 * 5 + 1 + 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_nothing_is_timed() -> None:
    result = CliRunner().invoke(app, ["bench", "kernels"])
    assert result.exit_code == 2
    assert "no GPU is visible" in result.output


def test_a_report_is_written_where_the_command_was_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docs" / "benchmarks").mkdir(parents=True)  # as in a checkout
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(provenance, "visible_gpu", lambda: Gpu("a GPU", 1, 1 << 30, "1.0"))
    monkeypatch.setattr(constants, "timings_here", lambda: None)

    def kernel_rows(_: object, progress: Callable[[str], None]) -> tuple[list[Row], list[object]]:
        progress("in [fp8] of [/x]")  # brackets are no markup
        return [Row("x", 1.0, "us")], []

    monkeypatch.setattr(kernels, "kernel_rows", kernel_rows)
    result = CliRunner().invoke(app, ["bench", "kernels"])
    assert (result.exit_code, result.stdout) == (0, "kernels.json\n"), result.output
    assert "in [fp8] of [/x]\n" in result.stderr
    assert [path.name for path in tmp_path.rglob("*.json")] == ["kernels.json"]


def test_rows_of_samples() -> None:
    found = Spread.of([float(value) for value in range(10, 21)])  # 10 to 20 us
    assert (found.median, found.p10, found.p90, found.n) == (15.0, 11.0, 19.0, 11)
    assert Row.of("x", found, "us") == Row("x", 15.0, "us", 11.0, 19.0, 11)
    with pytest.raises(BenchError, match="no sample"):
        Spread.of([])
