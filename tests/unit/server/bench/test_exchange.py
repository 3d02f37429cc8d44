# SPDX-License-Identifier: Apache-2.0
"""Exchanges of layers, read from made-up traces of a cache rank's steps."""

from __future__ import annotations

import contextlib
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tandemkv.kernels.triton_ops import step_flags
from tandemkv.server.evaluation.bench import decode, exchange
from tandemkv.server.evaluation.bench.configurations import BUILT_IN
from tandemkv.server.evaluation.bench.decode import DecodeRun, run_decode
from tandemkv.server.evaluation.bench.decode_steps import RESULT_FILE, TRACE_FOLDER, Point
from tandemkv.server.evaluation.bench.exchange import Exchange, exchange_rows, exchanges

POINT = Point(8, 32768)
Event = dict[str, Any]


def kernel(name: str, stream: int, launch: int, begin: float, end: float) -> Event:
    """Return a kernel as Kineto writes it."""
    args = {"device": 1, "stream": stream, "correlation": launch, "grid": [1, 1, 1]}
    return {
        "ph": "X", "cat": "kernel", "name": name, "pid": 1, "tid": stream,
        "ts": begin, "dur": end - begin, "args": args,
    }  # fmt: skip


def step(launch: int, at: float, taken: float) -> list[Event]:
    """Two layers of a step, whose streams arrive at 20 and 100, and a late one.

    Streams are as a graph's executor chooses them: a selection is spread over several, and waits
    and raises of different layers share one. The second begins to wait before the first is done.
    """
    parts = [
        ("_wait_kernel", 7, 0, 5),  # for the step's beginning
        ("_wait_kernel", 7, 6, 20), ("_project_kernel", 7, 19, 24), ("scan_kernel", 21, 24, 60),
        ("_exchange_kernel", 21, 60, 19 + taken), ("_raise_kernel", 22, 70, 20 + taken),
        ("_wait_kernel", 22, 6, 100), ("_project_kernel", 22, 99, 104),
        ("_exchange_kernel", 7, 150, 109 + taken), ("_raise_kernel", 7, 109, 110 + taken),
        ("_project_kernel", 22, 260, 265), ("_exchange_kernel", 22, 270, 280),  # late
        ("_wait_kernel", 7, 290, 300), ("_append_kernel", 7, 300, 310),
        ("_raise_kernel", 7, 310, 312),  # the step is finished
    ]  # fmt: skip
    return [kernel(name, stream, launch, at + a, at + b) for name, stream, a, b in parts]


def write(folder: Path, events: list[Event], number: int = 0) -> Path:
    path = folder / TRACE_FOLDER / f"decode_8x32768_engine{number}.json.gz"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


def test_selections_of_two_lanes_are_paired_in_their_order() -> None:
    launches = {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 0, "dur": 9}
    other = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}, launches,
        *(kernel(f"_{name}_kernel", 7, 90 + n, 0, 5) for n, name in enumerate(("wait", "raise"))),
    ]  # fmt: skip
    found = exchanges([*step(3, 1000, 80), *other, *step(2, 0, 60)][::-1])
    assert sorted(found) == [
        Exchange(60, 14), Exchange(70, 94), Exchange(80, 14), Exchange(90, 94),
    ]  # fmt: skip


@pytest.mark.parametrize("lacks", ["_wait_kernel", "_raise_kernel"])
def test_a_step_that_is_not_whole_or_of_another_form_has_none(lacks: str) -> None:
    events = step(2, 0, 60)
    less = [event for event in events if event["name"] != lacks]
    assert exchanges(less) == []
    first = next(event for event in events if event["name"] == lacks)
    assert exchanges([event for event in events if event is not first]) == []
    early = [kernel("_wait_kernel", 7, 2, 0, 1), *less, kernel("_raise_kernel", 7, 2, 0, 1)]
    assert exchanges(early) == []


def test_a_flag_that_is_raised_before_its_input_has_come_is_of_another_form() -> None:
    assert len(exchanges(step(2, 0, 60))) == 2
    assert exchanges(step(2, 0, -15)) == []


def test_the_kernels_are_named_as_a_trace_has_them() -> None:
    for name in (exchange._WAIT, exchange._RAISE):
        assert hasattr(step_flags, name)


def test_a_row_is_of_all_cache_ranks(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path, step(2, 0, 60) + step(3, 400, 80), number)
    told: list[str] = []
    (row,) = exchange_rows("1+3-shared", [POINT], tmp_path, told.append)
    assert (row.figure, row.unit, row.n) == ("exchange_us_1+3-shared_8x32k", "us", 12)
    assert (row.p10, row.value, row.p90) == (60, 75, 90)
    assert row.note == "3 cache ranks; their lanes had waited for the input 54 us"
    assert told == []


@pytest.mark.parametrize("profile", [True, False])
def test_it_is_in_a_report_with_profile(
    profile: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of cache ranks with a GPU of their own, and of this run."""
    told: list[str] = []
    spread = {"median": 8.0, "p10": 8.0, "p90": 8.0}
    point = {"batch": 8, "context": 32768, "waited_ms": spread, "queued_ms": spread}

    def child(_: object, folder: Path, *__: object) -> tuple[str, str]:
        (folder / RESULT_FILE).write_text(json.dumps([point]))
        if profile and folder.name.startswith("1+1-shared_"):
            write(folder, step(2, 0, 60))
        return "exit code 0", ""

    def beside(_: object, __: object, folder: Path, to: Path | None) -> Any:
        assert to == (folder / TRACE_FOLDER if profile else None)
        return contextlib.nullcontext()

    monkeypatch.setattr(decode, "run_child", child)
    monkeypatch.setattr(decode, "cache_rank_beside", beside)
    names = ("in-process-tp1", "1+1-shared", "1+1-shared-stress", "1+1-message")
    run = DecodeRun(
        model_dir=tmp_path / "model", tokenizer_dir=tmp_path, points=(POINT,),
        configurations={name: BUILT_IN[name] for name in names}, work_dir=tmp_path,
        profile=profile,
    )  # fmt: skip
    old = write_old(tmp_path / "1+1-shared-stress_batch8")
    result = run_decode(run, told.append)
    found = [row.figure for row in result.rows if row.figure.startswith("exchange_us_")]
    assert found == (["exchange_us_1+1-shared_8x32k"] if profile else [])
    lines = [line for line in told if "exchange_us_" in line]
    assert len(lines) == int(profile)
    assert all(line.startswith("  exchange_us_1+1-shared-stress_8x32k: none") for line in lines)
    assert result.failures == ()
    assert old.exists() is not profile


def write_old(folder: Path) -> Path:
    folder.mkdir()
    return write(folder, step(2, 0, 60))


def test_what_cannot_be_read_is_told_in_a_line_each(tmp_path: Path) -> None:
    told: list[str] = []
    assert exchange_rows("ours", [POINT], tmp_path, told.append) == []
    path = write(tmp_path, [])
    assert exchange_rows("ours", [POINT], tmp_path, told.append) == []
    path.write_bytes(path.read_bytes()[:-9])
    assert exchange_rows("ours", [POINT], tmp_path, told.append) == []
    reasons = ["see the cache rank's log", "no step in them", "a trace cannot be read (EOFError"]
    for line, reason in zip(told, reasons, strict=True):
        assert line.startswith("  exchange_us_ours_8x32k: ")
        assert reason in line
        assert "\n" not in line
