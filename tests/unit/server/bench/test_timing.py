# SPDX-License-Identifier: Apache-2.0
"""Percentiles, rotation of buffers, and suites; times on a GPU where there is one."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.evaluation import timing
from tandemkv.server.evaluation.bench import suites
from tandemkv.server.evaluation.bench.report import BenchError, Row
from tandemkv.server.evaluation.spread import Spread
from tandemkv.server.evaluation.timing import (
    copy_bandwidth,
    num_rotations,
    time_graph,
)


def test_no_samples_is_an_error() -> None:
    with pytest.raises(BenchError, match="no sample"):
        Spread.of([])


def test_rows_of_a_timing() -> None:
    found = Spread.of([float(value) for value in range(10, 21)])  # 10 to 20 us
    assert (found.median, found.p10, found.p90, found.n) == (15.0, 11.0, 19.0, 11)
    assert found.minus(1.0) == Spread(median=14.0, p10=10.0, p90=18.0, n=11)
    assert Row.of("x", found, "us") == Row("x", 15.0, "us", 11.0, 19.0, 11)
    row = Row.bandwidth("y", found, 30_000_000)  # 30 MB in 15 us are 2000 GB/s
    assert row.value == pytest.approx(2000.0)
    assert row.p10 == pytest.approx(30_000 / 19)
    assert row.p90 == pytest.approx(30_000 / 11)
    assert row.unit == "GB/s"


@given(call_bytes=st.integers(1, 1 << 32))
def test_rotation_passes_the_cache_between_two_uses(call_bytes: int) -> None:
    sets = num_rotations(call_bytes)
    assert 2 <= sets <= 64
    assert sets == 64 or (sets - 1) * call_bytes >= timing.L2_BYTES


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_nothing_is_timed() -> None:
    with pytest.raises(SettingsError, match="no GPU is visible"):
        time_graph([lambda: None])
    with pytest.raises(SettingsError, match="no GPU is visible"):
        suites.run_suite("kernels", [], lambda _: None)


@pytest.mark.gpu
def test_a_graph_is_timed_per_call() -> None:
    sets = [torch.zeros(1 << 20, device="cuda") for _ in range(4)]
    calls = [lambda buffer=buffer: buffer.add_(1.0) for buffer in sets]
    found = time_graph(calls, repetitions=5)
    assert found.n == 5
    assert 0 < found.p10 <= found.median <= found.p90
    torch.cuda.synchronize()
    # warm-up outside the graph, warm-up replays, timed replays; capture itself runs nothing
    expected = timing.WARM_UP_CALLS * 2 + 5
    assert all(float(buffer[0]) == expected for buffer in sets)


@pytest.mark.gpu
def test_copy_bandwidth_counts_both_ways() -> None:
    _, moved = copy_bandwidth(num_bytes=1 << 20, repetitions=3)
    assert moved == 2 << 20


def test_suites_are_the_modules_of_the_folder() -> None:
    assert "memory" in suites.modules_of("kernels")
    with pytest.raises(SettingsError, match="there are"):
        suites.run_suite("kernels", ["nothing"], lambda _: None)


def test_a_benchmark_that_fails_is_reported_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> list[Row]:
        raise RuntimeError("out\nof memory")

    for name, rows in (("a", broken), ("b", lambda: [Row("fine", 1.0, "us")])):
        module = types.ModuleType(name)
        module.rows = rows  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, f"{suites.PACKAGE}.kernels_{name}", module)
    monkeypatch.setattr(suites, "modules_of", lambda _: ("a", "b"))
    rows, failures = suites.run_suite("kernels", [], lambda _: None)
    assert [row.figure for row in rows] == ["fine"]
    assert [(item.figure, item.reason) for item in failures] == [
        ("kernels_a", "RuntimeError: out of memory")
    ]
