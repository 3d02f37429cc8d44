# SPDX-License-Identifier: Apache-2.0
"""Watches a server beside the load: readiness, processes that were replaced, the machine's load."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from typing import NamedTuple

import psutil

from tandemkv.server.launch.probes import server_state

from .processes import LAUNCHER, ServerProcesses

_TICK_S = 0.5
_SAMPLE_EVERY = 10


class Interval(NamedTuple):
    """A time in which the server was not ready, and what it said."""

    began: float
    ended: float
    reason: str


class Restart(NamedTuple):
    """A process that is another one than before."""

    time: float
    role: str


class MemorySample(NamedTuple):
    """Private memory of one process, at some time of its life."""

    time: float
    role: str
    pid: int
    private_mib: float


class Watch:
    """Looks at the server twice a second, from a thread of its own.

    `processes` is None if the server is not on this host. `unready`, `restarts`, `memory` and
    `machine` are what was seen; the last (time, load average, CPU time of others in cores). `error`
    is why it saw no more, empty if it looked until `stop`.
    """

    def __init__(self, url: str, processes: ServerProcesses | None) -> None:
        self._url, self._processes = url, processes
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.is_ready, self.error = False, ""
        self.unready: list[Interval] = []
        self.restarts: list[Restart] = []
        self.memory: list[MemorySample] = []
        self.machine: list[tuple[float, float, float]] = []

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._look()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            self.is_ready = False

    def _look(self) -> None:
        pids: dict[str, int] = {}
        unready_since, reason, turn = 0.0, "", 0
        cpu = _CpuOfOthers()
        while not self._stopping.is_set():
            state = server_state(self._url, 5.0)
            self.is_ready = state.ready
            now = time.time()
            if not state.ready:
                unready_since, reason = unready_since or now, state.detail
            elif unready_since:
                self.unready.append(Interval(unready_since, now, reason))
                unready_since = 0.0
            if self._processes is not None:
                for role, pid in self._processes.pids().items():
                    if role != LAUNCHER and pids.get(role, pid) != pid:
                        self.restarts.append(Restart(now, role))
                    pids[role] = pid
                if turn % _SAMPLE_EVERY == 0:
                    self._sample(self._processes, now, cpu)
            turn += 1
            self._stopping.wait(_TICK_S)
        if unready_since:
            self.unready.append(Interval(unready_since, time.time(), reason))

    def _sample(self, processes: ServerProcesses, now: float, cpu: _CpuOfOthers) -> None:
        held = processes.held()
        for role, some in held.roles.items():
            self.memory += [MemorySample(now, role, each.pid, each.private_mib) for each in some]
        self.machine.append((now, os.getloadavg()[0], cpu.cores(processes)))


class _CpuOfOthers:
    """CPU time, in cores, that is used by neither the server nor us."""

    def __init__(self) -> None:
        self._before: tuple[float, float] | None = None

    def cores(self, processes: ServerProcesses) -> float:
        """Return the mean since the last call; 0 at the first."""
        used = psutil.cpu_percent() / 100 * (psutil.cpu_count() or 1)  # since the last call
        ours = sum(os.times()[:2])
        for process in itertools.chain.from_iterable(processes.by_role().values()):
            with contextlib.suppress(psutil.Error):
                ours += sum(process.cpu_times()[:2])
        now, before = (time.time(), ours), self._before
        self._before = now
        if before is None or now[0] <= before[0]:
            return 0.0
        # A process that ended takes its time along: less than nothing is nothing.
        return max(0.0, used - max(0.0, now[1] - before[1]) / (now[0] - before[0]))
