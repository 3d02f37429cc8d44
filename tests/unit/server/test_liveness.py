# SPDX-License-Identifier: Apache-2.0
"""Which rank counts as hung: one that is silent, or whose work stands still, once it was ready."""

from __future__ import annotations

import time

from tandemkv.cache_rank.protocol.errors import CacheRankLostError
from tandemkv.cache_rank.protocol.progress import BusyClock
from tandemkv.server.launch.liveness import Liveness, Pulse

PATIENCE_S = 10.0


class Rank:
    def __init__(self) -> None:
        self.pulse: Pulse | None = Pulse(is_ready=True, stalled_s=0.0)

    def __call__(self) -> Pulse:
        if self.pulse is None:
            raise CacheRankLostError("nobody answers")
        return self.pulse


def reason_of(liveness: Liveness, timeout_s: float) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while (reason := liveness.hangs(timeout_s)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return reason


def watched(rank: Rank) -> Liveness:
    liveness = Liveness(rank, interval_s=0.02)
    liveness.start()
    deadline = time.monotonic() + PATIENCE_S
    while not liveness.was_ready and rank.pulse and rank.pulse.is_ready:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return liveness


def test_silence_and_standing_still_count_and_moving_does_not() -> None:
    rank = Rank()
    liveness = watched(rank)
    time.sleep(0.6)
    assert liveness.hangs(0.5) is None
    rank.pulse = Pulse(is_ready=False, stalled_s=20.0)
    assert "its work has not moved for 20 s" in reason_of(liveness, 15.0)
    rank.pulse = None
    liveness.expect_start()
    assert liveness.hangs(0.0) is None  # it is loading: the start has a limit of its own
    rank.pulse = Pulse(is_ready=True, stalled_s=0.0)
    while not liveness.was_ready:
        time.sleep(0.01)
    rank.pulse = None
    assert "nobody answers" in reason_of(liveness, 0.3)
    liveness.stop()


def test_a_rank_that_falls_silent_at_once_after_its_start_hangs() -> None:
    rank = Rank()
    rank.pulse = None
    liveness = Liveness(rank, interval_s=0.02)
    liveness.note_ready()
    liveness.start()
    assert "nobody answers" in reason_of(liveness, 0.3)
    liveness.stop()


def test_a_cache_rank_that_waits_or_moves_is_not_stalled() -> None:
    clock = BusyClock()
    assert clock.progress.stalled_s() == 0
    clock.begin()
    time.sleep(0.1)
    assert clock.progress.stalled_s() >= 0.1
    with clock.waiting():  # for the inference rank; the transfer has a limit of its own
        time.sleep(0.1)
        assert clock.progress.stalled_s() == 0
    assert clock.progress.stalled_s() < 0.1  # a layer is through
    assert clock.busy_s() >= 0.1
    clock.end()
    assert clock.busy_s() == 0
    assert clock.progress.stalled_s() == 0
