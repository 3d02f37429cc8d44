# SPDX-License-Identifier: Apache-2.0
"""In which stream the forward pass sends to the engine, and what scans wait for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tandemkv.cache_rank.engine.lanes import ScanOrder
from tandemkv.inference_rank.links import signals
from tandemkv.kernels import streams


def test_in_order_no_scan_waits_for_a_choice() -> None:
    order = ScanOrder(torch.device("cpu"), is_kept=True)
    order.note_choice()
    order.await_choice()
    order.end_step()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, int]]]:
    """Devices and priorities of streams, where there is no GPU."""
    found: list[tuple[Any, int]] = []

    def stream(*, device: torch.device, priority: int) -> object:
        found.append((device, priority))
        return object()

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    streams._stream.cache_clear()
    yield found
    streams._stream.cache_clear()


def test_what_is_sent_on_one_gpu_lies_behind_nothing_that_waits_for_it(
    made: list[tuple[Any, int]],
) -> None:
    """Neither in a stream of a lane, of a scan or of the forward pass, nor among their priority."""
    one, two = torch.device("cuda", 0), torch.device("cuda", 1)
    waiting = [
        streams.shared_stream(one, priority, number)
        for priority in (streams.LANE_PRIORITY, streams.LOWEST_PRIORITY)
        for number in range(4)
    ]
    forward = streams.shared_stream(one, streams.FORWARD_PRIORITY)
    beside = signals.stream_beside(one, one)
    assert all(beside is not stream for stream in (forward, *waiting))
    assert made[-1] == (one, streams.FORWARD_PRIORITY)
    signals.stream_beside(one, two)
    assert len(made) == 10, "between two GPUs it is the lowest of the forward pass's GPU, as ever"
