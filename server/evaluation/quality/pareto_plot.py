# SPDX-License-Identifier: Apache-2.0
"""The picture of `pareto`: one panel a task and a batch. Needs matplotlib.

Filled points are those that nothing beats in both time and loss.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tandemkv.server.evaluation.drawing import drawing, handles_by_label, save

from .pareto import DENSE, Pareto, Point

_END = "#333333"
_COLOURS = ("#4aa3c7", "#0b6e99", "#3a7d44", "#c44900", "#7b4b94", "#8c6d1f")
_SHAPES = "ov^Ds*P"
_NEAR = 0.09
"""Labels closer than this, in widths and heights of a panel, are left out."""


class _Look(NamedTuple):
    """Colour and marker of a point."""

    colour: str
    marker: str
    name: str


def draw_pareto(found: Sequence[Pareto], stem: Path) -> tuple[Path, Path]:
    """Draw as `stem`.svg and .png: rows are tasks, columns batches of contexts.

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
