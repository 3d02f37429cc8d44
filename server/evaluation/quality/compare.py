# SPDX-License-Identifier: Apache-2.0
"""Two reports beside each other: differences of every task, paired by sample, with intervals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tandemkv.cache_rank.protocol.errors import SettingsError

from .bootstrap import Interval, mean_interval, paired_interval
from .report import ReportFile, read_quality_report
from .served import differences
from .summary import Row, Score, is_of_perplexity


class Difference(NamedTuple):
    """One task of two rows.

    `gap` is B less A: a difference of scores, or per cent of perplexity.
    """

    task: str
    one: str
    other: str
    gap: Interval
    unit: str
    verdict: str


class Comparison(NamedTuple):
    """Two rows: their names, which settings differ, and a difference a task."""

    names: tuple[str, str]
    settings: dict[str, tuple[Any, Any]]
    tasks: list[Difference]


def compare(one_path: Path, other_path: Path) -> list[Comparison]:
    """Compare the rows of one name in two reports, or the only row of each; dense ones first.

    What two runs of dense differ by is noise, or what a setting of both sides does to the model, as
    a dtype of K/V. Either path is a report, or a folder that holds one. Raises `SettingsError` if
    the reports are of different models or samples, or have no row to compare; saying what to do.
    """
    one, other = read_quality_report(one_path), read_quality_report(other_path)
    _check_model(one, other)
    tasks = _common_tasks(one, other)
    found = []
    for names, a, b in _pairs(one, other):
        settings = differences(a.settings, b.settings) if a.settings and b.settings else {}
        gaps = [
            _difference(name, one.described["tasks"][name], a.scores[name], b.scores[name])
            for name in tasks
            if name in a.scores and name in b.scores and a.scores[name].items
        ]
        found.append(Comparison(names, settings, gaps))
    return found


def _check_model(one: ReportFile, other: ReportFile) -> None:
    for key, what in (("model", "model"), ("model_hash", "weights"), ("dtype", "dtype")):
        a, b = one.described.get(key), other.described.get(key)
        if a is not None and b is not None and a != b:
            raise SettingsError(
                f"{one.name} and {other.name} are of another {what}: {a} and {b}; measure both "
                "with the same one"
            )


def _common_tasks(one: ReportFile, other: ReportFile) -> list[str]:
    """Return the tasks on equal samples.

    Raises `SettingsError` if there is none, with the reason.
    """
    ours, theirs = one.described["tasks"], other.described["tasks"]
    common = [name for name in ours if name in theirs]
    if not common:
        raise SettingsError(
            f"{one.name} has the tasks {', '.join(ours)}, and {other.name} {', '.join(theirs)}; "
            "measure one of them in both"
        )
    equal = [n for n in common if ours[n]["samples_digest"] == theirs[n]["samples_digest"]]
    if not equal:
        raise SettingsError(
            f"{one.name} and {other.name} were asked other prompts: "
            f"{_why(one.described, other.described, common[0])}; give the second one "
            "--samples-from the folder of the first"
        )
    return equal


def _why(one: Mapping[str, Any], other: Mapping[str, Any], task: str) -> str:
    a, b = one["tasks"][task], other["tasks"][task]
    names = ("seed", "context_tokens", "forced_tokens", "samples", "prompt_style")
    found = [
        f"{name} {a.get(name)} and {b.get(name)}" for name in names if a.get(name) != b.get(name)
    ]
    if one.get("corpus") != other.get("corpus"):
        found.append("other texts (--corpus)")
    return f"{task} has " + (", ".join(found) or "other samples of the same options")


def _pairs(one: ReportFile, other: ReportFile) -> list[tuple[tuple[str, str], Row, Row]]:
    ours, theirs = one.sparse, other.sparse
    found = []
    if one.dense and other.dense:
        found.append((("dense", "dense"), one.dense, other.dense))
    common = [name for name in ours if name in theirs]
    if common or (found and not ours and not theirs):
        return found + [((name, name), ours[name], theirs[name]) for name in common]
    if len(ours) == len(theirs) == 1:
        (a, first), (b, second) = next(iter(ours.items())), next(iter(theirs.items()))
        return [*found, ((a, b), first, second)]
    raise SettingsError(
        f"no row has one name in both: {one.name} has {_listed(ours)}; {other.name} has "
        f"{_listed(theirs)}. Give reports of the same configurations, or of one each"
    )


def _listed(rows: Mapping[str, Row]) -> str:
    return " / ".join(rows) or "dense alone"


def _difference(name: str, task: Mapping[str, Any], one: Score, other: Score) -> Difference:
    if len(one.items) != len(other.items):
        raise SettingsError(
            f"task={name}: {len(one.items)} and {len(other.items)} samples were asked; finish "
            "both campaigns (the same command resumes)"
        )
    if one.items_of and other.items_of and one.items_of != other.items_of:
        raise SettingsError(
            f"task={name}: as many samples were asked in both, and they are others (--part) or "
            "joined in another order; compare the whole campaigns, joined alike"
        )
    is_perplexity = is_of_perplexity(task["measure"])
    if is_perplexity:
        gap = mean_interval(np.subtract(other.items, one.items))
        gap = Interval(*(100 * np.expm1(gap)).tolist())
    else:
        gap = paired_interval(other.items, one.items)
    better_is = -1 if is_perplexity else 1
    low, high = sorted((better_is * gap.low, better_is * gap.high))
    verdict = "B is better" if low > 0 else "B is worse" if high < 0 else "no difference seen"
    if len(one.items) < 2:
        verdict = "one sample: no interval"
    return Difference(
        task["title"], f"{one.value:.3f}", f"{other.value:.3f}", gap,
        "%" if is_perplexity else "", verdict,
    )  # fmt: skip


def comparison_view(found: list[Comparison], one: Path, other: Path) -> RenderableType:
    """Return comparisons as tables for a terminal."""
    parts: list[RenderableType] = [Text(f"A: {one}\nB: {other}")]
    for item in found:
        title = item.names[0] if item.names[0] == item.names[1] else " -> ".join(item.names)
        columns = ("task", "A", "B", "B - A (95 % interval)", "")
        table = Table(*columns, title=escape(title), title_justify="left")
        for row in item.tasks:
            digits, unit = (2, f" {row.unit}") if row.unit else (3, "")
            gap = row.gap.signed(digits, unit)
            table.add_row(escape(row.task), row.one, row.other, gap, row.verdict)
        parts.append(table)
        changed = ", ".join(f"{n} {a} -> {b}" for n, (a, b) in item.settings.items())
        parts.append(Text(f"settings that differ: {changed or 'none known'}"))
    parts.append(
        Text(
            "Scores: difference. Perplexity: per cent; below 0 B is better. Intervals: paired by "
            "sample; of texts, where these are forced."
        )
    )
    return Group(*parts)
