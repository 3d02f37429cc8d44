# SPDX-License-Identifier: Apache-2.0
"""One epoch of a pump: two threads that run until either ends it."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence

import torch

from tandemkv.cache_rank.protocol.errors import CacheRankLostError
from tandemkv.cache_rank.protocol.heartbeat import Patience
from tandemkv.cache_rank.protocol.memory.mapped_tensors import MappedTensors
from tandemkv.cache_rank.protocol.message.data_plane import DataPlane
from tandemkv.cache_rank.protocol.settings.exchange_settings import ExchangeSettings

from .gpu_link import PumpLanes

_LOG = logging.getLogger(__name__)
_POLL_S, _JOIN_S = 0.2, 1.0
MEMORY_S = 25.0
"""How long the inference rank's pump waits for the memory of its rank."""
REPLACED = "a new inference rank came"
"""Why an epoch ends as soon as the cache rank has opened another one."""


class Pulse(Patience):
    """Whether the other host has spoken lately, and when it is to be spoken to."""

    def __init__(self, exchange: ExchangeSettings) -> None:
        self._interval_s, self._said, self.sequence = exchange.heartbeat_interval_s, 0.0, 0
        super().__init__(exchange.heartbeat_interval_s * exchange.heartbeat_misses)

    def is_due(self) -> bool:
        """Whether to speak; counts it."""
        now = time.monotonic()
        if now - self._said < self._interval_s:
            return False
        self._said, self.sequence = now, self.sequence + 1
        return True


class StepCount:
    """The latest step that one thread is done with."""

    def __init__(self) -> None:
        self._latest, self._changed = 0, threading.Condition()

    def note(self, step: int) -> None:
        """Note that `step`, and all before it, are done."""
        with self._changed:
            self._latest = step
            self._changed.notify_all()

    def await_step(self, step: int, is_over: Callable[[], bool]) -> bool:
        """Wait until `step` is done; False: `is_over`."""
        with self._changed:
            while self._latest - step < 0:
                if is_over():
                    return False
                self._changed.wait(_POLL_S)
        return True


class PumpSession:
    """Threads, memory and connections of one epoch.

    `connection` leads to the rank of this host: either end closes it when it ends. `tensors` are
    closed with the session.

    Attributes
    ----------
    reason : str
        Why it is over; empty while it is not.
    """

    def __init__(
        self,
        epoch: int,
        plane: DataPlane,
        connection: socket.socket,
        tensors: Sequence[MappedTensors],
    ) -> None:
        self.epoch, self.plane, self.connection = epoch, plane, connection
        self._tensors, self._over = tensors, threading.Event()
        self._threads: list[threading.Thread] = []
        self._lanes: PumpLanes | None = None
        self.reason = ""

    def start(self, lanes: PumpLanes, *works: Callable[[], None]) -> None:
        """Run `works`, a thread each, and what watches over `lanes`, which they use.

        Lanes end first of what breaks with the data plane, and are closed behind the threads.
        """
        self.plane.breaks_with.insert(0, lanes.abort)
        self._lanes = lanes
        for work in (*works, *lanes.watches(self.await_over)):
            thread = threading.Thread(target=self._run, args=(work,), name="pump", daemon=True)
            thread.start()
            self._threads.append(thread)

    def is_over(self) -> bool:
        """Whether the epoch has ended."""
        return self._over.is_set()

    def await_over(self, timeout_s: float) -> bool:
        """Wait until the epoch has ended; False: it goes on."""
        return self._over.wait(timeout_s)

    def end(self, reason: str) -> None:
        """End the epoch. Safe from any thread; the first reason counts."""
        if not self._over.is_set():
            self.reason = reason
            self._over.set()
            self.plane.abort(reason)

    def close(self) -> None:
        """Release everything, and tell the rank of this host by that."""
        self.end("it was closed")
        for thread in self._threads:
            thread.join(_JOIN_S)
            # gloo lets one go at its limit only; it touches nothing of the epoch any more.
            while thread.is_alive() and not self.plane.is_waiting(thread):
                thread.join(_POLL_S)
        if self._lanes is not None:
            self._lanes.close()
        self.plane.close()
        for tensors in self._tensors:
            tensors.close()
        self.connection.close()

    def _run(self, work: Callable[[], None]) -> None:
        here = self._tensors[0].homes.here
        try:
            if here.type == "cuda":  # a thread begins with the first GPU that is seen
                torch.cuda.set_device(here)
            work()
        except CacheRankLostError as error:
            self.end(str(error))
        except Exception as error:
            _LOG.exception("epoch %d", self.epoch)
            self.end(f"{type(error).__name__}: {error}")
