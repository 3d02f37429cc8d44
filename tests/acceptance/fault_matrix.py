# SPDX-License-Identifier: Apache-2.0
"""Item *fault_matrix*: a fault at each named point, and each thing that can be done there.

A case is a point, an action and a seed. Requests decode together when it happens; each of at least
twice its resident and recent tokens. Where a cache rank ends, hangs or is late, every request has
to go on and end with the tokens of an undisturbed run. Where SGLang ends, requests may end with an
error that says so; the server has to be ready again, and to answer as before.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

import psutil
from exactness import flush
from nothing_lost import (
    Stream,
    begin,
    make_prompts,
    serving_pid,
    settings_of,
    undisturbed,
    values,
    wait_for,
)
from rank_servers import Server, ours
from workbench import Bench, Checks

from tandemkv.cache_rank.protocol.fault_points import (
    FAULTS_FILE,
    FAULTS_VARIABLE,
    POINTS,
    read_faults,
)

REQUESTS, NEW_TOKENS, SEEDS = 6, 20, 5
READY_WITHIN_S = 120.0
NEEDS_EPOCH = (
    "cache_rank.hello",
    "control.send",
    "control.receive",
    "control.answer",
    "memory.offer",
    "memory.accept",
)
"""Passed when an epoch begins: the cache rank is killed, so that one does."""
_PER_LAYER, _PER_STEP = 0.004, 0.2
RATES = {
    "cache_rank.layer": _PER_LAYER,
    "inference_rank.layer": _PER_LAYER,
    "cache_rank.step": _PER_STEP,
    "inference_rank.batch": _PER_STEP,
    "ring.write": _PER_STEP,
    "ring.read": _PER_STEP,
}
"""Share of the visits, so that the seed decides where in a step it happens; else the next visit."""
ROUNDS = 8
"""Times that requests decode again until a fault whose moment is drawn has happened."""
HAPPENS_WITHIN_S = 5.0
"""After the answers to requests."""
DELAYS_S = (0.05, 0.3, 1.0, 2.0, 5.0)
"""By seed; the last is longer than the window of a heartbeat (3 s)."""
BEATS_LOST = 5
"""Signs of life that get lost, where three are missed before a rank counts as lost."""


@dataclass(frozen=True)
class Case:
    """What is done where."""

    point: str
    action: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.point} {self.action} {self.seed}"

    @property
    def rule(self) -> str:
        """The case in the form of ``TANDEMKV_FAULTS``."""
        action = self.action
        if action == "delay":
            action = f"delay({DELAYS_S[self.seed % len(DELAYS_S)]})"
        lost = self.action == "drop" and self.point.startswith("heartbeat.")
        times = BEATS_LOST if lost else 1
        rate = RATES.get(self.point, 1)
        return f"seed={self.seed};{self.point}={action}@{rate}x{times}"

    @property
    def ends_sglang(self) -> bool:
        """Whether a process of SGLang's may be replaced, with which its requests end."""
        return self.action in ("kill", "stop") and POINTS[self.point].role in (
            "inference_rank",
            "http",
        )


def cases(actions: Sequence[str], roles: Sequence[str], seeds: int = SEEDS) -> Iterator[Case]:
    """All cases of `actions` at points of `roles`."""
    for point, place in POINTS.items():
        if place.role in roles:
            for action in actions:
                if action != "drop" or place.can_drop:
                    yield from (Case(point, action, seed) for seed in range(seeds))


