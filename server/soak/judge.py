# SPDX-License-Identifier: Apache-2.0
"""From what a soak saw to a verdict. Every check says what it requires."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .canaries import compare
from .faults import Fault
from .run import Findings, held_by_requests
from .slope import Slope, slope_of
from .target import Target
from .windows import Windows

_FD_SLACK, _THREAD_SLACK = 16, 4
_LEAST_LIFE_S, _SETTLING_S = 600.0, 240.0
_MOST_RSS_MIB_PER_HOUR = 60.0
_MOST_SLOWER_PERCENT = 5.0
_AT_ONCE_S = 1.0
_CODE = re.compile(r"(?<![0-9])[0-9]{9}(?![0-9])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One judged figure."""

    name: str
    value: Any
    required: str
    passed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """All checks, and the figures that are not judged."""

    checks: tuple[Check, ...]
    endings: dict[str, int]
    latency: dict[str, Slope | None]
    memory: dict[str, Slope]

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What is required."""

    ready_within_s: float = 60.0
    """Longest time from a crash to ready again."""
    expect_no_loss: bool = False
    """Whether requests must survive what happens to the cache rank alone."""


def judge(found: Findings, target: Target, rules: Rules) -> Verdict:
    """Judge what was seen."""
    faults = found.chaos.faults if found.chaos is not None else []
    windows = Windows.of(faults, found.point_faults)
    endings = Counter(windows.ending_of(outcome) for outcome in found.outcomes)
    latency = latencies(found, windows)
    memory = memory_slopes(found)
    checks = [
        *_of_answers(found, windows, endings, rules),
        *_of_canaries(found),
        *_of_faults(found, faults, windows, rules),
        *_of_leaks(found, target),
        *_of_slopes(latency, memory),
    ]
    return Verdict(
        checks=tuple(checks), endings=dict(sorted(endings.items())), latency=latency, memory=memory
    )


def _of_answers(
    found: Findings, windows: Windows, endings: Counter[str], rules: Rules
) -> Iterable[Check]:
    for name in ("lost", "wrong status", "HTTP 5xx outside of faults"):
        yield _none(f"requests: {name}", endings[name])
    if rules.expect_no_loss:
        lost = sum(windows.is_loss_of_cache_rank(outcome) for outcome in found.outcomes)
        yield _none("requests lost to the cache rank", lost)
    codes = {outcome.request.code for outcome in found.outcomes if outcome.request.code}
    foreign = [
        outcome
        for outcome in found.outcomes
        if (set(_CODE.findall(outcome.text)) & codes) - {outcome.request.code}
    ]
    yield _none("answers with the code of another request", len(foreign))
    refused = [
        outcome.ended - outcome.started
        for outcome in found.outcomes
        if outcome.request.refusals and not windows.touches(outcome)
    ]
    if refused:
        slow = statistics.quantiles(refused, n=20)[-1] if len(refused) > 1 else refused[0]
        yield Check(
            name="bad requests: 95 % are refused within, s",
            value=round(slow, 3),
            required=f"below {_AT_ONCE_S:g}",
            passed=slow < _AT_ONCE_S,
        )


def _of_canaries(found: Findings) -> Iterable[Check]:
    agreement = compare(found.outcomes, found.solos)
    dense = agreement["dense"]
    yield Check(
        name="canaries that differ from their solo answer",
        value=f"{dense.differ} of {dense.answered}",
        required="0 of some",
        passed=dense.differ == 0 < dense.answered,
    )
    pairs = zip(found.solos, found.solos_after, strict=False)
    changed = sum(before.text != after.text for before, after in pairs if before.is_dense)
    yield _none("solo answers that differ after the soak", changed)


def _of_faults(
    found: Findings, faults: list[Fault], windows: Windows, rules: Rules
) -> Iterable[Check]:
    times = [fault.recovery_s for fault in faults]
    late = [each for each in times if each is None or each > rules.ready_within_s]
    if faults:
        slowest = max((each for each in times if each is not None), default=None)
        yield Check(
            name="faults after which it is not ready again in time; slowest, s",
            value=f"{len(late)} of {len(faults)}; {slowest and round(slowest, 1)}",
            required=f"0, at most {rules.ready_within_s:g}",
            passed=not late,
        )
    restarts = [each for each in found.watch.restarts if not windows.covers(each.time)]
    yield _none("restarts that no fault explains", len(restarts))
    unready = [
        each for each in found.watch.unready
        if not windows.overlaps(each.began, each.ended) and each.ended - each.began > 1.0
    ]  # fmt: skip
    yield _none("times not ready that no fault explains", len(unready))


def _of_leaks(found: Findings, target: Target) -> Iterable[Check]:
    last = found.quiet[-1]
    for name in held_by_requests(last.is_flushed):
        yield _none(f"{name} at the end", last.books.get(name, 0.0))
    yield Check(
        name="growth of mapped memory, bytes",
        value=last.books.get("mapped_bytes", 0.0) - found.quiet[0].books.get("mapped_bytes", 0.0),
        required="0",
        passed=last.books.get("mapped_bytes") == found.quiet[0].books.get("mapped_bytes"),
    )
    held = [point.held for point in found.quiet if point.held is not None]
    if held:
        first, end = held[0], held[-1]
        for what, slack in (("fds", _FD_SLACK), ("threads", _THREAD_SLACK)):
            grown = {
                role: _most(end.roles.get(role, ()), what) - _most(some, what)
                for role, some in first.roles.items()
            }
            worst = max(grown, key=lambda role: grown[role])
            yield Check(
                name=f"growth of {what}, largest of a process",
                value=f"{grown[worst]} ({worst})",
                required=f"at most {slack}",
                passed=grown[worst] <= slack,
            )
        more = set(_named(end.run_dir_files)) - set(_named(first.run_dir_files))
        yield _none("files in the run directory that came", sorted(more))
        segments = len(end.shared_memory) - len(first.shared_memory)
        yield Check(
            name="growth of shared memory, segments",
            value=segments,
            required="at most 0",
            passed=segments <= 0,
        )
    if target.left is not None:
        yield _none("left behind by the server that was ended", target.left)
        yield Check(
            name="end of the server",
            value=target.exit_status,
            required="exit code 0",
            passed=target.exit_status == "exit code 0",
        )


def _of_slopes(latency: dict[str, Slope | None], memory: dict[str, Slope]) -> Iterable[Check]:
    for name, slope in latency.items():
        if slope is not None:
            yield Check(
                name=f"slope of {name}, % over the soak, with its 95 % interval",
                value=_percent(slope),
                required=f"an interval that reaches {_MOST_SLOWER_PERCENT:g} or below",
                passed=100 * slope.least_change <= _MOST_SLOWER_PERCENT,
            )
    for role, slope in memory.items():
        yield Check(
            name=f"private memory of {role}, MiB per hour, with its 95 % interval",
            value=f"{slope.per_hour:+.1f} ({slope.low:+.1f} to {slope.high:+.1f})",
            required=f"an interval that reaches {_MOST_RSS_MIB_PER_HOUR:g} or below",
            passed=slope.low <= _MOST_RSS_MIB_PER_HOUR,
        )


def latencies(found: Findings, windows: Windows) -> dict[str, Slope | None]:
    """Return how the times of probes grow, what else the machine computes taken into account."""
    probes = [
        outcome
        for outcome in found.outcomes
        if outcome.request.kind == "probe"
        and outcome.ending == "complete"
        and not windows.touches(outcome)
        and outcome.gaps_s
    ]
    machine = found.watch.machine
    others = [_at(machine, outcome.started) for outcome in probes]
    times = [outcome.started for outcome in probes]
    series = {
        "time to first token": [outcome.first_s or 0.0 for outcome in probes],
        "time per token": [statistics.fmean(outcome.gaps_s) for outcome in probes],
    }
    return {
        name: slope_of(times, values, beside=others, seed=found.settings.seed)
        for name, values in series.items()
    }


def memory_slopes(found: Findings) -> dict[str, Slope]:
    """Return the growth of each role's longest life of ten minutes or more, once settled."""
    lives: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for sample in found.watch.memory:
        lives.setdefault((sample.role, sample.pid), []).append((sample.time, sample.private_mib))
    longest: dict[str, list[tuple[float, float]]] = {}
    for (role, _), life in lives.items():
        if life[-1][0] - life[0][0] >= _LEAST_LIFE_S and len(life) > len(longest.get(role, ())):
            longest[role] = life
    slopes = {}
    for role, life in longest.items():
        settled = [each for each in life if each[0] - life[0][0] >= _SETTLING_S]
        slope = slope_of([t for t, _ in settled], [mib for _, mib in settled])
        if slope is not None:
            slopes[role] = slope
    return slopes


def _at(machine: list[tuple[float, float, float]], time: float) -> float:
    """Return the CPU time of others at `time`."""
    return min(machine, key=lambda each: abs(each[0] - time))[2] if machine else 0.0


def _percent(slope: Slope) -> str:
    scale = 100 * slope.change / slope.per_hour if slope.per_hour else 0.0
    low, high = slope.low * scale, slope.high * scale
    return f"{100 * slope.change:+.0f} ({low:+.0f} to {high:+.0f}), median {slope.median:.3f} s"


def _none(name: str, value: Any) -> Check:
    is_list = isinstance(value, list)
    return Check(name=name, value=value, required="none" if is_list else "0", passed=not value)


def _most(some: Iterable[Any], what: str) -> int:
    return max((int(getattr(each, what)) for each in some), default=0)


def _named(files: Iterable[str]) -> Iterable[str]:
    """Take process ids and random parts out of names: what is replaced is not more."""
    return (re.sub(r"[0-9a-z_]{8,}|[0-9]+", "*", name) for name in files)
