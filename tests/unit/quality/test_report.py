# SPDX-License-Identifier: Apache-2.0
"""Figures and tables from a few recorded answers."""

from __future__ import annotations

import io
import json
import math
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.evaluation.quality.configurations import Configuration
from tandemkv.server.evaluation.quality.report import write_campaign, write_report
from tandemkv.server.evaluation.quality.report_tables import settings_table, tables
from tandemkv.server.evaluation.quality.results import (
    Answer,
    Probes,
    TaskResult,
    read_result,
    read_runs,
    write_configuration,
    write_result,
)
from tandemkv.server.evaluation.quality.summary import is_group, summarise

MEASURES = {
    "perplexity": "perplexity",
    "continuation": "agreement",
    "niah_single": "score",
    "mass": "mass",
}
DESCRIBED: dict[str, Any] = {
    "format": "tandemkv-quality/1",
    "command": "tandemkv quality m | <x>",
    "date": "2026-01-02",
    "model": "tiny & small",
    "dtype": "float32",
    "device": "cpu",
    "python": "3.11",
    "versions": {"tandemkv": "0.1.0"},
    "cores": 2,
    "num_layers": 10,
    "num_kv_heads": 2,
    "head_dim": 16,
    "concurrency": 4,
    "corpus": [{"name": "text", "characters": 9, "sha256": "ab"}],
    "corpus_absent": ["change log"],
    "tasks": {
        name: {
            "title": name.title(),
            "definition": f"what {name} is",
            "source": "a paper",
            "measure": measure,
            "samples": 2,
            "samples_digest": "s",
            "context_tokens": 100,
            "forced_tokens": 20,
            "seed": 0,
            "prompt_style": "raw",
            "longest_tokens": 120,
        }
        for name, measure in MEASURES.items()
    },
}


def result(task: str, answers: list[Answer], **options: Any) -> TaskResult:
    given: dict[str, Any] = {"samples_digest": "s", "digest": "d", "seconds": 1.0}
    return TaskResult(task=task, answers=answers, **(given | options))


def scores(*values: float) -> list[Answer]:
    return [Answer(name=str(i), text="x", score=v) for i, v in enumerate(values)]


def nlls(value: float) -> list[Answer]:
    return [Answer(name=str(i), nll=[value + i] * 20) for i in range(2)]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    dense = Configuration(
        system="sglang", policy="dense", budget="all", attended_tokens=None, num_layers=10
    )
    ours = Configuration(
        system="tandemkv", policy="look_ahead", budget="25%", attended_tokens=25, num_layers=10,
        exact_layers=[0, 1], selection={"budget_tokens": 8}, sees_question="chosen anew",
    )  # fmt: skip
    peer = Configuration(
        system="kvpress", policy="SnapKV", budget="25%", attended_tokens=25, num_layers=10
    )
    measured = {"attended_share": 0.25, "fetched_rows_per_step": 32.0, "request_steps": 10.0}
    idle = measured | {"fetched_rows_per_step": 0.0, "request_steps": 30.0}
    differing = [True] * 3 + [False] + [True] * 6
    probes = Probes(
        mass=[0.9, 0.8], oracle_mass=[1.0, 0.8], recall=[0.5, 0.7], mass_by_layer={"2": 0.6}
    )
    runs = [
        (
            dense,
            [
                result("perplexity", nlls(2.0)),
                result("niah_single", scores(1.0, 1.0)),
                result("continuation", [Answer(name="0", tokens=[1] * 11, agrees=[True] * 10)]),
            ],
        ),
        (
            ours,
            [
                result("perplexity", nlls(2.01), **measured),
                result("niah_single", scores(1.0, 0.5), **measured),
                result("continuation", [Answer(name="0", agrees=differing)], **idle),
                result("mass", nlls(2.0), probes=probes, **measured),
            ],
        ),
        (peer, [result("perplexity", nlls(2.2), attended_share=0.3)]),
    ]
    for configuration, results in runs:
        folder = tmp_path / "runs" / configuration.slug
        write_configuration(folder, configuration)
        for one in results:
            write_result(folder, one)
    write_campaign(tmp_path, DESCRIBED)
    return tmp_path


def rows_of(out: Path) -> dict[str, Any]:
    return {row.policy: row for row in summarise(DESCRIBED, read_runs(out / "runs")).rows}


