# SPDX-License-Identifier: Apache-2.0
"""A connection whose cache rank goes and comes back as a test says, and a recovery over it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from scheduler_world import World

from tandemkv.cache_rank.protocol.errors import CacheRankLostError
from tandemkv.cache_rank.protocol.step_ring import StepRow
from tandemkv.inference_rank.resume.agreement import Agreement
from tandemkv.inference_rank.resume.recovery import Recovery


class Opened:
    """What `Connection.open_connection` returns."""

    def __init__(self, *, has_lost_memory: bool = False) -> None:
        self.is_gone = self.is_closed = False
        self.has_lost_memory = has_lost_memory

    def close(self) -> None:
        self.is_closed = True


_MADE: list[Connection] = []


@pytest.fixture(autouse=True)
def nobody_waits() -> Iterator[None]:
    """End the threads that a test has left waiting; they would log into those after it."""
    yield
    for connection in _MADE:
        connection.is_there = True
    _MADE.clear()
    for thread in threading.enumerate():
        if thread.name == "reconnect":
            thread.join(10)


class Connection:
    """A connection whose cache rank comes back when it is told to."""

    def __init__(self) -> None:
        _MADE.append(self)
        self.lost_reason: str | None = None
        self.epoch, self.step, self.confirmed = 1, 40, 40
        self.is_there = self.is_finished = self.has_lost_memory = self.is_stuck = False
        self.resumed: list[tuple[StepRow, ...]] = []
        self.refilled: list[list[tuple[int, int]]] = []
        self.resumed_rows, self.num_seeded = (2, 1), 0
        self.opened: list[Opened] = []
        self.num_forgotten = self.num_left = 0

    @property
    def num_closed(self) -> int:
        return sum(each.is_closed for each in self.opened)

    def open_connection(self, *, timeout_s: float) -> Any:
        deadline = time.monotonic() + min(timeout_s, 0.5)
        while not self.is_there:
            if time.monotonic() > deadline:
                raise CacheRankLostError("not there")
            time.sleep(0.002)
        self.opened.append(Opened(has_lost_memory=self.has_lost_memory))
        return self.opened[-1]

    def adopt(self, opened: Any) -> None:
        self.lost_reason, self.epoch = None, self.epoch + 1

    def forget_rows(self) -> None:
        self.num_forgotten += 1
        self.has_lost_memory = False

    def resume(self, rows: tuple[StepRow, ...]) -> None:
        self.step += 1
        self.resumed.append(rows)

    def lose_if_stuck(self) -> None:
        if self.is_stuck:
            self.mark_lost("it makes no progress")

    def has_finished(self, step: int) -> bool:
        return self.is_finished

    def confirm(self, step: int) -> None:
        self.confirmed = step

    def mark_lost(self, reason: str) -> None:
        self.lost_reason = reason

    def leave(self, reason: str) -> None:
        if self.lost_reason is not None:
            return
        self.lost_reason = reason
        self.num_left += 1

    def note_seeded(self) -> None:
        self.num_seeded += 1


def recovery_of(
    world: World,
    connection: Connection,
    timeout_s: float = 30.0,
    agreement: Agreement | None = None,
) -> Recovery:
    return Recovery(
        connection,
        world.passes,
        world.penalties,
        world.counters,
        generation_of=lambda row: 100 + row,
        num_cold=12,
        refill=lambda rows: connection.refilled.append(list(rows)),
        note_seeded=connection.note_seeded,
        timeout_s=timeout_s,
        agreement=agreement,
    )