def run_case(
    server: Server, case: Case, rules: Path, prompts: list[list[int]], want: list[list[int]]
) -> dict[str, Any]:
    """Let it happen while requests decode; say what became of them, and of the server."""
    log = server.run_dir / FAULTS_FILE if server.run_dir is not None else Path()
    begun, streams = decode_through(server, case, rules, prompts)
    for _ in range(ROUNDS if case.point in RATES else 0):
        if _happens(log, begun):
            break
        _, streams = decode_through(server, None, rules, prompts)
    if case.point not in NEEDS_EPOCH and not _happens(log, begun):
        raise AssertionError(f"{case.name} did not happen")
    replace_rules(rules, "")
    wait_for(lambda: server.get("/tandemkv/ready")[0] == 200, "not ready again", READY_WITHIN_S)
    ready_s = time.time() - begun
    wait_for(lambda: values(server)["request_rows"] == 0, "rows are left", 60.0)
    flush(server)
    left = values(server)
    again = undisturbed(server, prompts, NEW_TOKENS) if case.ends_sglang else want
    return {
        "happened": len(_happened(log, begun)),
        "ended": sum(not stream.error for stream in streams),
        "same_tokens": sum(s.tokens == t for s, t in zip(streams, want, strict=True)),
        "foreign_tokens": sum(not _is_prefix(s, t) for s, t in zip(streams, want, strict=True)),
        "errors": sorted({stream.error[:80] for stream in streams if stream.error}),
        "same_afterwards": again == want,
        "ready_s": round(ready_s, 2),
        "rows_left": left["request_rows"],
        "slots_left": left["slots_used"],
    }


def decode_through(
    server: Server, case: Case | None, rules: Path, prompts: list[list[int]]
) -> tuple[float, list[Stream]]:
    """Answer all `prompts`, the rule of `case` set once they decode, or left as it is.

    Returns when that was, and the answers.
    """
    flush(server)
    with ThreadPoolExecutor(len(prompts) + 1) as pool:
        streams, futures = begin(pool, server, prompts, NEW_TOKENS)
        wait_for(lambda: all(s.tokens for s in streams), "requests do not decode", 300.0, 0.005)
        begun = time.time()
        if case is not None:
            replace_rules(rules, case.rule)
            if case.point in NEEDS_EPOCH:
                psutil.Process(serving_pid(server)).kill()
            if case.point == "http.request":
                pool.submit(read_quietly, server)
        for future in futures:
            future.result()
    return begun, streams


def read_quietly(server: Server) -> None:
    """Send a request, whatever comes of it."""
    try:
        server.get("/v1/models")
    except (OSError, HTTPException):
        return


def put_through(
    server: Server,
    chosen: Sequence[Case],
    rules: Path,
    prompts: list[list[int]],
    want: list[list[int]],
) -> dict[str, Any]:
    """Put a server that follows `rules` through `chosen`; a case that fails is a row, too."""
    rows: dict[str, Any] = {}
    for case in chosen:
        begun = time.time()
        try:
            rows[case.name] = run_case(server, case, rules, prompts, want)
        except (AssertionError, OSError, KeyError, HTTPException, psutil.Error) as error:
            rows[case.name] = {"failed": f"{type(error).__name__}: {error}"}
            replace_rules(rules, "")
        rows[case.name]["seconds"] = round(time.time() - begun, 1)
    return rows


def campaign(chosen: Sequence[Case]) -> dict[str, Any]:
    """Put one server through `chosen`."""
    prompts = make_prompts(REQUESTS)
    folder = Path(tempfile.mkdtemp(prefix="tkv-faults-"))
    rules = folder / "rules"
    settings = settings_of(num_requests=REQUESTS, standby=True)
    with ours(settings, environ={FAULTS_VARIABLE: f"@{rules}"}) as server:
        want = undisturbed(server, prompts, NEW_TOKENS)
        rows = put_through(server, chosen, rules, prompts, want)
        processes = server.processes()
    rules.unlink(missing_ok=True)
    folder.rmdir()
    left = [process.pid for process in processes if process.is_running()]
    return {"cases": rows, "processes_left": len(left)}


