# SPDX-License-Identifier: Apache-2.0
"""The plan that was made at start, from what was measured, as a table."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

_TIMES = (
    ("scan", "plan_scan_us"),
    ("transfer", "plan_transfer_us"),
    ("model", "plan_layer_us"),
    ("exposed: added by selecting", "plan_exposed_us"),
)


def start_view(values: Mapping[str, float], info: Mapping[str, str]) -> RenderableType | None:
    """Return the table of an inference rank's status; None if it reports no plan.

    A figure a line, so that it fits a terminal of 80 columns; what was not measured has none. Times
    of `values`, those of a `StatusReply`, are in us per layer.
    """
    if "plan_refresh_steps" not in values:
        return None
    load = info.get("plan_load", "")
    what = f"measured at start, {escape(load)} tokens: us per layer" if load else "selection"
    table = Table(title=what, title_justify="left", show_header=False)
    table.add_column("what", style="bold")
    table.add_column("value")
    table.add_row("selection on", escape(info.get("plan_placement", "")))
    for name, key in _TIMES:
        if key in values:
            table.add_row(name, f"{values[key]:,.1f}{_hidden(values, key)}")
    table.add_row("refresh every", _steps(values["plan_refresh_steps"]))
    dense = values["plan_dense_tokens"]
    table.add_row("attends to everything", f"up to {dense:.0f} tokens" if dense else "never")
    lines = [text for text in (_dense(values), info.get("plan_note"), _counted(info)) if text]
    return Group(table, *(Text(line) for line in lines))


def _hidden(values: Mapping[str, float], key: str) -> str:
    hidden = values.get("plan_is_hidden") if key == "plan_exposed_us" else None
    if hidden is None:
        return ""
    return " ([green]hidden[/])" if hidden else " ([yellow]not hidden[/])"


def _steps(number: float) -> str:
    return "1 step" if number == 1 else f"{number:.0f} steps"


def _dense(values: Mapping[str, float]) -> str:
    tokens = values.get("plan_dense_batch_tokens", 0.0)
    return (
        f"a step of no more than {tokens:.0f} tokens in all attends to them all" if tokens else ""
    )


def _counted(info: Mapping[str, str]) -> str:
    counted = info.get("plan_layer_counts", "")
    return f"model: {counted}" if counted else ""
