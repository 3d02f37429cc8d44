# SPDX-License-Identifier: Apache-2.0
"""Loss against the time of a decode step, for settings that were measured for both."""

from __future__ import annotations

import re
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
from tandemkv.server.evaluation.drawing import drawing, handles_by_label, save
from tandemkv.server.evaluation.grid import describe_setting, is_setting_name, setting_name
from tandemkv.server.plan.pages import on_device

from .bootstrap import Interval
from .configurations import DENSE
from .report import ReportFile, read_quality_report
from .summary import Row, is_of_perplexity

_END = "#333333"
_COLOURS = ("#4aa3c7", "#0b6e99", "#3a7d44", "#c44900", "#7b4b94", "#8c6d1f")
_SHAPES = "ov^Ds*P"
_NEAR = 0.09
"""Labels closer than this, in widths and heights of a panel, are left out."""


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


class _Look(NamedTuple):
    """Colour and marker of a point."""

    colour: str
    marker: str
    name: str


def draw_pareto(found: Sequence[Pareto], stem: Path) -> tuple[Path, Path]:
    """Draw as `stem`.svg and .png: rows are tasks, columns batches of contexts.

    Filled points are those that nothing beats in both time and loss.

    `found` is not empty; `stem` is a path without suffix. Raises `SettingsError` if matplotlib is
    not installed.
    """
    tasks = list(dict.fromkeys(item.task for item in found))
    steps = list(dict.fromkeys(item.step for item in found))
    looks = _looks(found)
    with drawing("quality") as new_figure:
        size = (5.2 * len(steps) + 0.4, 3.8 * len(tasks) + 1.0)
        figure = new_figure(figsize=size, layout="constrained")
        axes = figure.subplots(len(tasks), len(steps), squeeze=False)
        for axis in axes.flat:
            axis.set_visible(False)
        for item in found:
            axis = axes[tasks.index(item.task)][steps.index(item.step)]
            axis.set_visible(True)
            _draw_panel(axis, item, looks)
        handles = handles_by_label(axes.flat)
        names = dict.fromkeys(look.name for look in looks.values() if look.name in handles)
        figure.legend(
            [handles[name] for name in names], list(names),
            loc="outside lower center", ncols=2 * len(steps), frameon=False, fontsize=8,
        )  # fmt: skip
        return save(figure, stem)


def _looks(found: Sequence[Pareto]) -> dict[str, _Look]:
    """Return a colour for each K, and a marker for each of the other settings."""
    settings = {point.setting: point.label for item in found for point in item.points}
    inner = sorted((s for s in settings if not _is_end(s)), key=_k_of)
    ks = list(dict.fromkeys(map(_k_of, inner)))
    rest = list(dict.fromkeys(map(_rest_of, sorted(inner))))
    looks = {
        setting: _Look(
            _COLOURS[ks.index(_k_of(setting)) % len(_COLOURS)],
            _SHAPES[rest.index(_rest_of(setting)) % len(_SHAPES)],
            settings[setting],
        )
        for setting in inner
    }
    ends = sorted(setting for setting in settings if _is_end(setting))
    return looks | {setting: _Look(_END, "s", settings[setting]) for setting in ends}


def _is_end(setting: str) -> bool:
    return setting == DENSE or setting.startswith("streaming")


def _k_of(setting: str) -> int:
    match = re.search(r"k(\d+)-c", setting)
    return int(match[1]) if match else 0


def _rest_of(setting: str) -> str:
    """Return what tells a setting from others of its K: c, and the cap as a share of K."""
    k = _k_of(setting)
    return re.sub(r"k\d+-c|cap(\d+)", lambda m: f"{k / int(m[1]):g} " if m[1] else "c", setting)


def _draw_panel(axis: Any, item: Pareto, looks: Mapping[str, _Look]) -> None:
    best = [point for point in item.points if point.is_best]
    axis.step(
        [point.step_ms for point in best], [point.loss.mean for point in best],
        where="post", color="0.75", linewidth=1.0, zorder=1,
    )  # fmt: skip
    for point in item.points:
        look, loss = looks[point.setting], point.loss
        axis.errorbar(
            point.step_ms, loss.mean,
            yerr=[[max(0.0, loss.mean - loss.low)], [max(0.0, loss.high - loss.mean)]],
            color=look.colour, marker=look.marker, label=look.name, linestyle="none",
            markersize=5.5, capsize=2, elinewidth=0.7, zorder=2,
            markerfacecolor=look.colour if point.is_best else "white",
        )  # fmt: skip
    axis.set_yscale("symlog", linthresh=1.0, linscale=0.8)  # the ends are far from the rest
    ticks = [t for t in (-3, -1, -0.5, 0, 0.5, 1, 3, 10, 30, 100) if _within(t, item.points)]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.axhline(0.0, color="0.6", linewidth=0.8, linestyle=":")
    axis.set_title(f"{item.title}; steps of {item.step}", loc="left", fontsize=10)
    axis.set_xlabel("ms a decode step")
    axis.set_ylabel(f"loss against dense, {item.unit}")
    axis.margins(x=0.08, y=0.1)
    axis.grid(color="0.92", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    _label(axis, best)


def _within(tick: float, points: Sequence[Point]) -> bool:
    low, high = min(p.loss.low for p in points), max(p.loss.high for p in points)
    return min(low, 0.0) - 0.5 <= tick <= high * 1.2 + 0.5


def _label(axis: Any, points: Sequence[Point]) -> None:
    """Write K, c and cap beside points that nothing beats, where there is room."""
    to_axes = axis.transAxes.inverted()
    taken: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda p: not _is_end(p.setting)):
        x, y = to_axes.transform(axis.transData.transform((point.step_ms, point.loss.mean)))
        if any(abs(x - a) < 2 * _NEAR and abs(y - b) < _NEAR for a, b in taken):
            continue
        taken.append((x, y))
        text = point.label if _is_end(point.setting) else ", ".join(point.label.split(", ")[:3])
        axis.annotate(
            text, (point.step_ms, point.loss.mean), xytext=(6, 5), textcoords="offset points",
            fontsize=7, ha="right" if x > 0.8 else "left",
            bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.6},
        )  # fmt: skip
