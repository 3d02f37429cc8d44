# SPDX-License-Identifier: Apache-2.0
"""Time per output token against context, one line per configuration. Needs matplotlib.

Points are medians of steps queued one behind another, or of steps waited for where a report has no
others; bars reach from the 10th to the 90th percentile.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.evaluation.drawing import drawing, handles_by_label, save

from .decode_steps import step_rows
from .report import Report, Row

_COLOURS = (
    "#0b6e99", "#c44900", "#3a7d44", "#7b4b94", "#8c6d1f", "#a3243b", "#4aa3c7", "#e08e5b",
    "#7fb98a", "#b48bc9",
)  # fmt: skip
_GREYS = ("#333333", "#888888", "#bbbbbb")


class Series(NamedTuple):
    """One line: contexts in tokens, ascending, with their rows."""

    name: str
    batch: int
    points: tuple[tuple[int, Row], ...]


def tpot_series(
    reports: Sequence[Report], names: Sequence[str] = (), batch: int | None = None
) -> list[Series]:
    """Return the lines that the rows of `reports` give, stock SGLang's first.

    With `names` those of these configurations alone, with `batch` of that batch. Raises
    `SettingsError` if there is none, a name has none, or two reports give one point: ratios across
    runs are not to be read.
    """
    found: dict[tuple[str, int], dict[int, Row]] = {}
    is_queued = has_queued(reports)
    for step in itertools.chain.from_iterable(map(step_rows, reports)):
        if (
            step.is_queued != is_queued
            or (names and step.name not in names)
            or (batch is not None and step.point.batch != batch)
        ):
            continue
        line = found.setdefault((step.name, step.point.batch), {})
        if step.point.context in line:
            raise SettingsError(
                f"{step.row.figure} is there twice; plot reports of different configurations, or "
                "one whose rows are all of one run"
            )
        line[step.point.context] = step.row
    missing = sorted(set(names) - {name for name, _ in found})
    if missing:
        raise SettingsError(f"--config {missing[0]}: none of these reports has it")
    if not found:
        rows = "tpot_ms_* row" if batch is None else f"tpot_ms_* row of batch {batch}"
        raise SettingsError(f"no {rows} in these reports; `bench decode` makes them")
    order = sorted(found, key=lambda key: (not key[0].startswith("dense"), key))
    return [Series(*key, tuple(sorted(found[key].items()))) for key in order]


def has_queued(reports: Sequence[Report]) -> bool:
    """Whether `reports` have steps queued one behind another."""
    return any(step.is_queued for report in reports for step in step_rows(report))


def draw(
    reports: Sequence[Report], stem: Path, names: Sequence[str] = (), batch: int | None = None
) -> tuple[Path, Path]:
    """Draw the lines of `tpot_series` as `stem`.svg and .png, one panel per batch size.

    Raises `SettingsError` as `tpot_series` does, or if matplotlib is not installed.
    """
    lines = tpot_series(reports, names, batch)
    batches = sorted({line.batch for line in lines})
    own, stock = itertools.cycle(_COLOURS), itertools.cycle(_GREYS)
    colours = {
        name: next(stock if name.startswith("dense") else own)
        for name in dict.fromkeys(line.name for line in lines)
    }
    with drawing("bench") as new_figure:
        figure = new_figure(figsize=(4.6 * len(batches), 3.6), layout="constrained")
        (axes,) = figure.subplots(1, len(batches), squeeze=False)
        for axis, batch in zip(axes, batches, strict=True):
            axis.set_title(f"batch {batch}", loc="left", fontsize=10)
            _draw_panel(axis, [line for line in lines if line.batch == batch], colours)
        queued = ", queued" if has_queued(reports) else ""
        axes[0].set_ylabel(f"ms per output token{queued}")
        handles = handles_by_label(axes)
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", frameon=False,
            ncols=min(3, 1 + len(axes)),
        )  # fmt: skip
        gpus = {f"{report.gpu.count} x {report.gpu.name}" for report in reports if report.gpu}
        if gpus:
            figure.suptitle(", ".join(sorted(gpus)), fontsize=9, x=0.01, ha="left")
        return save(figure, stem)


def _draw_panel(axis: Any, lines: Sequence[Series], colours: Mapping[str, str]) -> None:
    for line in lines:
        rows = [row for _, row in line.points]
        below = [max(0.0, row.value - (row.p10 or row.value)) for row in rows]
        above = [max(0.0, (row.p90 or row.value) - row.value) for row in rows]
        axis.errorbar(
            [context for context, _ in line.points], [row.value for row in rows],
            yerr=[below, above], color=colours[line.name], label=line.name, marker="o",
            markersize=3.5, linewidth=1.4, capsize=2, elinewidth=0.8,
        )  # fmt: skip
    axis.set_xlabel("context, tokens")
    axis.set_xscale("log", base=2)
    contexts = sorted({x for line in lines for x, _ in line.points})
    axis.set_xticks(contexts, [f"{x // 1024}K" if x % 1024 == 0 else str(x) for x in contexts])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.grid(axis="y", linewidth=0.4, color="#dddddd")
    axis.spines[["top", "right"]].set_visible(False)
