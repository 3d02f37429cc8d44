# SPDX-License-Identifier: Apache-2.0
"""Who is told that an epoch is lost, and in which order."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandemkv.cache_rank.protocol.errors import CacheRankLostError
from tandemkv.cache_rank.protocol.memory.mapped_tensors import MappedTensors
from tandemkv.cache_rank.protocol.memory.shared_region import FlagIndex, RegionSizes
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings
from tandemkv.cache_rank.protocol.step_flags import WORDS_APART, StepFlags
from tandemkv.cache_rank.protocol.step_ring import CONSUMED, StepRing, ring_shape
from tandemkv.inference_rank.counters import Counters
from tandemkv.inference_rank.links import connection as connection_module
from tandemkv.inference_rank.links.connection import SharedConnection
from tandemkv.inference_rank.links.patience import Patience


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def connection(tmp_path: Path, counters: Counters) -> Iterator[SharedConnection]:
    model: Any = SimpleNamespace(num_layers=2)
    found = SharedConnection(
        run_dir=RunDir.create(tmp_path / "run"),
        settings=RankSettings(),
        model=model,
        sizes=RegionSizes(num_slots=9, num_rows=2, page_size=1),
        kept=MappedTensors(),
        own=MappedTensors(),
        counters=counters,
    )
    # As after `adopt`.
    found._flags = StepFlags(torch.zeros((FlagIndex(2).count, WORDS_APART), dtype=torch.int64))
    found.lost_reason = None
    yield found
    found.close()


def test_waits_of_a_gpu_end_before_anybody_sees_the_loss(
    connection: SharedConnection, counters: Counters
) -> None:
    """Else the recovery could be over by then, and the next epoch's waits would end as well."""
    seen: list[str | None] = []
    connection.end_waits = lambda: seen.append(connection.lost_reason)
    connection.mark_lost("its process ended")
    connection.mark_lost("no heartbeat")
    assert seen == [None]
    assert connection.lost_reason == "its process ended"
    assert counters.cache_rank_lost_total == 1


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_lifeline_that_is_late_does_not_end_the_next_epoch(
    connection: SharedConnection, counters: Counters, is_closed: bool
) -> None:
    """Its thread may run for the first time when the next epoch is open, and its socket closed."""
    connection.epoch = 2
    for epoch, want in ((1, False), (2, True)):
        (watched, other), (wake, waker) = socket.socketpair(), socket.socketpair()
        other.close()
        if is_closed:
            watched.close()
        connection._watch(epoch, watched, wake)
        assert connection.is_lost() is want
        if want and not is_closed:  # one that hangs up for an error of its own lives
            assert connection.lost_reason == "its process ended, or gave the epoch up; see its log"
        watched.close()
        waker.close()
    assert counters.cache_rank_lost_total == 1


@pytest.fixture
def slow(connection: SharedConnection) -> SharedConnection:
    """A connection whose engine may be silent for a while: for less before it has read, 0.1 s."""
    ring = torch.zeros(ring_shape(2), dtype=torch.int64)
    connection._ring, connection._limit_s = StepRing(ring, connection._flags), 0.1
    connection._settings = RankSettings.model_validate({"exchange": {"transfer_timeout_s": 0.6}})
    return connection


def after(slow: SharedConnection, seconds: float) -> str | None:
    """Return why the epoch is lost, if it is within so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and slow.lost_reason is None:
        slow.lose_if_stuck()
        time.sleep(0.01)
    return slow.lost_reason


def test_an_engine_that_does_not_hear_of_requests_is_lost(slow: SharedConnection) -> None:
    slow.lose_if_stuck()
    assert slow.lost_reason is None, "none are to be taken up"
    slow.resume(())
    assert "does not take up the requests" in str(after(slow, 0.5))


def test_an_engine_that_takes_up_requests_may_be_slow_and_not_stuck(
    slow: SharedConnection,
) -> None:
    slow.resume(())
    slow._flags.raise_to(CONSUMED, 1)
    at = FlagIndex(2)
    for number in range(1, 4):
        assert after(slow, 0.4) is None
        slow._flags.raise_to(at.PROGRESS, number)
    assert "makes no progress" in str(after(slow, 5))


def test_one_that_has_taken_them_up_is_not_lost(slow: SharedConnection) -> None:
    slow.resume(())
    slow._flags.raise_to(FlagIndex(2).FINISHED, slow.step)
    assert after(slow, 0.4) is None


@pytest.mark.parametrize("has_read", [False, True])
def test_an_engine_that_does_not_get_ready_is_lost(
    slow: SharedConnection, monkeypatch: pytest.MonkeyPatch, has_read: bool
) -> None:
    """The scheduler's thread waits for it."""
    monkeypatch.setattr(connection_module, "LONGEST_PREPARING_S", 0.3)
    slow.ask_to_prepare(variant=0, size=0)
    if has_read:
        slow._flags.raise_to(CONSUMED, 1)
    begun = time.monotonic()
    with pytest.raises(CacheRankLostError, match="it did not get ready: it does not make ready"):
        slow.await_prepared()
    assert time.monotonic() - begun >= (0.6 if has_read else 0.1)
    assert slow.is_lost()


@pytest.mark.parametrize("has_read", [False, True])
def test_a_pause_of_our_own_is_not_the_engines(
    slow: SharedConnection, monkeypatch: pytest.MonkeyPatch, has_read: bool
) -> None:
    """Where all of a container is stopped for a while both processes are, and go on together."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    slow._flags.raise_to(CONSUMED, int(has_read))
    patience = Patience(slow._flags, 4, announced=1, read_s=4.0, work_s=4.0)
    assert not patience.is_over()
    now += 3600
    assert not patience.is_over(), "the engine cannot have moved"
    asked = 0
    while not patience.is_over():
        now, asked = now + 0.5, asked + 1
    assert asked == 4, "half of the time is left to it"


def test_leaving_ends_them_too_and_is_no_loss(
    connection: SharedConnection, counters: Counters
) -> None:
    ended: list[bool] = []
    connection.end_waits = lambda: ended.append(True)
    connection.leave("the cache rank of another rank was lost")
    connection.leave("again")
    assert ended == [True]
    assert counters.cache_rank_lost_total == 0


def test_an_epoch_is_lost_also_where_its_waits_cannot_be_ended(
    connection: SharedConnection, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error")

    connection.end_waits = fail
    connection.mark_lost("its process ended")
    assert connection.lost_reason == "its process ended"
    assert "cannot be ended at once" in caplog.text
