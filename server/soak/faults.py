# SPDX-License-Identifier: Apache-2.0
"""Kills and stops by a seeded schedule, and the times in which their effects are to be seen."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.fault_points import POINTS

from .processes import CACHE_RANK, HTTP, SCHEDULER, ServerProcesses

Action = Literal["kill", "stop", "pause", "delay", "drop"]
ACTIONS: tuple[Action, ...] = ("kill", "stop", "pause", "delay", "drop")
_BY_SIGNAL = ("kill", "stop", "pause")
_TARGETS = {CACHE_RANK: 3, SCHEDULER: 2, HTTP: 1}
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.3, 6.0
_DELAY_S = 0.2
_RATE = 0.0005
_TICK_S, _GIVE_UP_S = 0.25, 240.0


def parse_actions(text: str) -> tuple[Action, ...]:
    """Return what ``--faults`` names: a list with commas, or ``none``.

    Raises `SettingsError`, listing what there is.
    """
    names = [name.strip() for name in text.split(",") if name.strip() not in ("", "none")]
    unknown = [name for name in names if name not in ACTIONS]
    if unknown:
        raise SettingsError(
            f"--faults {','.join(unknown)}: there are {', '.join(ACTIONS)} and none"
        )
    return tuple(name for name in ACTIONS if name in names)


def points_text(seed: int, actions: tuple[Action, ...]) -> str:
    """Return ``TANDEMKV_FAULTS`` for delays and losses at every point that has them."""
    rules = [f"seed={seed}"]
    for name, point in POINTS.items():
        if "delay" in actions and point.role not in ("launcher", "http"):
            rules.append(f"{name}=delay({_DELAY_S:g})@{_RATE:g}")
        if "drop" in actions and point.can_drop:
            rules.append(f"{name}=drop@{_RATE:g}")
    return ";".join(rules) if len(rules) > 1 else ""


@dataclass(slots=True, kw_only=True)
class Fault:
    """What was done to the server, and until when it may be seen."""

    action: Action
    target: str
    """What, and to which process or at which point."""
    began: float
    ended: float = 0.0
    """Seconds since the epoch; until the server was ready again."""
    seconds: float = 0.0
    """Length of a pause."""
    recovery_s: float | None = None
    """From `began` until ready; of a stop, from when the launcher ended the process."""


class Chaos:
    """Does one fault after the other, with calm in between, from a thread of its own.

    `calm_s` is the mean time between ready again and the next fault; `faults` what was done so far.
    """

    def __init__(
        self,
        *,
        seed: int,
        actions: tuple[Action, ...],
        processes: ServerProcesses,
        is_ready: Callable[[], bool],
        calm_s: float,
    ) -> None:
        self._random = random.Random(f"chaos/{seed}")
        self._actions = [name for name in actions if name in _BY_SIGNAL]
        self._processes, self._is_ready = processes, is_ready
        self._calm_s = calm_s
        self._stopping, self._leaving = threading.Event(), threading.Event()
        self._turn = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="chaos", daemon=True)
        self.faults: list[Fault] = []

    def start(self) -> None:
        """Begin, if there is anything to do."""
        if self._actions:
            self._thread.start()

    def stop(self) -> None:
        """Do nothing more; returns when the server has come back from the last fault."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def leave(self) -> None:
        """Do nothing more; returns at once, what was paused goes on."""
        self._leaving.set()
        self.stop()

    def hold(self) -> contextlib.AbstractContextManager[bool]:
        """Return a context in which nothing happens; entered when the last fault is over."""
        return self._turn

    def _run(self) -> None:
        while not self._stopping.wait(self._random.uniform(0.5, 1.5) * self._calm_s):
            with self._turn:
                if not self._stopping.is_set():
                    self._do_one()

    def _do_one(self) -> None:
        rng, pids = self._random, self._processes.pids()
        there = [role for role in _TARGETS if role in pids]
        if not there:
            return
        target = rng.choices(there, [_TARGETS[role] for role in there])[0]
        action = rng.choice(self._actions)
        pause_s = rng.uniform(_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S)
        pid = pids[target]
        fault = Fault(action=action, target=target, began=time.time())
        self.faults.append(fault)
        if action == "kill":
            _send(pid, signal.SIGKILL)
        else:
            _send(pid, signal.SIGSTOP)
            if action == "pause":
                fault.seconds = pause_s
                self._leaving.wait(pause_s)
                _send(pid, signal.SIGCONT)
        self._await_ready(fault, pid)

    def _await_ready(self, fault: Fault, pid: int) -> None:
        """Wait until the server is ready for a while, and as another process if one was ended."""
        deadline = time.monotonic() + _GIVE_UP_S
        gone_at, ready_since = fault.began + fault.seconds, None
        is_ended = fault.action != "pause"
        while time.monotonic() < deadline and not self._leaving.is_set():
            if is_ended and self._processes.pids().get(fault.target) == pid:
                gone_at, ready_since = time.time(), None
            elif self._is_ready():
                ready_since = ready_since or time.time()
                # A loss is noticed after the heartbeat's window: until then it looks ready.
                if time.time() - ready_since > 5.0:
                    fault.recovery_s = max(0.0, ready_since - gone_at)
                    break
            else:
                ready_since = None
            self._leaving.wait(_TICK_S)
        fault.ended = time.time()


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
