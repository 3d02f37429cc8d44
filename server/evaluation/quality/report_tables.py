# SPDX-License-Identifier: Apache-2.0
"""The report as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .report_settings import settings_table
from .report_table import NOTHING, Table
from .summary import Row, Score, Summary, is_group, is_of_perplexity


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
    header += [f"{tasks[n]['title']} ({units.get(tasks[n]['measure'], 'change')})" for n in names]
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
    body = []
    for row in rows:
        shares = [s.attended_share for s in row.scores.values() if s.attended_share is not None]
        spread = NOTHING
        if shares:
            low, high = 100 * min(shares), 100 * max(shares)
            spread = f"{low:.1f} %" if high - low < 0.05 else f"{low:.1f}–{high:.1f} %"
        body.append(
            [
                row.label,
                row.budget,
                "all" if row.attended_tokens is None else str(row.attended_tokens),
                spread,
                _exact_layers(row),
                NOTHING if row.moved_rows is None else f"{row.moved_rows:.1f}",
                NOTHING if row.moved_kib is None else f"{row.moved_kib:.1f}",
                row.sees_question or NOTHING,
            ]
        )
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


def _exact_layers(row: Row) -> str:
    if not row.exact_layers:
        return NOTHING
    if len(row.exact_layers) > 4:
        return f"{len(row.exact_layers)} layers"
    return ", ".join(map(str, row.exact_layers))


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
    for row in rows:
        for name in names:
            if name not in row.scores:
                continue
            d = row.scores[name].details
            cells = [row.label, row.budget, described["tasks"][name]["title"]]
            for i in range(1, 5):
                if f"change_{i}" not in d:
                    cells.append(f"perplexity {d[f'perplexity_{i}']:.3f}")
                    continue
                same = f", {d[f'agreement_{i}']:.3f}" if f"agreement_{i}" in d else ""
                cells.append(f"{_change(d, f'change_{i}')}{same}")
            body.append([*cells, _change(d, "growth") if "growth" in d else NOTHING])
    return Table(
        "Long generation",
        ["system", "budget", "task", "quarter 1", "2", "3", "4", "last less first"],
        body,
        "By quarters of the forced tokens: change of perplexity against dense, and the share of "
        "tokens at which the likeliest is dense's. Last less first: how much the change grew.",
    )


def _change(details: Mapping[str, float], name: str) -> str:
    low, high = details[f"{name}_low"], details[f"{name}_high"]
    return f"{details[name]:+.2f} % ({low:+.2f} to {high:+.2f})"


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
