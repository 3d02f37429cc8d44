# SPDX-License-Identifier: Apache-2.0
"""Which settings every row was measured with, beside those that ``tandemkv serve`` would choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .report_table import Table
from .served import AS_SERVED, differences
from .summary import Row

_COLUMNS = {
    "budget_tokens": "K",
    "resident_factor": "c",
    "fetch_cap": "fetch cap",
    "sample_tokens": "samples",
    "index_dtype": "index",
    "exact_layers": "exact layers",
    "num_recent_tokens": "recent",
    "attended_tokens": "attended",
    "dense_tokens": "dense up to",
}
_UNLIKE_ANYWAY = ("budget_tokens", "max_running_requests", "capacity_tokens", "attended_tokens")
"""Differences that a column shows, or that change no answer."""


def settings_table(described: Mapping[str, Any], rows: Sequence[Row]) -> Table:
    """Return the table; its first row is what `serve` would choose on this machine.

    ``described["served"]`` are settings by name, or ``refused`` and the reason.
    """
    served = described.get("served") or {}
    body = []
    if "refused" in served:
        body.append([f"serve would refuse: {served['refused']}", *[""] * (len(_COLUMNS) + 1)])
    elif served:
        body.append(["`tandemkv serve` here", *_cells(served), ""])
    for row in rows:
        if not row.settings:
            continue
        name = f"{row.label}, {row.budget}"
        if "refused" in row.settings:
            body.append([name, *[""] * len(_COLUMNS), f"refused: {row.settings['refused']}"])
            continue
        body.append([name, *_cells(row.settings), _others(row, served)])
    return Table(
        "Settings",
        ["configuration", *_COLUMNS.values(), "differs from serve besides"],
        body,
        "Every setting after what was open had been decided, by the function with which `serve` "
        f'decides it. The configuration "{AS_SERVED}" is `serve` with the settings that were '
        "given, and nothing else.",
    )


def _cells(settings: Mapping[str, Any]) -> list[str]:
    return [_text(settings.get(name)) for name in _COLUMNS]


def _others(row: Row, served: Mapping[str, Any]) -> str:
    if not served or "refused" in served:
        return ""
    found = differences(row.settings, served)
    return ", ".join(
        f"{name} {_text(own)} ({_text(other)})"
        for name, (own, other) in found.items()
        if name not in _COLUMNS and name not in _UNLIKE_ANYWAY
    )


def _text(value: Any) -> str:
    if value is None:
        return "open"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key}={item}" for key, item in value.items()) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
