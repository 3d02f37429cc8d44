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
    ("exposed", "plan_exposed_us"),
)


def start_view(values: Mapping[str, float], info: Mapping[str, str]) -> RenderableType | None:
    """Return the table of an inference rank's status; None if it reports no plan.

    Parameters
    ----------
    values, info : Mapping
        Of its `StatusReply`; times in us per layer.
    """
    if "plan_refresh_steps" not in values:
        return None
    load = info.get("plan_load", "")
    what = f"measured at start, {escape(load)} tokens: us per layer" if load else "selection"
    table = Table(title=what, title_justify="left")
    table.add_column("selection on", style="bold")
    for name, _ in _TIMES:
        table.add_column(name, justify="right")
    for name in ("hidden", "lag", "refresh", "dense up to"):
        table.add_column(name, justify="right")
    hidden = values.get("plan_is_hidden")
    table.add_row(
        escape(info.get("plan_placement", "")),
        *(f"{values[key]:,.1f}" if key in values else "-" for _, key in _TIMES),
        "-" if hidden is None else "[green]yes[/]" if hidden else "[yellow]no[/]",
        f"{values['plan_lag_steps']:.0f}",
        f"{values['plan_refresh_steps']:.0f}",
        f"{values['plan_dense_tokens']:.0f}",
    )
    lines = [text for text in (_dense(values), info.get("plan_note"), _counted(info)) if text]
    return Group(table, *(Text(line) for line in lines))


def _dense(values: Mapping[str, float]) -> str:
    tokens = values.get("plan_dense_batch_tokens", 0.0)
    return (
        f"a step of no more than {tokens:.0f} tokens in all attends to them all" if tokens else ""
    )


def _counted(info: Mapping[str, str]) -> str:
    counted = info.get("plan_layer_counts", "")
    return f"model: {counted}" if counted else ""
