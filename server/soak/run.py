# SPDX-License-Identifier: Apache-2.0
"""One soak from its first request to its verdict."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tandemkv.server.launch.probes import StatusUnavailableError, fetch_status

from .canaries import SoakError, Solo, record_solo
from .client import Outcome
from .faults import Chaos, Fault
from .processes import Held
from .requests import Load, Request
from .target import Target
from .watch import Watch

if TYPE_CHECKING:
    from .command import SoakRequest

_CANARIES = 9
_PROBE_EVERY_S = 2.0
_QUIET_TIMEOUT_S = 150.0
_UNREACHABLE_PAUSE_S = 1.0
_MOST_QUIET = 6
_LAG_S = 1.0
"""SGLang's gauges lag behind an idle server."""
_UNANSWERED = OSError, http.client.HTTPException
"""What `Client.ask` raises, also for an answer that is cut."""
_METRICS = re.compile(r"^sglang:(num_used_tokens)\{[^}]*\} (\S+)$", re.MULTILINE)


@dataclass(slots=True, kw_only=True)
class QuietPoint:
    """What the server holds while nobody asks for anything.

    `books` are its own counts: rows and slots of requests, mapped bytes, SGLang's tokens.
    """

    held: Held | None
    books: dict[str, float]
    is_flushed: bool


@dataclass(slots=True, kw_only=True)
class Findings:
    """All that a soak saw; `judge` makes a verdict of it."""

    asked: SoakRequest
    began: float
    ended: float = 0.0
    solos: list[Solo]
    solos_after: list[Solo] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    quiet: list[QuietPoint] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    watch: Watch
    point_faults: list[dict[str, float | int | str]] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)


def soak(target: Target, asked: SoakRequest, tell: Callable[[str], None]) -> Findings:
    """Load `target`, do faults, and return what was seen.

    Raises `SoakError` if the server does not answer before anything was done to it.
    """
    load = Load(asked.seed, canaries=_CANARIES, longest_tokens=asked.longest_tokens)
    tell("recording what each canary is answered alone")
    is_dense = dense_rule(fetch_status(target.url))
    solos = record_solo(target.client, load, _CANARIES, is_dense)
    watch = Watch(target.url, target.processes)
    found = Findings(asked=asked, began=time.time(), solos=solos, watch=watch)
    watch.start()
    run = _Run(target, load, found, tell)
    try:
        run.warm_up()
        run.go()
        tell("recording the canaries alone once more")
        with contextlib.suppress(SoakError):
            found.solos_after = record_solo(target.client, load, _CANARIES, is_dense)
        with contextlib.suppress(StatusUnavailableError):  # what was seen is judged all the same
            found.status = fetch_status(target.url)
    finally:
        run.close()
        watch.stop()
    found.point_faults = target.point_faults()
    return found


def dense_rule(status: dict[str, Any]) -> Callable[[int], bool]:
    """Return whether a request of so many tokens attends to everything on this server."""
    rank = status["inference_rank"]
    longest = float(rank.get("values", {}).get("plan_dense_tokens", 0.0))
    is_exact = rank.get("info", {}).get("policy") == "exact"
    return lambda tokens: is_exact or tokens <= longest


def has_met(status: dict[str, Any]) -> bool:
    """Return whether each cache rank here is in an epoch: between two it has fewer descriptors.

    Requests may wait for that meanwhile, so that the server is ready all the same.
    """
    is_up = status["inference_rank"]["values"].get("cache_rank_up", 1.0)
    return bool(is_up) and all(rank.get("epoch") for rank in status["cache_ranks"])


def held_by_requests(is_flushed: bool) -> tuple[str, ...]:
    """Return which of the books have to be 0 while nobody asks for anything.

    The prefix cache keeps slots of requests that have ended, until it is emptied.
    """
    return ("request_rows", "slots_used", "sglang_tokens") if is_flushed else ("request_rows",)


