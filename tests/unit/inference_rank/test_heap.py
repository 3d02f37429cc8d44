# SPDX-License-Identifier: Apache-2.0
"""Freed memory goes back to the system while nothing runs or waits, and not too often."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandemkv.cache_rank.protocol.settings.rank_settings import (
    SETTINGS_VARIABLE,
    RankSettings,
)
from tandemkv.inference_rank import progress
from tandemkv.inference_rank.sglang import heap, hooks
from tandemkv.inference_rank.sglang.heap import HeapTrimmer, find_trim

INTERVAL_S = 10.0


class World:
    """A scheduler, a clock, and what was done in which order."""

    def __init__(self, trim: Callable[[int], object] | None = None) -> None:
        self.now, self.is_idle = 100.0, True
        self.done: list[str] = []
        self.trimmer = HeapTrimmer(
            trim or (lambda keep: self.done.append(f"trim {keep}")),
            interval_s=INTERVAL_S,
            clock=lambda: self.now,
        )
        self.scheduler = SimpleNamespace(is_fully_idle=lambda: self.is_idle)

    def idle_turn(self, after_s: float = 0.0) -> None:
        """Let time pass, then a turn of the loop that has no batch to run."""
        self.now += after_s
        idle_hook()(lambda _: self.done.append("housekeeping"), self.scheduler)

    @property
    def trims(self) -> int:
        return sum(each.startswith("trim") for each in self.done)


def idle_hook() -> Callable[..., Any]:
    found = [hook for target, hook, _ in hooks.scheduler_hooks("tandemkv") if "on_idle" in target]
    (hook,) = found
    return hook


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return world_of(monkeypatch)


def world_of(monkeypatch: pytest.MonkeyPatch, trim: Callable[[int], object] | None = None) -> World:
    monkeypatch.setenv(SETTINGS_VARIABLE, RankSettings().model_dump_json())
    made = World(trim)
    monkeypatch.setattr(progress, "heap", made.trimmer)
    return made


def test_at_most_once_in_an_interval(world: World) -> None:
    for _ in range(1000):  # 25 s
        world.idle_turn(after_s=0.025)
    assert world.trims == 2
    world.idle_turn(after_s=INTERVAL_S)
    assert world.trims == 3


def test_before_the_housekeeping_that_may_sleep_and_keeps_nothing(world: World) -> None:
    world.idle_turn(after_s=INTERVAL_S)
    assert world.done == ["trim 0", "housekeeping"]


def test_never_while_a_request_runs_or_waits(world: World) -> None:
    world.is_idle = False
    for _ in range(10):
        world.idle_turn(after_s=INTERVAL_S)
    assert world.done == ["housekeeping"] * 10
    world.is_idle = True
    world.idle_turn()
    assert world.trims == 1


def test_another_c_library_has_nothing_to_call(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda _name: SimpleNamespace())
    assert find_trim() is None
    monkeypatch.setattr(progress, "heap", HeapTrimmer(find_trim(), clock=lambda: world.now))
    world.idle_turn(after_s=INTERVAL_S)
    assert world.done == ["housekeeping"]


def private_mib() -> float:
    text = Path("/proc/self/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", text)
    assert found is not None
    return int(found[1]) / 1024


@pytest.mark.skipif(find_trim() is None, reason="the C library has no malloc_trim")
def test_an_idle_turn_gives_back_what_requests_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(monkeypatch, find_trim())
    # Smaller than what glibc maps by itself; every second one stays in use, so that holes remain.
    pairs = [(b"x" * 100_000, b"y" * 100_000) for _ in range(640)]
    used = [kept for _, kept in pairs]
    before = private_mib()
    del pairs
    held = private_mib()
    world.idle_turn(after_s=INTERVAL_S)
    after = private_mib()
    assert before - held < 8, "glibc gives this back without being told"
    assert held - after > 40
    assert len(used) == 640
