# SPDX-License-Identifier: Apache-2.0
"""How soon decode steps begin, as the status tells it."""

from __future__ import annotations

import time

import pytest

from tandemkv.cache_rank.protocol.step_ring import EntryKind, StepEntry
from tandemkv.cache_rank.service.entry_runner import AnnouncementDelays


def note(delays: AnnouncementDelays, seconds: float) -> None:
    """Note a step of so long ago, seen after a quarter, read after two, begun after three."""
    now, delay = time.monotonic_ns(), int(seconds * 1e9)
    announced, seen = now - delay, now - delay * 3 // 4
    entry = StepEntry(kind=EntryKind.DECODE, step=1, announced_ns=announced, seen_ns=seen)
    delays.note(entry, read_ns=now - delay // 2, begun_ns=now - delay // 4)


def test_median_and_the_slowest_of_a_hundred_are_told() -> None:
    delays = AnnouncementDelays()
    assert delays.values() == {}
    for seconds in [0.5] * 99 + [3.0]:
        note(delays, seconds)
    found = delays.values()
    assert found["announcement_p50_us"] == pytest.approx(3.75e5, rel=0.01)
    assert found["announcement_p99_us"] == pytest.approx(3.75e5, rel=0.01)
    for _ in range(2):
        note(delays, 3.0)
    assert delays.values()["announcement_p99_us"] == pytest.approx(2.25e6, rel=0.01)


def test_what_comes_before_the_beginning_and_behind_it_is_told_too() -> None:
    delays = AnnouncementDelays()
    for seconds in (1.0, 2.0, 4.0):
        note(delays, seconds)
    found = delays.values()
    assert found["announcement_seen_p50_us"] == pytest.approx(5e5, rel=0.01)
    assert found["announcement_read_p50_us"] == pytest.approx(1e6, rel=0.01)
    assert found["announcement_queued_p50_us"] == pytest.approx(2e6, rel=0.01)


def test_a_step_that_was_never_announced_has_no_delay() -> None:
    delays = AnnouncementDelays()
    delays.note(StepEntry(kind=EntryKind.DECODE, step=1), read_ns=1, begun_ns=1)
    assert delays.values() == {}
