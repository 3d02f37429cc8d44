# SPDX-License-Identifier: Apache-2.0
"""A start, as a person or a log file reads it: its stages, and the plan that was made."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.status import Status
from rich.table import Column, Table
from rich.text import Text

_TIMES = (
    ("scan", "plan_scan_us"),
    ("transfer", "plan_transfer_us"),
    ("model", "plan_layer_us"),
    ("exposed: added by selecting", "plan_exposed_us"),
)


class StartProgress:
    """Shows the stage under way and a line for each finished one."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._title = ""

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """Run one stage; a line with its duration follows when it ends well."""
        self._title = escape(title)
        started = time.monotonic()
        with self._console.status(f"{self._title} ...") as self._status:
            yield
        self._console.print(
            f"[green]ok[/]  {escape(title)} [dim]{time.monotonic() - started:.1f} s[/]"
        )

    def tell(self, text: str) -> None:
        """Print `text`, which was decided or found in the stage under way, on a line that stays."""
        self._console.print(f"    [dim]{escape(text)}[/]", soft_wrap=True)

    def note(self, text: str) -> None:
        """Show `text` beside the stage under way; overwritten by the next note."""
        if self._status is not None:
            self._status.update(f"{self._title} ... [dim]{escape(text)}[/]")


def start_view(values: Mapping[str, float], info: Mapping[str, str]) -> RenderableType | None:
    """Return the table of an inference rank's status; None if it reports no plan.

    A figure a line, so that it fits a terminal of 80 columns; what was not measured has none. Times
    of `values`, those of a `StatusReply`, are in us per layer.
    """
    if "plan_refresh_steps" not in values:
        return None
    load = info.get("plan_load", "")
    what = f"measured at start, {escape(load)} tokens: us per layer" if load else "selection"
    table = Table(Column(style="bold"), "", title=what, title_justify="left", show_header=False)
    table.add_row("selection on", escape(info.get("plan_placement", "")))
    for name, key in _TIMES:
        if key in values:
            table.add_row(name, f"{values[key]:,.1f}{_hidden(values, key)}")
    steps, dense = values["plan_refresh_steps"], values["plan_dense_tokens"]
    table.add_row("refresh every", "1 step" if steps == 1 else f"{steps:.0f} steps at most")
    table.add_row("attends to everything", f"up to {dense:.0f} tokens" if dense else "never")
    lines = []
    if together := values.get("plan_dense_batch_tokens"):
        lines.append(f"a step of no more than {together:.0f} tokens in all attends to them all")
    if note := info.get("plan_note"):
        lines.append(note)
    if counted := info.get("plan_layer_counts"):
        lines.append(f"model: {counted}")
    return Group(table, *map(Text, lines))


def _hidden(values: Mapping[str, float], key: str) -> str:
    hidden = values.get("plan_is_hidden") if key == "plan_exposed_us" else None
    if hidden is None:
        return ""
    return " ([green]hidden[/])" if hidden else " ([yellow]not hidden[/])"