def test_figures_are_those_worked_out_by_hand(out: Path) -> None:
    rows = rows_of(out)
    assert list(rows) == ["dense", "look_ahead", "SnapKV"]
    ours = rows["look_ahead"].scores
    assert ours["perplexity"].value == pytest.approx(math.exp(2.51))
    assert ours["perplexity"].change == pytest.approx(100 * math.expm1(0.01))
    assert ours["niah_single"].value == 0.75
    assert ours["niah_single"].change == -0.25
    assert (ours["niah_single"].low, ours["niah_single"].high) == (0.5, 1.0)
    assert ours["continuation"].value == pytest.approx(0.9)
    assert ours["continuation"].details["median_first_difference"] == 3
    assert ours["mass"].value == pytest.approx(0.85)
    assert ours["mass"].details == pytest.approx(
        {
            "oracle_mass": 0.9,
            "of_oracle": 0.85 / 0.9,
            "recall": 0.6,
            "worst_layer": 0.6,
            "layers 2-2": 0.6,
        }
    )
    assert ours["perplexity"].attended_share == pytest.approx(0.2 + 0.8 * 0.25)
    assert rows["SnapKV"].scores["perplexity"].attended_share == pytest.approx(0.3)
    assert rows["dense"].scores["perplexity"].attended_share == 1.0
    assert rows["dense"].scores["perplexity"].change is None
    # 32 rows of a key and a value, 16 numbers of 4 bytes each, in 30 of 60 steps of a request
    assert rows["look_ahead"].moved_rows == pytest.approx(16.0)
    assert rows["look_ahead"].moved_kib == pytest.approx(2.0)
    assert rows["SnapKV"].moved_rows is None


@pytest.mark.parametrize(("kv_dtype", "kib"), [("auto", 0.5), ("fp8_e4m3", 0.125)])
def test_rows_that_moved_have_the_size_in_which_they_are_kept(kv_dtype: str, kib: float) -> None:
    """Four rows a step, of a key and a value, of 32 numbers together."""
    one = Configuration(
        system="tandemkv", policy="look_ahead", budget="512", attended_tokens=30, num_layers=10,
        resolved={"kv_dtype": kv_dtype},
    )  # fmt: skip
    assert (DESCRIBED["head_dim"], DESCRIBED["dtype"]) == (16, "float32")
    found = result("perplexity", nlls(2.0), fetched_rows_per_step=4.0, request_steps=5.0)
    (row,) = summarise(DESCRIBED, [(one, {"perplexity": found})]).rows
    assert row.moved_kib == pytest.approx(kib)


@pytest.mark.parametrize(("link", "rows"), [("local", 8.0), ("shared", 4.0)])
def test_rows_that_moved_are_of_all_heads(link: str, rows: float) -> None:
    """In SGLang's processes the first rank alone is asked, whose heads are half of them."""
    one = Configuration(
        system="tandemkv", policy="look_ahead", budget="512", attended_tokens=30, num_layers=10,
        resolved={"link": link, "tensor_parallel": 2},
    )  # fmt: skip
    found = result("perplexity", nlls(2.0), fetched_rows_per_step=4.0, request_steps=5.0)
    (row,) = summarise(DESCRIBED, [(one, {"perplexity": found})]).rows
    assert row.moved_rows == pytest.approx(rows)


def test_tokens_attended_to_on_the_cache_rank_count_in_the_share() -> None:
    there = Configuration(
        system="tandemkv", policy="lfps", budget="512", attended_tokens=30, num_layers=10,
        remote_tokens=20,
    )  # fmt: skip
    counters = {
        "inference.context_tokens_total": 400.0,  # 4 steps of 100
        # To 5 of at most 20 in each step, layer and KV head, by two cache ranks together.
        "cache.attended_by_policy_total": 4.0 * 10 * 5 * DESCRIBED["num_kv_heads"],
    }
    one = result("perplexity", nlls(2.0), attended_share=0.1, request_steps=4.0, counters=counters)
    (row,) = summarise(DESCRIBED, [(there, {"perplexity": one})]).rows
    assert row.scores["perplexity"].attended_share == pytest.approx(0.1 + 5 / 100)
    one = msgspec.structs.replace(one, counters={"inference.context_tokens_total": 400.0})
    (row,) = summarise(DESCRIBED, [(there, {"perplexity": one})]).rows
    assert row.scores["perplexity"].attended_share == pytest.approx(0.1)
    all_exact = msgspec.structs.replace(there, exact_layers=list(range(10)))
    (row,) = summarise(DESCRIBED, [(all_exact, {"perplexity": one})]).rows
    assert row.scores["perplexity"].attended_share == 1.0