class _Run:
    """Threads that send requests, and the pauses between them."""

    def __init__(
        self, target: Target, load: Load, found: Findings, tell: Callable[[str], None]
    ) -> None:
        self._target, self._load, self._found, self._tell = target, load, found, tell
        self._asked = found.asked
        self._lock = threading.Lock()
        self._number = self._probes = 0
        self._stopping, self._open = threading.Event(), threading.Event()
        self._busy = 0
        self._chaos: Chaos | None = None
        senders = [self._send_load] * self._asked.concurrency + [self._send_probes]
        self._threads = [threading.Thread(target=send, daemon=True) for send in senders]

    def warm_up(self) -> None:
        """Open what stays open: thread pools, connections between the ranks, logs."""
        for thread in self._threads:
            thread.start()
        self._tell("warming up")
        self._open.set()
        time.sleep(min(20.0, self._asked.duration_s / 6))
        self._quiet()

    def go(self) -> None:
        """Load and faults, with quiet points on the way and at the end."""
        asked, watch, processes = self._asked, self._found.watch, self._target.processes
        chaos = None
        if processes is not None:
            chaos = self._chaos = Chaos(
                seed=asked.seed,
                actions=asked.actions,
                processes=processes,
                is_ready=lambda: watch.is_ready,
                calm_s=asked.calm_s,
            )
            self._found.faults = chaos.faults
            chaos.start()
        end = time.monotonic() + asked.duration_s
        parts = max(1, min(_MOST_QUIET, int(asked.duration_s // 60)))
        for part in range(parts):
            self._tell(f"load and faults, part {part + 1} of {parts}")
            self._open.set()
            rest = (end - time.monotonic()) / (parts - part)
            self._stopping.wait(max(1.0, rest))
            if part == parts - 1 and chaos is not None:
                chaos.stop()
            with chaos.hold() if chaos is not None else contextlib.nullcontext():
                self._quiet()

    def close(self) -> None:
        """Send nothing more, and do no more faults."""
        if self._chaos is not None:
            self._chaos.leave()
        self._stopping.set()
        self._open.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(200.0)
        self._found.ended = time.time()

    def _quiet(self) -> None:
        """Let everything finish, empty the prefix cache, and look at what is held."""
        self._open.clear()
        time.sleep(0.2)  # for who has drawn a request and not begun to send it
        deadline = time.monotonic() + _QUIET_TIMEOUT_S
        while (self._busy or not self._found.watch.is_ready) and time.monotonic() < deadline:
            time.sleep(0.1)
        is_flushed = self._flush(deadline)
        books: dict[str, float] = {}
        while time.monotonic() < deadline:
            with contextlib.suppress(*_UNANSWERED, ValueError, StatusUnavailableError, KeyError):
                status = fetch_status(self._target.url)
                books = self._books(status)
                is_idle = not any(books.get(name) for name in held_by_requests(is_flushed))
                if is_idle and has_met(status):
                    break
            time.sleep(_LAG_S)
        processes = self._target.processes
        held = None if processes is None else processes.held()
        if held is not None:
            self._target.segments.update(held.shared_memory)
        self._found.quiet.append(QuietPoint(held=held, books=books, is_flushed=is_flushed))

    def _flush(self, deadline: float) -> bool:
        while time.monotonic() < deadline:
            with contextlib.suppress(*_UNANSWERED):
                code, _ = self._target.client.ask("POST", "/flush_cache", is_admin=True)
                if code in (200, 401, 403):
                    return code == 200
            time.sleep(0.5)
        return False

    def _books(self, status: dict[str, Any]) -> dict[str, float]:
        """Return what requests hold, by the inference rank's own count and by SGLang's."""
        values = status["inference_rank"]["values"]
        names = ("request_rows", "slots_used", "mapped_bytes")
        found = {name: float(values[name]) for name in names if name in values}
        code, text = self._target.client.ask("GET", "/v1/loads", is_admin=True)
        if code == 200:
            loads = json.loads(text)["loads"]
            return found | {"sglang_tokens": sum(float(each["num_used_tokens"]) for each in loads)}
        _, text = self._target.client.ask("GET", "/metrics")
        used = dict(_METRICS.findall(text.decode()))["num_used_tokens"]
        return found | {"sglang_tokens": float(used)}

    def _send_load(self) -> None:
        for request in self._requests():
            outcome = self._send(request)
            if outcome.ending == "unreachable" or outcome.status in (429, 503):
                self._stopping.wait(_UNREACHABLE_PAUSE_S)

    def _requests(self) -> Iterator[Request]:
        while self._await_open():
            with self._lock:
                number, self._number = self._number, self._number + 1
            yield self._load.draw(number)

    def _send_probes(self) -> None:
        while self._await_open():
            begun = time.monotonic()
            self._probes += 1
            self._send(self._load.probe(self._probes))
            self._stopping.wait(max(0.0, begun + _PROBE_EVERY_S - time.monotonic()))

    def _await_open(self) -> bool:
        self._open.wait()
        return not self._stopping.is_set()

    def _send(self, request: Request) -> Outcome:
        with self._lock:
            self._busy += 1
        try:
            outcome = self._target.client.send(request)
        finally:
            with self._lock:
                self._busy -= 1
        outcome.body = None  # an hour of them would be a leak of our own
        with self._lock:
            self._found.outcomes.append(outcome)
        return outcome
