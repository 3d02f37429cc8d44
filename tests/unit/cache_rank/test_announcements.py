# SPDX-License-Identifier: Apache-2.0
"""How soon decode steps begin, as the status tells it."""

from __future__ import annotations

import time

import pytest

from tandemkv.cache_rank.protocol.step_ring import EntryKind, StepEntry
from tandemkv.cache_rank.service.announcements import AnnouncementDelays


def test_median_and_the_slowest_of_a_hundred_are_told() -> None:
    delays = AnnouncementDelays()
    assert delays.values() == {}
    for seconds in [0.5] * 99 + [3.0]:
        at = time.monotonic_ns() - int(seconds * 1e9)
        delays.note(StepEntry(kind=EntryKind.DECODE, step=1, announced_ns=at))
    found = delays.values()
    assert found["announcement_p50_us"] == pytest.approx(5e5, rel=0.2)
    assert found["announcement_p99_us"] == pytest.approx(5e5, rel=0.2)
    for _ in range(2):
        at = time.monotonic_ns() - int(3e9)
        delays.note(StepEntry(kind=EntryKind.DECODE, step=2, announced_ns=at))
    assert delays.values()["announcement_p99_us"] == pytest.approx(3e6, rel=0.2)


def test_a_step_that_was_never_announced_has_no_delay() -> None:
    delays = AnnouncementDelays()
    delays.note(StepEntry(kind=EntryKind.DECODE, step=1))
    assert delays.values() == {}