def test_mass_by_groups_of_layers() -> None:
    """28 layers in groups of six, the last one shorter; a column each in the report."""
    many = Configuration(
        system="tandemkv", policy="quest", budget="512", attended_tokens=30, num_layers=30,
        exact_layers=[0, 1],
    )  # fmt: skip
    by_layer = {str(layer): layer / 100 for layer in range(2, 30)}
    probes = Probes(mass=[0.5], oracle_mass=[0.5], recall=[0.5], mass_by_layer=by_layer)
    one = result("mass", nlls(2.0), probes=probes)
    summary = summarise(DESCRIBED, [(many, {"mass": one})])
    found = {k: v for k, v in summary.rows[0].scores["mass"].details.items() if is_group(k)}
    assert list(found) == [
        "layers 2-7", "layers 8-13", "layers 14-19", "layers 20-25", "layers 26-29",
    ]  # fmt: skip
    assert list(found.values()) == pytest.approx([0.045, 0.105, 0.165, 0.225, 0.275])
    (table,) = [t for t in tables(DESCRIBED, summary) if t.title == "Attention mass"]
    assert table.header[-5:] == list(found)
    assert table.rows[0][-5:] == ["0.045", "0.105", "0.165", "0.225", "0.275"]


def test_markdown_holds_every_system_in_one_table(out: Path) -> None:
    write_report(out, Console(file=io.StringIO()))
    text = (out / "report.md").read_text()
    table = text[text.index("## Scores") : text.index("## What is")]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert len(lines) == 5
    assert {line.count("|") for line in lines} == {6}
    assert lines[3].startswith("| look_ahead | 25% | +1.01 % (+1.01 to +1.01) | 0.900 (")
    assert "first difference 3" in lines[3]
    assert lines[4].startswith("| SnapKV (kvpress) | 25% | +22.14 %")
    assert lines[4].endswith("| – | – |")
    assert "Built-in texts absent here: change log." in text
    assert "what niah_single is" in text


def test_html_is_whole_and_escaped(out: Path) -> None:
    write_report(out, Console(file=io.StringIO()))
    text = (out / "report.html").read_text()
    assert "<title>Quality: tiny &amp; small</title>" in text
    assert "<x>" not in text
    assert not any(outside in text for outside in ("<script", "<link", "src=", "@import"))
    assert text.count("<table>") == text.count("</table>") == 4


def test_plots_are_drawn_the_same_every_time(out: Path) -> None:
    pytest.importorskip("matplotlib")
    write_report(out, Console(file=io.StringIO()))
    plots = {path.stem: path.read_text() for path in (out / "plots").glob("*.svg")}
    assert set(plots) == set(MEASURES)
    for svg in plots.values():
        assert ET.fromstring(svg).tag.endswith("svg")
    assert "SnapKV (kvpress)" in plots["perplexity"]
    write_report(out, Console(file=io.StringIO()))
    assert (out / "plots" / "mass.svg").read_text() == plots["mass"]


def test_perplexities_without_dense_are_not_told_as_changes(out: Path) -> None:
    (out / "runs" / "sglang-dense-all" / "perplexity.json").unlink()
    write_report(out, Console(file=io.StringIO()))
    assert "| system | budget | Perplexity (perplexity) |" in (out / "report.md").read_text()
    plot = (out / "plots" / "perplexity.svg").read_text()
    assert ">perplexity</text>" in plot
    assert "change of perplexity" not in plot


