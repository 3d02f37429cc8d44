# SPDX-License-Identifier: Apache-2.0
"""Pictures in the docs are what their sources draw, and links in the docs lead somewhere."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "docs/figures").glob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_picture_is_what_its_source_draws(source: Path) -> None:
    drawn: str = runpy.run_path(str(source))["draw"]()
    assert source.with_suffix(".svg").read_text(encoding="utf-8") == drawn, f"run {source}"


def headings(page: Path) -> set[str]:
    """Anchors of a page, as GitHub makes them."""
    found = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text(encoding="utf-8"))
    wrong = []
    for target, anchor in links:
        if "://" in target:
            continue
        file = page.parent / target if target else page
        if not file.exists() or (anchor and anchor not in headings(file)):
            wrong.append(f"{target}#{anchor}")
    assert wrong == []


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs/decisions").glob("*.md")), ids=lambda p: p.name
)
def test_a_decision_record_has_at_most_40_lines(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 40
