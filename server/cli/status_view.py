# SPDX-License-Identifier: Apache-2.0
"""The status of a running pair as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_WARN_WORDS = frozenset(
    {
        "stale", "lost", "failed", "fallback", "fallbacks", "error", "errors", "timeout",
        "timeouts", "refused", "withheld", "old", "malformed",
    }
)  # fmt: skip
_FIRST = (
    "role", "error", "placement", "policy", "model", "budget", "epoch", "hits", "misses",
    "bytes_sent", "bytes_received", "slots", "exact_rows", "exact", "steps", "fallback", "late",
    "lost",
)  # fmt: skip


def status_table(status: Mapping[str, Any], url: str) -> Table:
    """Return the table of ``/tandemkv/status``.

    Whatever the ranks report is shown, the best known names first; names with a unit
    (``_bytes``, ``_s``, ``_ms``, ``_us``) are shown in it.
    """
    is_ready = bool(status.get("ready"))
    title = "[green]ready[/]" if is_ready else "[red]not ready[/]"
    table = Table(
        Column(style="bold"), "what", Column("value", justify="right", overflow="fold"),
        title=f"{escape(url)}: {title}", title_justify="left", min_width=60,
    )  # fmt: skip
    extra = {k: v for k, v in status.items() if k not in ("ready", "inference_rank", "cache_ranks")}
    if extra:
        _add_section(table, "server", extra)
    inference, cache_ranks = status.get("inference_rank"), status.get("cache_ranks")
    _add_section(table, "inference rank", inference)
    if isinstance(cache_ranks, list) and cache_ranks:
        for index, rank in enumerate(cache_ranks):
            _add_section(table, f"cache rank {index}", rank)
    elif not _is_alone(inference):
        _add_section(table, "cache rank", None)
    return table


def _is_alone(inference: Any) -> bool:
    """Whether an inference rank says that there is no other process to report."""
    info = inference.get("info") if isinstance(inference, Mapping) else None
    return isinstance(info, Mapping) and info.get("cache_ranks") == "0"


def _add_section(table: Table, name: str, values: Any) -> None:
    if not isinstance(values, Mapping) or not values:
        table.add_row(name, "[yellow]no report[/]", "", end_section=True)
        return
    rows = sorted(flat_items(values), key=lambda row: (_rank(row[0]), row[0]))
    rows = [(key, value) for key, value in rows if value != ""]
    labels = [_label(key) for key, _ in rows]
    for index, (key, value) in enumerate(rows):
        text = escape(format_value(key, value))
        is_bad = not _WARN_WORDS.isdisjoint(key.split("_")) and value not in (0, "no", "none")
        table.add_row(
            name if index == 0 else "",
            escape(_label(key, is_shared=labels.count(labels[index]) > 1)),
            f"[yellow]{text}[/]" if is_bad else text,
            end_section=index == len(rows) - 1,
        )


def _label(key: str, *, is_shared: bool = False) -> str:
    """Return the name without what its value shows anyway; of two that are the same, with total."""
    name = key.removesuffix("_total")
    is_total = is_shared and name != key
    for unit in ("_us", "_ms", "_s", "_bytes"):
        name = name.removesuffix(unit)
    return name.replace("_", " ") + (" total" if is_total else "")


def flat_items(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a tree of counters; the groups ``values`` and ``info`` add no name."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flat_items(value, prefix if key in ("values", "info") else f"{name}.")
        else:
            yield name, value


def format_value(key: str, value: Any) -> str:
    """Return `value` in the unit that its name ends in."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "-"
    if not isinstance(value, int | float):
        return str(value)
    leaf = key.rpartition(".")[2].removesuffix("_total")
    if leaf.startswith("bytes_") or leaf.endswith("_bytes"):
        return format_bytes(value)
    for unit in ("us", "ms", "s"):
        if leaf.endswith(f"_{unit}"):
            return f"{value:,.0f} {unit}" if abs(value) >= 1000 else f"{value:.3g} {unit}"
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:.4g}"


def format_bytes(size: float) -> str:
    """Return a byte count in the largest binary unit that keeps it above 1."""
    for unit in _BYTE_UNITS[:-1]:
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} {_BYTE_UNITS[-1]}"


def _rank(key: str) -> int:
    leaf = key.rpartition(".")[2]
    return next((index for index, word in enumerate(_FIRST) if word in leaf), len(_FIRST))
