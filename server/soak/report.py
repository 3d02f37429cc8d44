# SPDX-License-Identifier: Apache-2.0
"""The report of a soak: JSON for programs, tables for people."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from .canaries import compare
from .client import Outcome
from .judge import Rules, Verdict
from .run import Findings
from .windows import Windows

_NOT_WELL = ("lost", "wrong status", "HTTP 5xx outside of faults")
_MOST_SHOWN = 50


def as_json(found: Findings, verdict: Verdict, rules: Rules, target: str) -> dict[str, Any]:
    """Return the whole report."""
    faults = found.chaos.faults if found.chaos is not None else []
    windows = Windows.of(faults, found.point_faults)
    points = Counter(
        f"{line['point']} {line['action']}" for line in found.point_faults if line["point"]
    )
    not_well = [each for each in found.outcomes if windows.ending_of(each) in _NOT_WELL]
    return {
        "passed": verdict.passed,
        "target": target,
        "settings": asdict(found.settings),
        "rules": asdict(rules),
        "seconds": round(found.ended - found.began, 1),
        "checks": [asdict(check) for check in verdict.checks],
        "endings": verdict.endings,
        "kinds": kinds(found.outcomes),
        "canaries": {name: asdict(each) for name, each in _agreement(found).items()},
        "canary_tokens_compared": sum(solo.num_tokens for solo in found.solos),
        "latency": {name: s and s.as_json() for name, s in verdict.latency.items()},
        "memory": {role: slope.as_json() for role, slope in verdict.memory.items()},
        "faults": [fault.as_json() for fault in faults],
        "fault_points": dict(sorted(points.items())),
        "restarts": [each._asdict() for each in found.watch.restarts],
        "not_ready": [each._asdict() for each in found.watch.unready],
        "machine": _machine(found),
        "quiet": [point.as_json() for point in found.quiet],
        "status": found.status,
        "not_well_by_minute": dict(
            Counter(f"{int(each.started - found.began) // 60}" for each in not_well)
        ),
        "not_well": [_shown(each, windows) for each in not_well[:_MOST_SHOWN]],
    }


def kinds(outcomes: list[Outcome]) -> dict[str, dict[str, float]]:
    """Return count and times of each kind of request that was answered."""
    found: dict[str, dict[str, float]] = {}
    for kind in sorted({outcome.request.kind for outcome in outcomes}):
        mine = [each for each in outcomes if each.request.kind == kind]
        times = sorted(each.ended - each.started for each in mine if each.ending == "complete")
        found[kind] = {"sent": len(mine), "answered": len(times)}
        if times:
            found[kind] |= {
                "median_s": round(statistics.median(times), 3),
                "p95_s": round(times[int(0.95 * (len(times) - 1))], 3),
            }
    return found


def _agreement(found: Findings) -> dict[str, Any]:
    return dict(compare(found.outcomes, found.solos))


def _machine(found: Findings) -> dict[str, float]:
    loads = [load for _, load, _ in found.watch.machine]
    others = [cores for _, _, cores in found.watch.machine[1:]]
    if not loads or not others:
        return {}
    return {
        "load_average_median": round(statistics.median(loads), 2),
        "load_average_max": round(max(loads), 2),
        "cores_used_by_others_mean": round(statistics.fmean(others), 2),
        "cores_used_by_others_max": round(max(others), 2),
    }


def _shown(outcome: Outcome, windows: Windows) -> dict[str, Any]:
    return {
        "kind": outcome.request.kind,
        "counts_as": windows.ending_of(outcome),
        "ending": outcome.ending,
        "status": outcome.status,
        "started": round(outcome.started, 2),
        "seconds": round(outcome.ended - outcome.started, 2),
        "text": outcome.text[:200],
        "body": str(dict(outcome.request.body))[:200],
    }


def as_tables(report: dict[str, Any]) -> RenderableType:
    """Return what is shown of a report."""
    checks = Table("check", "value", "required", "passed", title="Soak")
    for row in report["checks"]:
        verdict = "yes" if row["passed"] else "[red]NO[/]"
        text = str(row["value"])
        shown = text if len(text) <= 200 else f"{text[:197]}..."
        checks.add_row(escape(row["name"]), escape(shown), escape(row["required"]), verdict)
    endings = Table("requests", "number", title="How requests ended")
    for name, number in report["endings"].items():
        endings.add_row(name, str(number))
    faults = Table("fault", "number", "slowest recovery, s", title="Faults")
    grouped: dict[str, list[float]] = {}
    for fault in report["faults"]:
        times = grouped.setdefault(f"{fault['action']} {fault['target']}", [])
        times.append(float("inf") if fault["recovery_s"] is None else fault["recovery_s"])
    for name, times in sorted(grouped.items()):
        faults.add_row(name, str(len(times)), f"{max(times):.1f}")
    for name, number in report["fault_points"].items():
        faults.add_row(name, str(number), "")
    verdict = "[bold green]passed[/]" if report["passed"] else "[bold red]failed[/]"
    machine = ", ".join(f"{name} {value}" for name, value in report["machine"].items())
    return Group(checks, endings, faults, f"{verdict} after {report['seconds']:.0f} s; {machine}")
