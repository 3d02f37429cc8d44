# SPDX-License-Identifier: Apache-2.0
"""Named places where a test may kill, stop or delay a process, or let a message be lost.

Off unless ``TANDEMKV_FAULTS`` is set when the server is started; `reach` then returns at once. With
one seed each process takes the same decisions at the same visits of a point. What was done is
appended to ``faults.jsonl`` in the run directory before it is done.

    TANDEMKV_FAULTS="seed=7;ring.write=drop@0.01;cache_rank.layer=kill@0.001x1"

reads: one announcement in a hundred is lost, and the cache rank is killed at one layer in a
thousand, once in the life of a run directory. ``delay(0.2)`` sleeps for 0.2 s.

    TANDEMKV_FAULTS=@/path/to/rules

takes the rules from a file, and again whenever that is replaced; none while there is no such file.
How often a rule was followed is then counted anew. So one server can be put through many faults.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from .errors import SettingsError

FAULTS_VARIABLE = "TANDEMKV_FAULTS"
FAULTS_FILE = "faults.jsonl"
_MAX_LINES = 10_000
"""Of one process, so that a careless rate does not fill a volume."""

Role = Literal["launcher", "http", "inference_rank", "cache_rank"]


class FaultPoint(NamedTuple):
    """A place: in which process it is, when it is passed, and whether its message may be lost."""

    role: Role
    when: str
    can_drop: bool = False


POINTS: dict[str, FaultPoint] = {
    "launcher.start": FaultPoint("launcher", "before a rank is started, or started again"),
    "launcher.turn": FaultPoint("launcher", "each time a rank is looked after"),
    "http.request": FaultPoint("http", "a request reached SGLang's application"),
    "inference_rank.batch": FaultPoint("inference_rank", "before a forward pass"),
    "inference_rank.layer": FaultPoint("inference_rank", "before the attention of a layer"),
    "cache_rank.hello": FaultPoint("cache_rank", "an inference rank asked for an epoch"),
    "cache_rank.step": FaultPoint("cache_rank", "a step was announced, and is not begun"),
    "cache_rank.layer": FaultPoint("cache_rank", "a layer's resident set is done, not announced"),
    "control.send": FaultPoint("inference_rank", "before a control message is sent", True),
    "control.receive": FaultPoint("cache_rank", "a control message arrived", True),
    "control.answer": FaultPoint("cache_rank", "before a control message is answered", True),
    "heartbeat.beat": FaultPoint("inference_rank", "before a sign of life is sent", True),
    "heartbeat.reply": FaultPoint("cache_rank", "before a sign of life is answered", True),
    "memory.offer": FaultPoint("inference_rank", "before mapped memory is handed over"),
    "memory.accept": FaultPoint("cache_rank", "mapped memory arrived, and is not used yet"),
    "ring.write": FaultPoint("inference_rank", "an announcement is written, not shown", True),
    "ring.read": FaultPoint("cache_rank", "an announcement is read, not confirmed"),
}
"""All points by name."""

_RULE = re.compile(
    r"(?P<point>[a-z_.]+)=(?P<action>kill|stop|drop|delay\((?P<seconds>\d+(\.\d+)?)\))"
    r"@(?P<rate>\d+(\.\d+)?)(x(?P<times>\d+))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRule:
    """What is done at a point: in a share `rate` of its visits, `times` at most (None: always).

    `action` is kill, stop, delay (for `seconds`) or drop.
    """

    point: str
    action: str
    rate: float
    seconds: float = 0.0
    times: int | None = None


def parse_faults(text: str) -> tuple[int, tuple[FaultRule, ...]]:
    """Return the seed and the rules of `text`; see the module for its form.

    Raises `SettingsError`, naming the rule that cannot be read, the points that exist, or why it
    does not fit.
    """
    seed, rules = 0, []
    for part in filter(None, (each.strip() for each in text.split(";"))):
        if re.fullmatch(r"seed=\d{1,18}", part):
            seed = int(part.removeprefix("seed="))
            continue
        found = _RULE.fullmatch(part)
        if found is None or float(found["rate"]) > 1:
            raise SettingsError(
                f"{FAULTS_VARIABLE}: {part!r} cannot be read; write POINT=ACTION@SHARE or "
                "POINT=ACTION@SHARExTIMES, where ACTION is kill, stop, drop or delay(SECONDS) and "
                "SHARE is from 0 to 1"
            )
        point, action = found["point"], found["action"].partition("(")[0]
        if reason := _objection(point, action):
            raise SettingsError(f"{FAULTS_VARIABLE}: {reason}")
        rules.append(
            FaultRule(
                point=point,
                action=action,
                rate=float(found["rate"]),
                seconds=float(found["seconds"] or 0),
                times=int(found["times"]) if found["times"] else None,
            )
        )
    return seed, tuple(rules)


def _objection(point: str, action: str) -> str:
    if point not in POINTS:
        return f"there is no point {point}; there are {', '.join(POINTS)}"
    if action == "drop" and not POINTS[point].can_drop:
        droppable = ", ".join(name for name, each in POINTS.items() if each.can_drop)
        return f"nothing is sent at {point}; drop is for {droppable}"
    if action == "stop" and POINTS[point].role == "launcher":
        return f"nobody would continue a launcher that is stopped at {point}"
    return ""


class FaultPlan:
    """The rules of one process, and how often each was followed.

    `seed` decides, with the process's role and how often that was started, at which visits. `log`
    is a file of JSON lines: what earlier processes of the role did counts for `FaultRule.times`.
    Nothing is done before `since`, in seconds since the epoch.
    """

    def __init__(
        self, seed: int, rules: tuple[FaultRule, ...], *, role: Role, log: Path, since: float = 0.0
    ) -> None:
        self._role, self._log = role, log
        lines = read_faults(log)
        before = [x for x in lines if x["role"] == role and float(x["time"]) >= since]
        start = sum(line["action"] == "start" for line in before)
        done = Counter((line["point"], line["action"]) for line in before)
        self._rules: dict[str, list[FaultRule]] = {}
        for rule in rules:
            if POINTS[rule.point].role == role:
                self._rules.setdefault(rule.point, []).append(rule)
        self._done = {rule: done[rule.point, rule.action] for rule in rules}
        self._random = {
            rule: random.Random(f"{seed}/{role}/{start}/{rule.point}/{rule.action}")
            for rule in rules
        }
        self._visits: Counter[str] = Counter()
        self._num_lines = 0
        self._write("", "start")

    def reach(self, point: str) -> bool:
        """Do what is due at `point`; True if the message there is to be lost."""
        rules = self._rules.get(point)
        if rules is None:
            return False
        self._visits[point] += 1
        is_dropped = False
        for rule in rules:
            is_due = self._random[rule].random() < rule.rate
            if not is_due or (rule.times is not None and self._done[rule] >= rule.times):
                continue
            self._done[rule] += 1
            self._write(point, rule.action)
            if rule.action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif rule.action == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif rule.action == "delay":
                time.sleep(rule.seconds)
            else:
                is_dropped = True
        return is_dropped

    def _write(self, point: str, action: str) -> None:
        self._num_lines += 1
        if self._num_lines > _MAX_LINES:
            return
        line = {
            "time": time.time(),
            "role": self._role,
            "pid": os.getpid(),
            "point": point,
            "visit": self._visits[point],
            "action": action,
        }
        handle = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(handle, json.dumps(line).encode() + b"\n")
        finally:
            os.close(handle)


def read_faults(log: Path) -> list[dict[str, float | int | str]]:
    """Return what was done so far, oldest first; nothing if there is no such file."""
    try:
        lines = log.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("}")]


class FollowedFile:
    """A plan whose rules are in a file, and are read again when it is replaced.

    `path` has the rules in the form of the variable; replace it as a whole, by a rename. `role` and
    `log` are as of `FaultPlan`. Raises `SettingsError` if the rules cannot be read, from the
    constructor and from `reach`.
    """

    def __init__(self, path: Path, *, role: Role, log: Path) -> None:
        self._path, self._role, self._log = path, role, log
        self._lock = threading.Lock()
        self._seen = self._version()
        self._plan = self._read(self._seen)

    def reach(self, point: str) -> bool:
        """As `FaultPlan.reach`."""
        version = self._version()
        if version != self._seen:
            with self._lock:
                if version != self._seen:
                    self._plan = self._read(version)
                    self._seen = version
        return self._plan.reach(point)

    def _version(self) -> tuple[int, int]:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return (0, 0)
        return found.st_ino, found.st_mtime_ns

    def _read(self, version: tuple[int, int]) -> FaultPlan:
        try:
            text = self._path.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            text = ""
        seed, rules = parse_faults(text)
        since = version[1] / 1e9
        return FaultPlan(seed, rules, role=self._role, log=self._log, since=since)


_plan: FaultPlan | FollowedFile | None = None


def reach(point: str) -> bool:
    """Pass the fault point `point`; True if the message there is to be lost."""
    return _plan is not None and _plan.reach(point)


def enable_faults(
    role: Role, run_dir: Path, environ: Mapping[str, str] = os.environ
) -> tuple[FaultRule, ...]:
    """Follow the rules of ``TANDEMKV_FAULTS`` in this process; none if it is not set.

    Returns the rules, but for those of a file. Raises `SettingsError` if it cannot be read.
    """
    global _plan
    text = environ.get(FAULTS_VARIABLE, "")
    if not text:
        _plan = None
        return ()
    log = run_dir / FAULTS_FILE
    if text.startswith("@"):
        _plan = FollowedFile(Path(text[1:]), role=role, log=log)
        return ()
    seed, rules = parse_faults(text)
    _plan = FaultPlan(seed, rules, role=role, log=log)
    return rules
