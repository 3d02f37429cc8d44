# SPDX-License-Identifier: Apache-2.0
"""From what a soak saw to a verdict. Every check says what it requires."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from .canaries import Agreement, compare
from .run import Findings, held_by_requests
from .slope import Slope, slope_of
from .target import Target
from .watch import MemorySample
from .windows import NOT_WELL, Windows

_FD_SLACK, _THREAD_SLACK = 16, 4
_LEAST_LIFE_S, _SETTLING_S = 600.0, 240.0
_MOST_RSS_MIB_PER_HOUR = 60.0
_MOST_SLOWER_PERCENT = 5.0
_CODE = re.compile(r"(?<![0-9])[0-9]{9}(?![0-9])")


class Check(NamedTuple):
    """One judged figure."""

    name: str
    value: Any
    required: str
    passed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """All checks, and what they were made from."""

    checks: tuple[Check, ...]
    windows: Windows
    agreement: dict[str, Agreement]
    endings: dict[str, int]
    latency: dict[str, Slope | None]
    memory: dict[str, Slope]

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)


def judge(found: Findings, target: Target) -> Verdict:
    """Judge what was seen by what was asked for."""
    windows = Windows(found.faults, found.point_faults)
    endings = Counter(windows.ending_of(outcome) for outcome in found.outcomes)
    agreement = compare(found.outcomes, found.solos)
    latency, memory = latencies(found, windows), memory_slopes(found)
    checks = [
        *_of_answers(found, windows, endings),
        *_of_canaries(found, agreement["dense"]),
        *_of_faults(found, windows),
        *_of_leaks(found),
        *_of_end(target),
        *_of_slopes(latency, memory),
    ]
    return Verdict(
        checks=tuple(checks),
        windows=windows,
        agreement=agreement,
        endings=dict(sorted(endings.items())),
        latency=latency,
        memory=memory,
    )


def _of_answers(found: Findings, windows: Windows, endings: Counter[str]) -> Iterable[Check]:
    asked = found.asked
    for name in NOT_WELL:
        yield _none(f"requests: {name}", endings[name])
    if asked.expect_no_loss:
        lost = sum(windows.is_loss_of_cache_rank(outcome) for outcome in found.outcomes)
        yield _none("requests lost to the cache rank", lost)
    codes = {outcome.request.code for outcome in found.outcomes if outcome.request.code}
    foreign = sum(
        bool((codes & {*_CODE.findall(outcome.text)}) - {outcome.request.code})
        for outcome in found.outcomes
    )
    yield _none("answers with the code of another request", foreign)
    refused = [
        outcome.ended - outcome.started
        for outcome in found.outcomes
        if outcome.request.refusals and not windows.touching(outcome)
    ]
    if refused:
        # The nearest rank: an interpolation of few values gives more than the largest of them.
        slow = float(np.percentile(refused, 95, method="inverted_cdf"))
        yield Check(
            "bad requests: 95 % are refused within, s",
            round(slow, 3),
            f"at most {asked.refused_within_s:g}",
            slow <= asked.refused_within_s,
        )


def _of_canaries(found: Findings, dense: Agreement) -> Iterable[Check]:
    yield Check(
        "canaries that differ from their solo answer",
        f"{dense.differ} of {dense.answered}",
        "0 of some",
        dense.differ == 0 < dense.answered,
    )
    pairs = zip_longest(found.solos, found.solos_after)
    changed = sum(
        after is None or before.text != after.text for before, after in pairs if before.is_dense
    )
    yield _none("solo answers that differ after the soak, or are not given", changed)


def _of_faults(found: Findings, windows: Windows) -> Iterable[Check]:
    allowed_s = found.asked.ready_within_s
    times = [fault.recovery_s for fault in found.faults]
    late = [each for each in times if each is None or each > allowed_s]
    if times:
        slowest = max((each for each in times if each is not None), default=None)
        yield Check(
            "faults after which it is not ready again in time; slowest, s",
            f"{len(late)} of {len(times)}; {slowest and round(slowest, 1)}",
            f"0, at most {allowed_s:g}",
            not late,
        )
    error = found.watch.error
    yield Check("the server was watched to the end", error or "yes", "yes", not error)
    restarts = [each for each in found.watch.restarts if not windows.during(each.time, each.time)]
    yield _none("restarts that no fault explains", len(restarts))
    unready = [
        each for each in found.watch.unready
        if not windows.during(each.began, each.ended) and each.ended - each.began > 1.0
    ]  # fmt: skip
    yield _none("times not ready that no fault explains", len(unready))


def _of_leaks(found: Findings) -> Iterable[Check]:
    last = found.quiet[-1]
    for name in held_by_requests(last.is_flushed):
        left = last.books.get(name)
        yield Check(f"{name} at the end", "not read" if left is None else left, "0", left == 0)
    mapped = [point.books.get("mapped_bytes") for point in found.quiet]
    is_read = bool(last.books) and bool(found.quiet[0].books)
    grown = (mapped[-1] or 0.0) - (mapped[0] or 0.0)
    yield Check(
        "growth of mapped memory, bytes",
        grown if is_read else "not read",
        "0",
        is_read and mapped[-1] == mapped[0],
    )
    held = [point.held for point in found.quiet if point.held is not None]
    if not held:
        return
    first, end = held[0], held[-1]
    for what, slack in (("fds", _FD_SLACK), ("threads", _THREAD_SLACK)):
        more = {
            role: _most(end.roles.get(role, ()), what) - _most(some, what)
            for role, some in first.roles.items()
        }
        worst = max(more, key=lambda role: more[role], default=None)
        yield Check(
            f"growth of {what}, largest of a process",
            "not read" if worst is None else f"{more[worst]} ({worst})",
            f"at most {slack}",
            worst is not None and more[worst] <= slack,
        )
    files = _named(end.run_dir_files) - _named(first.run_dir_files)
    yield _none("files in the run directory that came", sorted(files))
    segments = len(end.shared_memory) - len(first.shared_memory)
    yield Check("growth of shared memory, segments", segments, "at most 0", segments <= 0)


def _of_end(target: Target) -> Iterable[Check]:
    if target.left is not None:
        yield _none("left behind by the server that was ended", target.left)
        status = target.exit_status
        yield Check("end of the server", status, "exit code 0", status == "exit code 0")


def _of_slopes(latency: dict[str, Slope | None], memory: dict[str, Slope]) -> Iterable[Check]:
    required = "an interval that reaches {:g} or below"
    for name, slope in latency.items():
        if slope is not None:
            yield Check(
                f"slope of {name}, % over the soak, with its 95 % interval",
                _percent(slope),
                required.format(_MOST_SLOWER_PERCENT),
                100 * slope.least_change <= _MOST_SLOWER_PERCENT,
            )
    for role, slope in memory.items():
        yield Check(
            f"private memory of {role}, MiB per hour, with its 95 % interval",
            f"{slope.per_hour:+.1f} ({slope.low:+.1f} to {slope.high:+.1f})",
            required.format(_MOST_RSS_MIB_PER_HOUR),
            slope.low <= _MOST_RSS_MIB_PER_HOUR,
        )


def latencies(found: Findings, windows: Windows) -> dict[str, Slope | None]:
    """Return how the times of probes grow, what else the machine computes taken into account."""
    probes = [
        outcome
        for outcome in found.outcomes
        if outcome.request.kind == "probe"
        and outcome.ending == "complete"
        and not windows.touching(outcome)
        and outcome.gaps_s
    ]
    machine, times = found.watch.machine, [outcome.started for outcome in probes]
    others = [_at(machine, time) for time in times]
    series = {
        "time to first token": [outcome.first_s or 0.0 for outcome in probes],
        "time per token": [statistics.fmean(outcome.gaps_s) for outcome in probes],
    }
    return {
        name: slope_of(times, values, beside=others, seed=found.asked.seed)
        for name, values in series.items()
    }


def memory_slopes(found: Findings) -> dict[str, Slope]:
    """Return the growth of each role's longest life of ten minutes or more, once settled."""
    lives: dict[tuple[str, int], list[MemorySample]] = {}
    for sample in found.watch.memory:
        lives.setdefault((sample.role, sample.pid), []).append(sample)
    longest: dict[str, list[MemorySample]] = {}
    for (role, _), life in lives.items():
        if life[-1].time - life[0].time >= _LEAST_LIFE_S and len(life) > len(longest.get(role, ())):
            longest[role] = life
    slopes = {}
    for role, life in longest.items():
        settled = [each for each in life if each.time - life[0].time >= _SETTLING_S]
        slopes[role] = slope_of([x.time for x in settled], [x.private_mib for x in settled])
    return {role: slope for role, slope in slopes.items() if slope is not None}


def _at(machine: list[tuple[float, float, float]], time: float) -> float:
    """Return the CPU time of others at `time`."""
    return min(machine, key=lambda each: abs(each[0] - time))[2] if machine else 0.0


def _percent(slope: Slope) -> str:
    scale = 100 * slope.change / slope.per_hour if slope.per_hour else 0.0
    low, high = slope.low * scale, slope.high * scale
    return f"{100 * slope.change:+.0f} ({low:+.0f} to {high:+.0f}), median {slope.median:.3f} s"


def _none(name: str, value: Any) -> Check:
    return Check(name, value, "none" if isinstance(value, list) else "0", not value)


def _most(some: Iterable[Any], what: str) -> int:
    return max((int(getattr(each, what)) for each in some), default=0)


def _named(files: Iterable[str]) -> set[str]:
    """Take process ids and random parts out of names: what is replaced is not more."""
    return {re.sub(r"[0-9a-z_]{8,}|[0-9]+", "*", name) for name in files}
