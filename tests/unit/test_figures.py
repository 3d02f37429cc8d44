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


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    files = [target for target in targets if "://" not in target]
    assert [target for target in files if not (page.parent / target).exists()] == []
