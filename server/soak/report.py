# SPDX-License-Identifier: Apache-2.0
"""The report of a soak: JSON for programs, tables for people."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from .client import Outcome
from .judge import Verdict
from .run import Findings, QuietPoint
from .slope import Slope
from .windows import NOT_WELL, Windows

_SETTINGS = ("duration_s", "seed", "concurrency", "actions", "calm_s", "longest_tokens")
_RULES = ("ready_within_s", "refused_within_s", "expect_no_loss")
_MOST_SHOWN = 50


def as_json(found: Findings, verdict: Verdict, target: str) -> dict[str, Any]:
    """Return the whole report."""
    points = Counter(
        f"{line['point']} {line['action']}" for line in found.point_faults if line["point"]
    )
    windows = verdict.windows
    not_well = [each for each in found.outcomes if windows.ending_of(each) in NOT_WELL]
    minutes = Counter(f"{int(each.started - found.began) // 60}" for each in not_well)
    return {
        "passed": verdict.passed,
        "target": target,
        "settings": {name: getattr(found.asked, name) for name in _SETTINGS},
        "rules": {name: getattr(found.asked, name) for name in _RULES},
        "seconds": round(found.ended - found.began, 1),
        "checks": [check._asdict() for check in verdict.checks],
        "endings": verdict.endings,
        "kinds": kinds(found.outcomes),
        "canaries": {name: asdict(each) for name, each in verdict.agreement.items()},
        "canary_tokens_compared": sum(solo.num_tokens for solo in found.solos),
        "latency": {name: slope and _slope(slope) for name, slope in verdict.latency.items()},
        "memory": {role: _slope(slope) for role, slope in verdict.memory.items()},
        "faults": [_rounded(asdict(fault), 2) for fault in found.faults],
        "fault_points": dict(sorted(points.items())),
        "restarts": [each._asdict() for each in found.watch.restarts],
        "not_ready": [each._asdict() for each in found.watch.unready],
        "machine": _machine(found),
        "quiet": [_quiet(point) for point in found.quiet],
        "status": found.status,
        "not_well_by_minute": dict(minutes),
        "not_well": [_shown(each, windows) for each in not_well[:_MOST_SHOWN]],
    }


def _rounded(values: Mapping[str, Any], digits: int) -> dict[str, Any]:
    return {k: round(v, digits) if isinstance(v, float) else v for k, v in values.items()}


def _slope(slope: Slope) -> dict[str, Any]:
    return _rounded(asdict(slope), 6) | {"is_within_noise": slope.is_within_noise}


def _quiet(point: QuietPoint) -> dict[str, Any]:
    held = point.held and _rounded(asdict(point.held), 1)
    return {"books": point.books, "flushed": point.is_flushed, "held": held}


def kinds(outcomes: list[Outcome]) -> dict[str, dict[str, float]]:
    """Return count and times of each kind of request that was answered."""
    found: dict[str, dict[str, float]] = {}
    for kind in sorted({outcome.request.kind for outcome in outcomes}):
        mine = [each for each in outcomes if each.request.kind == kind]
        whole = [each for each in mine if each.ending == "complete" and each.status == 200]
        times = [each.ended - each.started for each in whole]
        found[kind] = {"sent": len(mine), "answered": len(times)}
        if times:
            found[kind] |= {
                "median_s": round(statistics.median(times), 3),
                "p95_s": round(float(np.percentile(times, 95, method="inverted_cdf")), 3),
            }
    return found


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
    grouped: dict[str, list[float]] = defaultdict(list)
    for fault in report["faults"]:
        took = float("inf") if fault["recovery_s"] is None else fault["recovery_s"]
        grouped[f"{fault['action']} {fault['target']}"].append(took)
    for name, times in sorted(grouped.items()):
        faults.add_row(name, str(len(times)), f"{max(times):.1f}")
    for name, number in report["fault_points"].items():
        faults.add_row(name, str(number), "")
    verdict = "[bold green]passed[/]" if report["passed"] else "[bold red]failed[/]"
    machine = ", ".join(f"{name} {value}" for name, value in report["machine"].items())
    return Group(checks, endings, faults, f"{verdict} after {report['seconds']:.0f} s; {machine}")
