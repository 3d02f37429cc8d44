# SPDX-License-Identifier: Apache-2.0
"""Score against attended share, one line a policy. Needs matplotlib (``tandemkv[quality]``)."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from tandemkv.server.evaluation.drawing import drawing, save_svg

from .summary import Row, has_changes, is_of_perplexity

_AXES = {
    "score": "score",
    "agreement": "tokens that agree with dense",
    "mass": "attention mass",
}
_LONG_LABEL = 45
_NUM_COLOURS, _MARKERS = 10, "os^Dv*"  # another marker where the colours begin anew


def draw(described: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, str]:
    """Return an SVG document a task that has points to draw, by task name.

    Raises `SettingsError` if matplotlib is not installed.
    """
    found = {}
    with drawing("quality") as new_figure:
        for name, task in described["tasks"].items():
            is_change = is_of_perplexity(task["measure"]) and has_changes(rows, name)
            lines = _lines(rows, name, is_change=is_change)
            if not lines:
                continue
            num_columns = 2 if max(map(len, lines)) <= _LONG_LABEL else 1
            height = 3.6 + 0.17 * -(-(len(lines) + 1) // num_columns)
            figure = new_figure(figsize=(7.0, height), layout="constrained")
            axes = figure.subplots()
            for i, (label, points) in enumerate(lines.items()):
                shares, values, below, above = zip(*points, strict=True)
                axes.errorbar(
                    shares, values, yerr=[below, above], label=label,
                    linestyle="--" if label.endswith(")") else "-", color=f"C{i % _NUM_COLOURS}",
                    marker=_MARKERS[i // _NUM_COLOURS % len(_MARKERS)],
                    markersize=4, linewidth=1.2, capsize=2, elinewidth=0.8,
                )  # fmt: skip
            dense = _dense(rows, name, is_change=is_change)
            if dense is not None:
                axes.axhline(dense, color="0.4", linewidth=0.8, linestyle=":", label="dense")
            axes.set_title(f"{task['title']}, {task['samples']} samples")
            axes.set_xlabel("attended share of the context, all layers, %")
            perplexity = "change of perplexity, %" if is_change else "perplexity"
            axes.set_ylabel(_AXES.get(task["measure"], perplexity))
            axes.set_xlim(left=0.0)
            axes.grid(color="0.9", linewidth=0.6)
            figure.legend(fontsize=7.5, loc="outside lower left", ncols=num_columns)
            buffer = io.StringIO()
            save_svg(figure, buffer)
            found[name] = buffer.getvalue()
    return found


_Point = tuple[float, float, float, float]


def _lines(rows: Sequence[Row], name: str, *, is_change: bool) -> dict[str, list[_Point]]:
    """Points of each policy by share: share in per cent, value, and how far the interval goes."""
    lines: dict[str, list[_Point]] = {}
    for row in rows:
        score = row.scores.get(name)
        if score is None or row.attended_tokens is None or score.attended_share is None:
            continue  # what attends to everything is the dotted line
        shown = score.gap if is_change else score.interval
        if shown is None:
            continue
        value, low, high = shown
        point = (100 * score.attended_share, value, max(0.0, value - low), max(0.0, high - value))
        lines.setdefault(row.label, []).append(point)
    return {label: sorted(points) for label, points in lines.items()}


def _dense(rows: Sequence[Row], name: str, *, is_change: bool) -> float | None:
    score = next((r.scores[name] for r in rows if r.system == "sglang" and name in r.scores), None)
    if score is None:
        return None
    return 0.0 if is_change else score.value
