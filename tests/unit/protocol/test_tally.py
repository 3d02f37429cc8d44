# SPDX-License-Identifier: Apache-2.0
"""Counts found on a device reach the host."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tandemkv.cache_rank.protocol.tally import DeviceTally
from tandemkv.kernels.placing import SideReader, place


def test_on_a_cpu_everything_is_entered_at_once() -> None:
    counters = SimpleNamespace(hits=5, live=7)
    tally = DeviceTally(counters, ("hits",), torch.device("cpu"), gauges=("live",))
    tally.add("hits", torch.tensor([True, True]).sum())
    tally.add("hits", 3)
    tally.set("live", torch.tensor(2))
    assert (counters.hits, counters.live) == (10, 2)
    tally.flush()
    assert (counters.hits, counters.live) == (10, 2)


def test_values_are_placed_and_read() -> None:
    cpu = torch.device("cpu")
    placed = place([3, 1], cpu)
    assert placed.dtype == torch.int64
    assert SideReader(cpu).read(placed) is placed
    assert place([], cpu).shape == (0,)
    assert place([True, False], cpu, torch.bool).tolist() == [True, False]


@pytest.mark.gpu
def test_on_a_gpu_a_flush_never_waits() -> None:
    device = torch.device("cuda")
    counters = SimpleNamespace(hits=5, live=7)
    tally = DeviceTally(counters, ("hits",), device, gauges=("live",))
    tally.add("hits", torch.tensor([True, True], device=device).sum())
    tally.set("live", torch.tensor(2, device=device))
    tally.flush()
    assert (counters.hits, counters.live) == (5, 7), "one flush behind"
    torch.cuda.synchronize()
    tally.flush()
    assert (counters.hits, counters.live) == (7, 2)


@pytest.mark.gpu
def test_a_side_reader_does_not_wait_for_the_current_stream() -> None:
    device = torch.device("cuda")
    reader, value = SideReader(device), place([4, 2], device)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    event = torch.cuda.current_stream().record_event()
    assert reader.read(value).tolist() == [4, 2]
    assert not event.query()
    torch.cuda.synchronize()
