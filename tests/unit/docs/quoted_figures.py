# SPDX-License-Identifier: Apache-2.0
"""Which figures of a page name their report, and whether the report has them.

Two comments follow a table or a paragraph, which a reader of the page does not see::

    <!-- figures: docs/benchmarks/decode.json 22.02 first_figure; 2.22 first_figure / second -->
    <!-- from: docs/quality/smollm2-4k-cpu/report.json -->

``figures`` names each value: a figure of a benchmark, ``LABEL: TASK.FIELD`` of a report of quality
(``look_ahead, fetch_cap=64: perplexity.change``), a dotted path, or a plain number, and
``A / B`` and ``100 * A`` of such.
``from`` says that every number of the table has its equal in one of the files, as it is or as per
cent.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[3]
_COMMENT = re.compile(r"<!-- (figures|from): (.*?)-->", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.:])[+-]?\d+\.\d+(?![\w.]*\d)")
_LINK = re.compile(r"\]\([^)]*\)|`[^`]*`")


class Named(NamedTuple):
    """A value on a page, the report it names, and its place there."""

    value: str
    file: str
    path: str


class Block(NamedTuple):
    """A piece of a page with the comments that follow it."""

    text: str
    named: list[Named]
    files: list[str]


def blocks_of(page: str) -> list[Block]:
    """Split a page at headings and at comments; comments belong to the text before them."""
    found: list[Block] = []
    for section in re.split(r"^(?=#+ )", page, flags=re.MULTILINE):
        at, pending = 0, ""
        for match in _COMMENT.finditer(section):
            text = section[at : match.start()]
            pending = text if text.strip() else pending
            file, _, rest = match[2].strip().partition(" ")
            entries = rest.split(";") if match[1] == "figures" else []
            named = [_named(file, entry) for entry in entries if entry.strip()]
            of_all = match[2].split() if match[1] == "from" else []
            if text.strip() or not found:
                found.append(Block(pending, named, of_all))
            else:  # a second comment on the same text
                last = found[-1]
                found[-1] = Block(last.text, last.named + named, last.files + of_all)
            at = match.end()
        found.append(Block(section[at:], [], []))
    return [block for block in found if block.text.strip()]


def _named(file: str, entry: str) -> Named:
    value, _, path = " ".join(entry.split()).partition(" ")
    return Named(value, file, path)


def value_of(report: Any, path: str) -> float:
    """Return the number at a path, or what `A / B` and `100 * A` make of numbers.

    Raises
    ------
    KeyError
        If there is none.
    """
    if " / " in path:
        one, _, other = path.partition(" / ")
        return value_of(report, one) / value_of(report, other)
    factor, star, rest = path.partition(" * ")
    if star:
        return float(factor) * value_of(report, rest)
    if re.fullmatch(r"\d+(\.\d+)?", path):
        return float(path)
    rows = report.get("rows", []) if isinstance(report, dict) else []
    for row in rows if isinstance(rows, list) else []:
        if row.get("figure") == path:
            return float(row["value"])
        label, _, place = path.rpartition(": ")
        if "scores" in row and label == _label(row):
            return float(_dotted(row["scores"], place))
    return float(_dotted(report, path))


def _label(row: dict[str, Any]) -> str:
    return ", ".join(part for part in (row["policy"], row.get("variant", "")) if part)


def _dotted(value: Any, path: str) -> Any:
    for part in path.split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


def read(file: str) -> Any:
    """Return the JSON of a report, given from the root of the repository."""
    return json.loads((ROOT / file).read_text(encoding="utf-8"))


def same(text: str, value: float) -> bool:
    """Whether a number on a page is `value` rounded to as many places."""
    places = len(text.partition(".")[2])
    return abs(abs(float(text)) - abs(value)) <= 0.5000001 * 10.0**-places


def numbers_in(report: Any) -> Iterator[float]:
    """Yield every number below a JSON value, single samples left out."""
    if isinstance(report, bool) or report is None or isinstance(report, str):
        return
    if isinstance(report, int | float):
        yield float(report)
        return
    items = report.items() if isinstance(report, dict) else enumerate(report)
    for key, value in items:
        if key != "items":
            yield from numbers_in(value)


def figures_in(text: str) -> list[str]:
    """Return the numbers with a decimal point in the tables of a text, links and code left out."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [match[0] for line in rows for match in _NUMBER.finditer(_LINK.sub("", line))]


def problems(page: str) -> list[str]:
    """Return what does not hold of the figures that a page names."""
    found = []
    for block in blocks_of(page):
        for item in block.named:
            if item.value not in block.text:
                found.append(f"{item.value} is named below a text that does not have it")
            try:
                value = value_of(read(item.file), item.path)
            except (KeyError, IndexError, TypeError, ValueError, OSError) as error:
                found.append(f"{item.value}: {item.file} has no {item.path} ({error})")
                continue
            if not same(item.value, value):
                found.append(f"{item.value}: {item.path} is {value:g} in {item.file}")
        if block.files:
            known = list(itertools.chain.from_iterable(numbers_in(read(f)) for f in block.files))
            for text in figures_in(block.text):
                if not any(same(text, value) or same(text, 100 * value) for value in known):
                    found.append(f"{text} is in none of {', '.join(block.files)}")
    return found


def uncovered(page: str) -> list[str]:
    """Return the figures in tables that name no report."""
    found = []
    for block in blocks_of(page):
        if not block.files:
            known = {item.value for item in block.named}
            found += [text for text in figures_in(block.text) if text not in known]
    return found