def judge(checks: Checks, chosen: Sequence[Case], rows: dict[str, Any]) -> None:
    """Compare with what is promised."""
    failed = [name for name, row in rows.items() if "failed" in row]
    checks.add("cases that could not be judged (hung)", failed[:5], "none", not failed)
    whole = [rows[case.name] for case in chosen if case.name not in failed]
    missed = [case.name for case in chosen if not rows[case.name].get("happened", 1)]
    checks.add("cases whose fault did not happen", missed[:5], "none", not missed)
    kept = [case for case in chosen if not case.ends_sglang and case.name not in failed]
    lost = [c.name for c in kept if rows[c.name]["ended"] < REQUESTS]
    checks.add("cases of the cache rank that lost a request", lost[:5], "none", not lost)
    wrong = [c.name for c in kept if rows[c.name]["same_tokens"] < REQUESTS]
    checks.add("cases of the cache rank with other tokens", wrong[:5], "none", not wrong)
    silent = [
        case.name
        for case in chosen
        if case.name not in failed
        and POINTS[case.point].role == "inference_rank"  # of whom SGLang's HTTP process tells
        and "cut" in rows[case.name]["errors"]
    ]
    checks.add("cases of the scheduler with a stream that was cut", silent[:5], "none", not silent)
    foreign = sum(row["foreign_tokens"] for row in whole)
    checks.add("answers that are no part of the undisturbed one", foreign, "0", foreign == 0)
    after = sum(not row["same_afterwards"] for row in whole)
    checks.add("cases after which the server answers otherwise", after, "0", after == 0)
    left = sum(row["rows_left"] + row["slots_left"] for row in whole)
    checks.add("rows and slots left", left, "0", left == 0)


GROUPS = {
    "cache rank": (("kill", "stop", "delay", "drop"), ("cache_rank",)),
    "inference rank, late or lost": (("delay", "drop"), ("inference_rank", "http")),
    "inference rank, ended": (("kill", "stop"), ("inference_rank", "http")),
}


def sample(number: int, seed: int = 0) -> list[Case]:
    """Some cases of a cache rank's, for a test."""
    whole = list(cases(*GROUPS["cache rank"], seeds=SEEDS))
    return random.Random(seed).sample(whole, number)


def run(bench: Bench) -> dict[str, Any]:
    """Every action at every point of the ranks, five seeds each."""
    chosen = {name: list(cases(*group)) for name, group in GROUPS.items()}
    tasks = {name: partial(campaign, each) for name, each in chosen.items()}
    found, checks = bench.run("fault_matrix", tasks), Checks()
    rows = {key: row for each in found.values() for key, row in each["cases"].items()}
    every = [case for each in chosen.values() for case in each]
    checks.add("cases", len(every), ">= 240", len(every) >= 240)
    judge(checks, every, rows)
    left = sum(each["processes_left"] for each in found.values())
    checks.add("processes left", left, "0", left == 0)
    return checks.result(rows=summary(every, rows))


def summary(chosen: Sequence[Case], rows: dict[str, Any]) -> dict[str, str]:
    """Say in a line what became of the cases of each action at a point."""
    found: dict[str, str] = {}
    for case in chosen:
        key = f"{case.point} {case.action}"
        own = [rows[x.name] for x in chosen if (x.point, x.action) == (case.point, case.action)]
        whole = [row for row in own if "failed" not in row]
        count = REQUESTS * len(own)
        found[key] = (
            f"{len(whole)} of {len(own)} judged; of {count} requests "
            f"{sum(row['same_tokens'] for row in whole)} with the tokens of an undisturbed run, "
            f"{count - sum(row['ended'] for row in whole)} ended with an error; ready again after "
            f"{max((row['ready_s'] for row in whole), default=0.0)} s at most"
        )
    return found


def _happened(log: Path, since: float) -> list[dict[str, Any]]:
    """Return what was done at fault points, oldest first."""
    return [line for line in read_faults(log) if float(line["time"]) >= since and line["point"]]


def _happens(log: Path, since: float) -> bool:
    """Whether something was done; it may be written a little later."""
    try:
        wait_for(lambda: _happened(log, since), "", HAPPENS_WITHIN_S)
    except AssertionError:
        return False
    return True


def _is_prefix(stream: Stream, want: Sequence[int]) -> bool:
    return stream.tokens == list(want[: len(stream.tokens)])


def replace_rules(path: Path, text: str) -> None:
    """Have the processes of a server follow the rules in `text` from now on."""
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.rename(path)
