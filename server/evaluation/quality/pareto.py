# SPDX-License-Identifier: Apache-2.0
"""Loss against the time of a decode step, for settings that were measured for both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.evaluation.bench.configurations import BUILT_IN
from tandemkv.server.evaluation.bench.decode_steps import step_rows
from tandemkv.server.evaluation.bench.report import Report, read_report
from tandemkv.server.evaluation.grid import describe_setting, is_setting_name, setting_name
from tandemkv.server.plan.pages import on_device

from .bootstrap import Interval
from .report import ReportFile, read_quality_report
from .summary import Row, is_of_perplexity

DENSE = "dense"


class Point(NamedTuple):
    """One setting: ms a step, loss with its interval, and whether nothing is better in both."""

    setting: str
    step_ms: float
    loss: Interval
    is_best: bool = False

    @property
    def label(self) -> str:
        """The setting as a person reads it."""
        return describe_setting(self.setting)


class Pareto(NamedTuple):
    """Points of one task and one batch of contexts.

    `missing` are settings with a loss and no time to compare; `unit` is that of the loss.
    """

    task: str
    title: str
    step: str
    unit: str
    points: list[Point]
    missing: list[str]


def pareto(quality: Path, decode: Path, tasks: Sequence[str] | None = None) -> list[Pareto]:
    """Join a report of quality and one of speed by their settings.

    A loss is per cent of perplexity against dense, or points of a score below it. Dense is the end
    without loss. `quality` is a ``report.json`` of ``tandemkv quality``, `decode` a report of
    ``tandemkv bench decode``. `tasks` are names in the former, with ``@8k`` where it has several
    contexts; default all. Raises `SettingsError` if no setting is in both, with those of either; if
    one is twice in either, for only one of the two would be drawn; or
    a task is not in the report.
    """
    report, times = read_quality_report(quality), step_times(read_report(decode))
    if not times:
        raise SettingsError(f"{decode}: no tpot_ms_* row in it; `tandemkv bench decode` makes them")
    rows: dict[str, Row] = {}
    for row in report.rows:
        if setting := row.settings.get("setting"):
            if setting in rows:
                raise SettingsError(
                    f"{quality}: {rows[setting].label} and {row.label} are both of setting "
                    f"{setting}, which has no place for what they differ in; measure one of them "
                    "into a folder of its own"
                )
            rows[setting] = row
    known = report.described["tasks"]
    chosen = list(known) if tasks is None else [name.replace("+", "_") for name in tasks]
    absent = [name for name in chosen if name not in known]
    if absent:
        raise SettingsError(f"{quality}: no task {absent[0]} in it, only {', '.join(known)}")
    found = [
        item
        for step, by_setting in times.items()
        for task in chosen
        if (item := _of_task(report, rows, task, step, by_setting)) is not None
    ]
    if not found:
        raise SettingsError(
            f"no setting is in both: {quality} has {', '.join(rows) or 'none that names one'}; "
            f"{decode} has {', '.join(sorted({n for t in times.values() for n in t}))}. Measure "
            "both with the same --grid"
        )
    return found


def pareto_view(found: Sequence[Pareto]) -> RenderableType:
    """Return, for a terminal, the settings that nothing beats, fastest first."""
    tables = []
    for item in found:
        columns = ("nothing beats", "ms a step", f"loss, {item.unit}")
        title = f"{item.title}; steps of {item.step}"
        table = Table(*columns, title=escape(title), title_justify="left")
        for point in item.points:
            if point.is_best:
                table.add_row(escape(point.label), f"{point.step_ms:.2f}", point.loss.signed())
        tables.append(table)
    return Group(*tables)


def step_times(report: Report) -> dict[str, dict[str, float]]:
    """Return ms a step by batch and context, then by setting.

    Of a batch and context of which any step is queued only those are: a step that is waited for
    takes longer, and the two cannot be compared.
    """
    found: dict[str, dict[str, float]] = {}
    queued: set[str] = set()
    names: dict[str, str] = {}
    for step in sorted(step_rows(report), key=lambda step: not step.is_queued):
        setting = _setting_of(step.name)
        if setting is None:
            continue
        if names.setdefault(setting, step.name) != step.name:
            raise SettingsError(
                f"{names[setting]} and {step.name} are both of setting {setting}, which has no "
                "place for what they differ in; time one of them into a report of its own"
            )
        label = step.point.label
        if step.is_queued:
            queued.add(label)
        elif label in queued:
            continue
        found.setdefault(label, {})[setting] = step.row.value
    return found


def _setting_of(configuration: str) -> str | None:
    """Return the setting of a configuration of `bench decode`, None if it is not known."""
    if configuration == "dense-tp1":
        return DENSE
    name = configuration.removeprefix("grid-")
    if is_setting_name(name):
        return name
    known = BUILT_IN.get(configuration)
    if known is None or known.tp_size > 1 or known.settings.get("cache_ranks") != 0:
        return None
    settings = known.serve_settings(model_dir=Path("model"), capacity_tokens=1 << 20, batch=1)
    return setting_name(on_device(settings.selection, known.device))


def _of_task(
    report: ReportFile, rows: Mapping[str, Row], task: str, step: str, times: Mapping[str, float]
) -> Pareto | None:
    described: Mapping[str, Any] = report.described["tasks"][task]
    measure = described["measure"]
    if measure != "score" and not is_of_perplexity(measure):
        return None
    points, missing = [], []
    for setting, row in rows.items():
        gap = row.scores[task].gap if task in row.scores else None
        if gap is None:
            continue
        if measure == "score":  # lost points are a positive loss, and the interval turns round
            gap = Interval(-100 * gap.mean, -100 * gap.high, -100 * gap.low)
        if setting in times:
            points.append(Point(setting, times[setting], gap))
        else:
            missing.append(setting)
    if not points:
        return None
    if DENSE in times:
        points.append(Point(DENSE, times[DENSE], Interval(0.0, 0.0, 0.0)))
    unit = "points" if measure == "score" else "% of perplexity"
    return Pareto(task, described["title"], step, unit, _marked(points), missing)


def _marked(points: Sequence[Point]) -> list[Point]:
    """Mark what nothing else beats: no other is as fast and loses as little."""
    ordered = sorted(points, key=lambda point: (point.step_ms, point.loss.mean))
    least = float("inf")
    found = []
    for point in ordered:
        is_best = point.loss.mean < least
        least = min(least, point.loss.mean)
        found.append(point._replace(is_best=is_best))
    return found
