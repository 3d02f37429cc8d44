# SPDX-License-Identifier: Apache-2.0
"""Figures in README and docs are those of the reports that they name."""

from __future__ import annotations

from pathlib import Path

import pytest
import quoted_figures as quoted

PAGES = [quoted.ROOT / "README.md", *sorted((quoted.ROOT / "docs").glob("*.md"))]
UNCOVERED = {
    "README.md": 2,
    "ablations.md": 44,
    "performance.md": 0,
    "policies.md": 26,
    "quality.md": 0,
    "reliability.md": 3,
}
"""Numbers in tables that name no report, on pages that quote measurements.

They may only become fewer: what papers say, sections of them and defaults are among these.
"""
REPORTS = sorted(
    [
        *(quoted.ROOT / "docs/quality").rglob("*.json"),
        *(quoted.ROOT / "docs/benchmarks").glob("*.json"),
        *(
            quoted.ROOT / f"docs/acceptance/{name}.json"
            for name in ("needle", "mass", "perplexity")
        ),
    ]
)
LONGEST_PAGE = {"quality.md": 120, "performance.md": 120}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_figure_that_names_a_report_is_in_it(page: Path) -> None:
    assert quoted.problems(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_no_more_figures_without_a_report(page: Path) -> None:
    found = quoted.uncovered(page.read_text(encoding="utf-8"))
    assert len(found) <= UNCOVERED.get(page.name, len(found)), found


@pytest.mark.parametrize("name", LONGEST_PAGE)
def test_pages_stay_short(name: str) -> None:
    lines = (quoted.ROOT / "docs" / name).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= LONGEST_PAGE[name]


@pytest.mark.parametrize("report", REPORTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_reports_are_summaries(report: Path) -> None:
    assert len(report.read_text(encoding="utf-8").splitlines()) <= 200


def test_what_commands_make_is_not_kept() -> None:
    folder = quoted.ROOT / "docs/quality"
    assert [*folder.rglob("*.html"), *folder.rglob("*.svg"), *folder.rglob("runs")] == []


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quoted, "ROOT", tmp_path)
    (tmp_path / "r.json").write_text(
        '{"a": {"b": [1.0, 2.504]}, "rows": ['
        '{"figure": "t_x", "value": 8.0}, {"figure": "t_y", "value": 3.6},'
        '{"policy": "p", "variant": "v=1", "scores": {"n": {"value": 0.8567, "items": [9.99]}}}]}'
    )


PAGE = """# A
| x | 3.60 (2.22x) | +2.50 |
|---|---|---|

<!-- figures: r.json 3.60 t_y; 2.22 t_x / t_y;
+2.50 a.b.1 -->

## B
| y | 0.857 | 85.7 % |

<!-- from: r.json -->
| z | 7.77 |
"""


def test_named_figures_are_found_and_others_counted(report: None) -> None:
    assert quoted.problems(PAGE) == []
    assert quoted.uncovered(PAGE) == ["7.77"]
    assert quoted.value_of(quoted.read("r.json"), "100 * p, v=1: n.value") == pytest.approx(85.67)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("3.60 t_y", "3.60 t_x", "3.60: t_x is 8 in r.json"),
        ("3.60 t_y", "3.60 t_z", "r.json has no t_z"),
        ("3.60 t_y", "3.61 t_y", "3.61 is named below a text that does not have it"),
        ("| 0.857 |", "| 0.858 |", "0.858 is in none of r.json"),
        ("| 0.857 |", "| 9.99 |", "9.99 is in none of r.json"),
        ("figures: r.json", "figures: s.json", "s.json has no t_y"),
    ],
)
def test_a_wrong_figure_is_found(report: None, old: str, new: str, message: str) -> None:
    assert old in PAGE
    assert any(message in text for text in quoted.problems(PAGE.replace(old, new)))
