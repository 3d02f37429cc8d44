# SPDX-License-Identifier: Apache-2.0
"""The report as tables, which are Markdown or HTML."""

from __future__ import annotations

import html
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .bootstrap import Interval
from .served import AS_SERVED, differences
from .summary import Row, Score, Summary, has_changes, is_group, is_of_perplexity

NOTHING = "–"
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


class Table(NamedTuple):
    """A table of texts; `note` says how to read it."""

    title: str
    header: Sequence[str]
    rows: list[list[str]]
    note: str

    def markdown(self) -> str:
        """Return it with its title and note."""
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
        body = "\n".join(f"| {' | '.join(line)} |" for line in cells)
        return f"## {self.title}\n\n{body}\n\n{self.note}\n"

    def html(self) -> str:
        """Return it with its title and note."""
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in self.header)
        body = "".join(
            f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>"
            for row in self.rows
        )
        return (
            f"<h2>{html.escape(self.title)}</h2>"
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody>'
            f'</table></div><p class="note">{html.escape(self.note)}</p>'
        )


def tables(described: Mapping[str, Any], summary: Summary) -> list[Table]:
    """Return the tables of the report."""
    rows = summary.rows
    measured = {name: task["measure"] for name, task in described["tasks"].items()}
    known = {name for row in rows for name in row.scores}
    mass, long = ([n for n, m in measured.items() if m == kind] for kind in ("mass", "long"))
    found = [_scores(described, rows), _attended(described, rows)]
    if known & set(mass):
        found.append(_mass(rows, mass[0]))
    if known & set(long):
        found.append(_long(described, rows, long))
    if described.get("served") or any(row.settings for row in rows):
        found.append(settings_table(described, rows))
    return [*found, _tasks(described)]


def _scores(described: Mapping[str, Any], rows: Sequence[Row]) -> Table:
    tasks = described["tasks"]
    names = [name for name, task in tasks.items() if task["measure"] != "mass"]
    units = {"score": "0–1", "agreement": "tokens agreeing"}
    header = ["system", "budget"]
    for name in names:
        perplexity = "change" if has_changes(rows, name) else "perplexity"
        unit = units.get(tasks[name]["measure"], perplexity)
        header.append(f"{tasks[name]['title']} ({unit})")
    body = [
        [row.label, row.budget, *(_cell(row, name, tasks[name]) for name in names)] for row in rows
    ]
    return Table(
        "Scores",
        header,
        body,
        "Brackets: 95 % interval: over samples (Wilson's where answers are right or wrong, else "
        "bootstrap), or bootstrap over blocks of 16 tokens within the texts where tokens are "
        "forced. Perplexity: change against dense, which has its own "
        "value. Intervals of few samples are wide and still too narrow.",
    )


def _cell(row: Row, name: str, task: Mapping[str, Any]) -> str:
    score = row.scores.get(name)
    if score is None:
        return NOTHING
    fewer = "" if score.samples == task["samples"] else f", n = {score.samples}"
    return _figure(row, score, task["measure"]) + fewer


def _figure(row: Row, score: Score, measure: str) -> str:
    if is_of_perplexity(measure):
        return score.gap.signed(unit=" %") if score.gap else f"{score.value:.3f}"
    if measure == "agreement":
        if row.system == "sglang":
            return "reference"
        return (
            f"{_interval(score)}, first difference {score.details['median_first_difference']:.0f}"
        )
    return _interval(score)


def _interval(score: Score) -> str:
    return f"{score.value:.3f} ({score.low:.3f} to {score.high:.3f})"


def _attended(described: Mapping[str, Any], rows: Sequence[Row]) -> Table:
    body = [
        [
            row.label,
            row.budget,
            "all" if row.attended_tokens is None else str(row.attended_tokens),
            _share(row),
            _exact_layers(row),
            NOTHING if row.moved_rows is None else f"{row.moved_rows:.1f}",
            NOTHING if row.moved_kib is None else f"{row.moved_kib:.1f}",
            row.sees_question or NOTHING,
        ]
        for row in rows
    ]
    header = [
        *("system", "budget", "attended tokens", "attended share", "exact layers"),
        *("rows moved", "KiB moved", "knows the question"),
    ]
    return Table(
        "What is attended to and moved",
        header,
        body,
        "Attended tokens: per KV head, in layers that are not exact. Attended share: measured over "
        "the tasks, of the context, over all layers, exact ones counted in full. Rows (a key and "
        "a value of one KV head in one layer) and KiB that selection sends to the inference rank, "
        f"per request and decode step; the model has {described['num_layers']} layers of "
        f"{described['num_kv_heads']} KV heads.",
    )


