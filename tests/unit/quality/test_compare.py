# SPDX-License-Identifier: Apache-2.0
"""Two reports beside each other."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
import report_world as world
from rich.console import Console
from typer.testing import CliRunner

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.cli.commands import app
from tandemkv.server.evaluation.quality.compare import compare, comparison_view
from tandemkv.server.evaluation.quality.configurations import Configuration
from tandemkv.server.evaluation.quality.results import Answer, TaskResult
from tandemkv.server.evaluation.quality.summary import summarise

ONES, HALF = [1.0] * 40, [1.0, 0.0] * 20


def reports(tmp_path: Path, **other: object) -> tuple[Path, Path]:
    nll = [2.0, 2.5, 3.0]
    one = world.write(
        tmp_path / "a.json",
        [
            world.dense({"niah_single": world.score(ONES)}),
            world.row(
                "as served",
                {"niah_single": world.score(ONES), "perplexity": world.score(nll)},
                fetch_cap=64, setting="x",
            ),
        ],
    )  # fmt: skip
    (tmp_path / "b").mkdir()
    two = world.write(
        tmp_path / "b" / "report.json",
        [
            world.row(
                "as served",
                {
                    "niah_single": world.score(HALF),
                    "perplexity": world.score([value - 0.01 for value in nll]),
                },
                fetch_cap=128, setting="y",
            )
        ],
        **other,
    )  # fmt: skip
    return one, two.parent


def test_differences_are_paired_and_told_with_the_settings(tmp_path: Path) -> None:
    (found,) = compare(*reports(tmp_path))
    needle, perplexity = found.tasks
    assert needle.gap.mean == pytest.approx(-0.5)
    assert needle.gap.high < -0.3
    assert needle.verdict == "B is worse"
    assert perplexity.gap.mean == pytest.approx(100 * math.expm1(-0.01))
    assert perplexity.verdict == "B is better"
    assert found.settings == {"fetch_cap": (64, 128)}
    console = Console(file=io.StringIO(), width=120)
    task = found.tasks[0]._replace(task="needle [/x]")
    found = found._replace(names=("as [fp8]", "as [fp8]"), tasks=[task, *found.tasks[1:]])
    console.print(comparison_view([found], tmp_path / "a.json", tmp_path / "b"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "-0.500 (-0.6" in text
    assert "as [fp8]" in text
    assert "needle [/x]" in text
    assert "-1.00 % (" in text
    assert "settings that differ: fetch_cap 64 -> 128" in text


def test_equal_answers_show_no_difference_and_exit_code_0(tmp_path: Path) -> None:
    one, _ = reports(tmp_path)
    done = CliRunner().invoke(app, ["quality", "--compare", str(one), str(one)])
    assert done.exit_code == 0
    assert "no difference seen" in done.output


def test_dense_rows_are_compared_where_both_reports_have_one(tmp_path: Path) -> None:
    """Their difference is noise, or that of a setting of both sides."""
    files = []
    for name, items in (("a", ONES), ("b", HALF)):
        scores = {"niah_single": world.score(items)}
        rows = [world.dense(scores), world.row("as served", scores)]
        files.append(world.write(tmp_path / f"{name}.json", rows))
    dense, sparse = compare(*files)
    assert dense.names == ("dense", "dense")
    assert dense.tasks[0].gap.mean == sparse.tasks[0].gap.mean == pytest.approx(-0.5)
    alone = world.write(tmp_path / "c.json", [world.dense({"niah_single": world.score(ONES)})])
    assert [found.names for found in compare(alone, alone)] == [("dense", "dense")]


def test_the_only_rows_are_compared_whatever_their_names(tmp_path: Path) -> None:
    scores = {"niah_single": world.score(ONES)}
    one = world.write(tmp_path / "a.json", [world.row("as served", scores)])
    two = world.write(tmp_path / "b.json", [world.row("K 512", scores)])
    (found,) = compare(one, two)
    assert found.names == ("look_ahead, as served", "look_ahead, K 512")
    several = world.write(tmp_path / "c.json", [world.row(b, scores) for b in ("K 1", "K 2")])
    with pytest.raises(SettingsError, match="Give reports of the same configurations"):
        compare(one, several)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"model": "n"}, "are of another model: m and n; measure both with the same one"),
        ({"model_hash": "i"}, "are of another weights: h and i"),
        ({"tasks": {"mass": world.TASK}}, "measure one of them in both"),
        (
            {"tasks": {"niah_single": {**world.TASK, "samples_digest": "s2", "seed": 1}}},
            "niah_single has seed 0 and 1; give the second one --samples-from",
        ),
        (
            {
                "tasks": {"niah_single": {**world.TASK, "samples_digest": "s2"}},
                "corpus": [{"name": "u"}],
            },
            r"other texts \(--corpus\)",
        ),
    ],
)
def test_what_cannot_be_compared_says_what_to_do(
    tmp_path: Path, other: dict[str, object], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        compare(*reports(tmp_path, **other))


def test_parts_of_one_campaign_are_not_paired(tmp_path: Path) -> None:
    """They are as many samples, and others."""
    scores = [{"niah_single": world.score(ONES) | {"items_of": of}} for of in ("a", "b", "")]
    one, other, old = (
        world.write(tmp_path / f"{i}.json", [world.row("as served", each)])
        for i, each in enumerate(scores)
    )
    with pytest.raises(SettingsError, match=r"niah_single: as many .* are others \(--part\)"):
        compare(one, other)
    assert compare(one, old)[0].tasks[0].verdict == "no difference seen"


def test_a_score_tells_of_which_samples_it_is() -> None:
    tasks = {"niah_single": {"samples_digest": "s", "measure": "score"}}
    described = {"tasks": tasks, "num_kv_heads": 1, "head_dim": 2, "dtype": "float32"}
    configuration = Configuration(
        system="sglang", policy="dense", budget="all", attended_tokens=None, num_layers=1
    )
    found = []
    for names in ("02", "13"):
        answers = [Answer(name=name, score=1.0) for name in names]
        result = TaskResult(
            task="niah_single", samples_digest="s", digest="d", answers=answers, seconds=1.0
        )
        (row,) = summarise(described, [(configuration, {"niah_single": result})]).rows
        found.append(row.scores["niah_single"].items_of)
    assert len(set(found)) == 2


def test_files_that_are_no_reports(tmp_path: Path) -> None:
    one, _ = reports(tmp_path)
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(SettingsError, match=r"not a report\.json"):
        compare(one, tmp_path / "x.json")
    with pytest.raises(SettingsError, match="cannot be read"):
        compare(one, tmp_path / "none.json")
    fewer = world.row("as served", {"niah_single": world.score(ONES[:5])})
    with pytest.raises(SettingsError, match="40 and 5 samples were asked"):
        compare(one, world.write(tmp_path / "c.json", [fewer]))
