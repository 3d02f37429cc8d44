# SPDX-License-Identifier: Apache-2.0
"""Who is told that an epoch is lost, and in which order."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandemkv.cache_rank.protocol.memory.mapped_tensors import MappedTensors
from tandemkv.cache_rank.protocol.memory.shared_region import FlagIndex, RegionSizes
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings
from tandemkv.cache_rank.protocol.step_flags import WORDS_APART, StepFlags
from tandemkv.inference_rank.counters import Counters
from tandemkv.inference_rank.links.connection import SharedConnection


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
        watched.close()
        waker.close()
    assert counters.cache_rank_lost_total == 1


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