def _share(row: Row) -> str:
    shares = [s.attended_share for s in row.scores.values() if s.attended_share is not None]
    if not shares:
        return NOTHING
    low, high = 100 * min(shares), 100 * max(shares)
    return f"{low:.1f} %" if high - low < 0.05 else f"{low:.1f}–{high:.1f} %"


def _exact_layers(row: Row) -> str:
    if len(row.exact_layers) > 4:
        return f"{len(row.exact_layers)} layers"
    return ", ".join(map(str, row.exact_layers)) or NOTHING


def _mass(rows: Sequence[Row], name: str) -> Table:
    scored = [(row, row.scores[name]) for row in rows if name in row.scores]
    groups = list(dict.fromkeys(k for _, s in scored for k in s.details if is_group(k)))
    body = []
    for row, score in scored:
        d = score.details
        body.append(
            [
                *(row.label, row.budget, _interval(score), f"{d['oracle_mass']:.3f}"),
                *(f"{d['of_oracle']:.3f}", f"{d['recall']:.3f}", f"{d['worst_layer']:.3f}"),
                *(f"{d[group]:.3f}" if group in d else NOTHING for group in groups),
            ]
        )
    return Table(
        "Attention mass",
        ["system", "budget", "mass", "oracle", "of the oracle's", "recall", "worst layer", *groups],
        body,
        "Share of the true softmax mass on attended tokens, in float64, exact layers left out. "
        "Oracle: the best that as many tokens can have. Recall: share of the oracle's tokens "
        "that are attended to.",
    )


def _long(described: Mapping[str, Any], rows: Sequence[Row], names: Sequence[str]) -> Table:
    body = []
    for row, name in itertools.product(rows, names):
        if name in row.scores:
            d = row.scores[name].details
            cells = [row.label, row.budget, described["tasks"][name]["title"]]
            cells += [_quarter(d, i) for i in range(1, 5)]
            body.append([*cells, _change(d, "growth") if "growth" in d else NOTHING])
    return Table(
        "Long generation",
        ["system", "budget", "task", "quarter 1", "2", "3", "4", "last less first"],
        body,
        "By quarters of the forced tokens: change of perplexity against dense, and the share of "
        "tokens at which the likeliest is dense's. Last less first: how much the change grew.",
    )


def _quarter(details: Mapping[str, float], number: int) -> str:
    if f"change_{number}" not in details:
        return f"perplexity {details[f'perplexity_{number}']:.3f}"
    same = details.get(f"agreement_{number}")
    return _change(details, f"change_{number}") + ("" if same is None else f", {same:.3f}")


def _change(details: Mapping[str, float], name: str) -> str:
    found = Interval(details[name], details[f"{name}_low"], details[f"{name}_high"])
    return found.signed(unit=" %")


def _tasks(described: Mapping[str, Any]) -> Table:
    body = [
        [
            *(task["title"], str(task["samples"]), str(task["longest_tokens"])),
            *(str(task["seed"]), task["prompt_style"], task["definition"], task["source"]),
        ]
        for task in described["tasks"].values()
    ]
    return Table(
        "Tasks",
        ["task", "samples", "longest request", "seed", "prompt", "definition", "source"],
        body,
        "Answers are decoded greedily; the first token of an answer comes from prefill, which is "
        "dense, unless the question comes late. In a later turn the question is prefilled.",
    )


def settings_table(described: Mapping[str, Any], rows: Sequence[Row]) -> Table:
    """Return the table; its first row is what `serve` would choose on this machine.

    ``described["served"]`` are settings by name, or ``refused`` and the reason.
    """
    served = described.get("served") or {}
    nothing = [""] * len(_COLUMNS)
    body = []
    if "refused" in served:
        body.append([f"serve would refuse: {served['refused']}", *nothing, ""])
    elif served:
        body.append(["`tandemkv serve` here", *_cells(served), ""])
    for row in rows:
        name = f"{row.label}, {row.budget}"
        if "refused" in row.settings:
            body.append([name, *nothing, f"refused: {row.settings['refused']}"])
        elif row.settings:
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