def test_without_matplotlib_the_report_says_so(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    console = Console(file=io.StringIO(), width=200)
    paths = write_report(out, console)
    assert "tandemkv[quality]" in console.file.getvalue()  # type: ignore[attr-defined]
    assert [path.name for path in paths] == ["report.json", "report.md", "report.html"]


def test_tasks_of_an_earlier_campaign_stay_in(out: Path) -> None:
    only = {**DESCRIBED, "date": "2026-02-03", "tasks": {"mass": DESCRIBED["tasks"]["mass"]}}
    merged = write_campaign(out, only)
    assert set(merged["tasks"]) == set(MEASURES)
    assert json.loads((out / "campaign.json").read_text())["date"] == "2026-02-03"


def test_texts_of_tasks_that_stay_in_are_told(out: Path) -> None:
    text, tasks = {"name": "other", "characters": 5, "sha256": "cd"}, DESCRIBED["tasks"]
    one = {"corpus": [text], "tasks": {"mass": tasks["mass"]}}
    write_campaign(out, DESCRIBED | one)
    assert write_campaign(out, DESCRIBED | one)["corpus"] == [text, *DESCRIBED["corpus"]]
    write_report(out, Console(file=io.StringIO()))
    assert "Texts: other (cd), text (ab)." in (out / "report.md").read_text()
    # Once all tasks are of other texts, those of before are nobody's.
    assert write_campaign(out, DESCRIBED | {"corpus": [text]})["corpus"] == [text]


def test_results_of_another_model_are_not_mixed_in(out: Path) -> None:
    for change in ({"model_hash": "other"}, {"dtype": "bfloat16"}):
        with pytest.raises(SettingsError, match="give another --out"):
            write_campaign(out, {**DESCRIBED, **change})
    assert json.loads((out / "campaign.json").read_text())["dtype"] == DESCRIBED["dtype"]


@pytest.mark.parametrize("text", ["[]", "null", '{"tasks": []}'])
def test_a_file_that_is_no_campaign_is_named(text: str, out: Path) -> None:
    (out / "campaign.json").write_text(text)
    for call in (lambda: write_campaign(out, DESCRIBED), lambda: write_report(out, Console())):
        with pytest.raises(SettingsError, match=r"campaign\.json: .* did not write it"):
            call()


def test_errors_name_the_file(out: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no campaign\.json there"):
        write_report(tmp_path / "none", Console(file=io.StringIO()))
    with pytest.raises(SettingsError, match="no results there"):
        read_runs(tmp_path / "none")
    folder = out / "runs" / "sglang-dense-all"
    (folder / "perplexity.json").write_text("{}")
    with pytest.raises(SettingsError, match=r"perplexity\.json: not a result of this version"):
        read_result(folder, "perplexity")
    other = {**DESCRIBED, "tasks": {"x": {**DESCRIBED["tasks"]["mass"], "samples_digest": "no"}}}
    (folder / "perplexity.json").unlink()
    with pytest.raises(SettingsError, match="no result is of the tasks"):
        summarise(other, read_runs(out / "runs"))


def test_settings_stand_beside_those_of_serve(out: Path) -> None:
    served = {"budget_tokens": 1024, "fetch_cap": 64, "index_dtype": "int4", "late_layers": 0}
    own = served | {"budget_tokens": 316, "fetch_cap": 316, "late_layers": 1}
    row = rows_of(out)["look_ahead"]
    other = rows_of(out)["SnapKV"]
    refused = msgspec.structs.replace(row, budget="5%", settings={"refused": "too few"})
    rows = [msgspec.structs.replace(row, settings=own), refused, other]
    table = settings_table({"served": served}, rows)
    assert [line[0] for line in table.rows] == [
        "`tandemkv serve` here", "look_ahead, 25%", "look_ahead, 5%",
    ]  # fmt: skip
    assert table.rows[0][1:6] == ["1024", "open", "64", "open", "int4"]
    assert table.rows[1][1:6] == ["316", "open", "316", "open", "int4"]
    assert table.rows[1][-1] == "late_layers 1 (0)"
    assert table.rows[2][-1] == "refused: too few"
    assert {len(line) for line in table.rows} == {len(table.header)}
    table = settings_table({"served": {"refused": "no room"}}, [])
    assert table.rows[0][0] == "serve would refuse: no room"


def test_long_generation_is_told_by_quarters(tmp_path: Path) -> None:
    task = {**DESCRIBED["tasks"]["perplexity"], "measure": "long", "title": "Long"}
    described = {**DESCRIBED, "tasks": {"long": task}}
    dense = Configuration(
        system="sglang", policy="dense", budget="all", attended_tokens=None, num_layers=10
    )
    ours = Configuration(
        system="tandemkv", policy="look_ahead", budget="as served", attended_tokens=25,
        num_layers=10,
    )  # fmt: skip
    levels = [Answer(name="0", nll=[1.0] * 96 + [1.02] * 32, best=[3] * 128)]
    reference = [Answer(name="0", nll=[1.0] * 128, best=[3] * 64 + [4] * 64)]
    runs = [
        (dense, {"long": result("long", reference)}),
        (ours, {"long": result("long", levels)}),
    ]
    summary = summarise(described, runs)
    (table,) = [t for t in tables(described, summary) if t.title == "Long generation"]
    assert table.rows[0][3:] == ["perplexity 2.718"] * 4 + ["–"]
    assert table.rows[1][3] == "+0.00 % (+0.00 to +0.00), 1.000"
    assert table.rows[1][6] == "+2.02 % (+2.02 to +2.02), 0.000"
    assert table.rows[1][7] == "+2.02 % (+2.02 to +2.02)"
