# SPDX-License-Identifier: Apache-2.0
"""Quality and speed joined by settings."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import report_world as world
from rich.console import Console

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.evaluation.bench.report import Row, make_report, write_report
from tandemkv.server.evaluation.quality.configurations import DENSE
from tandemkv.server.evaluation.quality.pareto import draw_pareto, pareto, pareto_view

FAST, SLOW, POOR = (
    "k512-c1-cap32-s128-int4-xnone",
    "k2048-c2-cap2048-s128-int4-xnone",
    "k256-c1-cap256-s128-int4-xnone",
)
BUILT_IN = "k2048-c2-cap128-s128-int4-xnone"


def quality_file(tmp_path: Path) -> Path:
    losses = {FAST: 2.0, SLOW: 0.2, POOR: 3.0, BUILT_IN: 0.5, "streaming-2180": 30.0}
    rows = [
        world.row(
            name,
            {
                "perplexity": world.score([2.0], loss),
                "niah_single": world.score([0.9], -loss / 100, 0.01),
            },
            setting=name,
        )
        for name, loss in losses.items()
    ]
    return world.write(tmp_path / "q.json", rows)


def decode_file(tmp_path: Path, *more: Row) -> Path:
    rows = [
        Row("queued_tpot_ms_dense-tp1_8x32k", 13.0, "ms"),
        Row(f"queued_tpot_ms_grid-{FAST}_8x32k", 7.0, "ms"),
        Row(f"tpot_ms_grid-{FAST}_8x32k", 9.0, "ms"),
        Row(f"queued_tpot_ms_grid-{SLOW}_8x32k", 9.5, "ms"),
        Row(f"queued_tpot_ms_grid-{POOR}_8x32k", 7.5, "ms"),
        Row("queued_tpot_ms_in-process-tp1-samples_8x32k", 8.0, "ms"),
        Row("queued_tpot_ms_1+1-shared_8x32k", 6.0, "ms"),
        *more,
    ]
    path = tmp_path / "d.json"
    write_report(make_report("decode", rows, command=["x"]), path)
    return path


def test_rows_are_joined_by_setting_and_the_front_is_marked(tmp_path: Path) -> None:
    needle, perplexity = pareto(quality_file(tmp_path), decode_file(tmp_path))
    assert (perplexity.task, perplexity.step) == ("perplexity", "8x32k")
    assert [(p.setting, p.step_ms, p.loss.mean, p.is_best) for p in perplexity.points] == [
        (FAST, 7.0, 2.0, True),
        (POOR, 7.5, 3.0, False),
        (BUILT_IN, 8.0, 0.5, True),
        (SLOW, 9.5, 0.2, True),
        (DENSE, 13.0, 0.0, True),
    ]
    assert perplexity.missing == ["streaming-2180"]
    assert needle.unit == "points"
    assert needle.points[0].loss == pytest.approx((2.0, 1.0, 3.0))


def test_the_front_is_shown_fastest_first(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100)
    needle, perplexity = pareto(quality_file(tmp_path), decode_file(tmp_path))
    console.print(pareto_view([needle._replace(title="needles [fp8]"), perplexity]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "needles [fp8]; steps of 8x32k" in text
    shown = text[text.index("perplexity") :]
    assert shown.index("K 512, c 1, cap 32") < shown.index("K 2048, c 2, cap 128")
    assert "+0.50 (+0.00 to +1.00)" in shown
    assert "K 256" not in text


def test_a_panel_a_task_and_a_batch_of_contexts(tmp_path: Path) -> None:
    more = Row(f"queued_tpot_ms_grid-{FAST}_8x64k", 8.0, "ms")
    found = pareto(quality_file(tmp_path), decode_file(tmp_path, more))
    assert [(item.task, item.step) for item in found] == [
        ("niah_single", "8x32k"), ("perplexity", "8x32k"),
        ("niah_single", "8x64k"), ("perplexity", "8x64k"),
    ]  # fmt: skip
    pytest.importorskip("matplotlib")
    svg, png = draw_pareto(found, tmp_path / "out" / "pareto")
    assert ET.parse(svg).getroot().tag.endswith("svg")
    assert png.stat().st_size > 10_000
    text = svg.read_text()
    assert "K 512, c 1, cap 32, 128 samples, int4" in text
    draw_pareto(found, tmp_path / "again")
    assert (tmp_path / "again.svg").read_text() == text


def test_some_tasks_alone(tmp_path: Path) -> None:
    files = quality_file(tmp_path), decode_file(tmp_path)
    assert [item.task for item in pareto(*files, ["perplexity"])] == ["perplexity"]
    with pytest.raises(SettingsError, match="no task records in it, only niah_single, perplexity"):
        pareto(*files, ["records"])


def test_nothing_in_common_names_both_sides(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    rows = [Row("tpot_ms_grid-k64-c1-cap64-s0-int4-xnone_1x8k", 1.0, "ms")]
    write_report(make_report("decode", rows, command=["x"]), path)
    with pytest.raises(SettingsError, match=r"no setting is in both: .*k64-c1.*the same --grid"):
        pareto(quality_file(tmp_path), path)
    write_report(make_report("decode", [Row("other", 1.0, "ms")], command=["x"]), path)
    with pytest.raises(SettingsError, match=r"no tpot_ms_\* row"):
        pareto(quality_file(tmp_path), path)


def test_steps_that_were_waited_for_are_not_beside_queued_ones(tmp_path: Path) -> None:
    waited = [
        Row("tpot_ms_grid-streaming-2180_8x32k", 7.2, "ms"),  # others are queued
        Row(f"tpot_ms_grid-{FAST}_8x64k", 9.0, "ms"),  # here none is
        Row(f"tpot_ms_grid-{SLOW}_8x64k", 12.0, "ms"),
    ]
    found = pareto(quality_file(tmp_path), decode_file(tmp_path, *waited), ["perplexity"])
    drawn = {item.step: {point.setting: point.step_ms for point in item.points} for item in found}
    assert "streaming-2180" not in drawn["8x32k"]
    assert found[0].missing == ["streaming-2180"]
    assert drawn["8x64k"] == {FAST: 9.0, SLOW: 12.0}
