# SPDX-License-Identifier: Apache-2.0
"""A table of a report, as Markdown and as HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import NamedTuple

NOTHING = "–"


class Table(NamedTuple):
    """A table of texts; `note` says how to read it."""

    title: str
    header: Sequence[str]
    rows: list[list[str]]
    note: str

    def markdown(self) -> str:
        """Return it with its title and note."""
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
        body = "\n".join(f"| {' | '.join(line)} |" for line in cells)
        return f"## {self.title}\n\n{body}\n\n{self.note}\n"

    def html(self) -> str:
        """Return it with its title and note."""
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in self.header)
        body = "".join(
            f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>"
            for row in self.rows
        )
        return (
            f"<h2>{html.escape(self.title)}</h2>"
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody>'
            f'</table></div><p class="note">{html.escape(self.note)}</p>'
        )
