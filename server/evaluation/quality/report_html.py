# SPDX-License-Identifier: Apache-2.0
"""The report as one HTML file that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from .report_markdown import headline, tables
from .report_table import Table
from .summary import Summary

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem;
  color: #222; background: #fff }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { border-bottom: 1px solid #ddd; padding: .3rem .7rem; text-align: left;
  vertical-align: top }
th { border-bottom: 2px solid #888 }
tbody tr:hover { background: #f4f6f8 }
p.note, header p { color: #555; max-width: 60rem }
.plots { display: flex; flex-wrap: wrap; gap: 1rem }
.plots svg { max-width: 38rem; height: auto }
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #181a1b } th, td { border-color: #444 }
  tbody tr:hover { background: #24282b } p.note, header p { color: #aaa }
  .plots svg { background: #fff; border-radius: 4px }
}
"""


def page(described: Mapping[str, Any], summary: Summary, plots: Sequence[str]) -> str:
    """Return the page.

    `plots` are SVG elements, put in as they are.
    """
    title = html.escape(f"Quality: {described['model']}")
    head = "".join(f"<p>{html.escape(line)}</p>" for line in headline(described, summary) if line)
    body = "".join(_table(table) for table in tables(described, summary))
    pictures = f'<h2>Plots</h2><div class="plots">{"".join(plots)}</div>' if plots else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><header><h1>{title}</h1>{head}</header>"
        f"{body}{pictures}</body></html>\n"
    )


def _table(table: Table) -> str:
    header = "".join(f"<th>{html.escape(cell)}</th>" for cell in table.header)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in table.rows
    )
    return (
        f"<h2>{html.escape(table.title)}</h2>"
        f'<div class="scroll"><table><thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table>'
        f'</div><p class="note">{html.escape(table.note)}</p>'
    )
