# SPDX-License-Identifier: Apache-2.0
"""Reports: form, checks, and that nothing of the machine is in them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.evaluation.bench.report import (
    BenchError,
    Failure,
    Gpu,
    Report,
    Row,
    check_name,
    make_report,
    read_report,
    without_paths,
    write_report,
)

GPU = Gpu(name="NVIDIA H200", count=2, memory_bytes=1 << 37, driver="580.1")
ROWS = (Row("tpot_ms_a_8x64k", 7.5, "ms", 7.0, 8.0, 31), Row("ratio", 0.5, ""))


def test_a_report_reads_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "decode.json"
    failures = [Failure("tpot_ms_b_8x64k", "out of memory")]
    report = make_report("decode", ROWS, command=["tandemkv", "x"], failures=failures, gpu=GPU)
    write_report(report, path)
    assert read_report(path) == report
    written = json.loads(path.read_text())
    assert written["rows"][0] == {
        "figure": "tpot_ms_a_8x64k", "value": 7.5, "unit": "ms", "p10": 7.0, "p90": 8.0, "n": 31,
    }  # fmt: skip
    assert written["versions"]["torch"]
    assert written["gpu"]["name"] == "NVIDIA H200"


def test_two_rows_of_one_name_are_refused() -> None:
    with pytest.raises(BenchError, match="ratio are given twice"):
        make_report("decode", [*ROWS, ROWS[1]], command=[])


def test_ratios_of_the_longest_names_are_written(tmp_path: Path) -> None:
    """Else what was measured would be lost."""
    for name in ("a" * 110, "b" * 110):
        check_name(name)
    figure = f"queued_tpot_ratio_{'a' * 110}_vs_{'b' * 110}_256x131072"
    write_report(make_report("decode", [Row(figure, 1.0, "")], command=[]), tmp_path / "r.json")
    assert read_report(tmp_path / "r.json").rows[0].figure == figure
    with pytest.raises(SettingsError, match="at most 110 characters"):
        check_name("a" * 111)


def test_commands_lose_their_paths() -> None:
    command = ["tandemkv", "--out=/home/me/x.json", "--model", "/data/m", "~/y", "--points", "8x8k"]
    assert without_paths(command) == [
        "tandemkv", "--out=x.json", "--model", "m", "y", "--points", "8x8k",
    ]  # fmt: skip
    command = ["mass,file:/home/me/a.jsonl+late,file:~/b.jsonl", "--url", "http://127.0.0.1:30000"]
    assert without_paths(command) == ["mass,file:a.jsonl+late,file:b.jsonl", *command[1:]]


def test_a_written_report_names_no_path_host_or_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USER", "somebody-special")
    monkeypatch.setenv("HOSTNAME", "some-host-name")
    path = tmp_path / "r.json"
    write_report(make_report("decode", ROWS, command=[str(tmp_path / "a.yaml")], gpu=GPU), path)
    text = path.read_text()
    assert not [part for part in ("somebody", "some-host", str(tmp_path)) if part in text]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "not a report"),
        ('{"rows": []}', "not a report"),
        (None, "cannot be read"),
    ],
)
def test_what_is_no_report_is_refused(tmp_path: Path, text: str | None, expected: str) -> None:
    path = tmp_path / "r.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SettingsError, match=expected):
        read_report(path)


def test_another_schema_is_refused(tmp_path: Path) -> None:
    report = make_report("decode", ROWS, command=[])
    fields = {**json.loads(msgspec.json.encode(report)), "schema": 99}
    path = tmp_path / "r.json"
    path.write_text(json.dumps(fields))
    with pytest.raises(SettingsError, match="schema 99"):
        read_report(path)


def test_names_of_figures_are_checked_when_read() -> None:
    report = make_report("decode", ROWS, command=[])
    text = msgspec.json.encode(report).replace(b'"ratio"', b'"Ratio of things"')
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=Report)
