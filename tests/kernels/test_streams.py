# SPDX-License-Identifier: Apache-2.0
"""Streams that a process shares."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tandemkv.kernels import streams
from tandemkv.kernels.triton_ops import chained


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[torch.device, int]]]:
    found: list[tuple[torch.device, int]] = []

    def stream(*, device: torch.device, priority: int) -> object:
        found.append((device, priority))
        return object()

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    streams._stream.cache_clear()
    yield found
    streams._stream.cache_clear()


def test_a_stream_is_made_once_for_all_who_ask(made: list[tuple[torch.device, int]]) -> None:
    lowest = streams.shared_stream(torch.device("cuda", 1))
    assert lowest is streams.shared_stream(torch.device("cuda")), "the current GPU is the second"
    lanes = [streams.shared_stream(torch.device("cuda"), -1, n) for n in (0, 1, 0)]
    assert lanes[0] is lanes[2]
    assert len({id(stream) for stream in (lowest, *lanes)}) == 3
    other = streams.shared_stream(torch.device("cuda", 0))
    assert other is not lowest
    one, two = torch.device("cuda", 1), torch.device("cuda", 0)
    assert made == [(one, 0), (one, -1), (one, -1), (two, 0)]


def test_a_cpu_has_none(made: list[tuple[torch.device, int]]) -> None:
    assert streams.shared_stream(torch.device("cpu")) is None
    assert made == []


def test_kernels_are_chained_only_where_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By GPU, and not before Hopper, in an interpreter or on a CPU."""
    first, second, cpu = torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")
    monkeypatch.setattr(streams, "_chained", set())
    monkeypatch.setattr(chained, "_INTERPRETED", False)
    monkeypatch.setattr(chained, "_is_supported", lambda index: index == 1)
    for device in (first, second, cpu):
        assert not chained.is_chained(device)
        streams.let_chain(device)
    assert [chained.is_chained(x) for x in (first, second, cpu)] == [False, True, False]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert chained.is_chained(torch.device("cuda"))
    monkeypatch.setattr(chained, "_INTERPRETED", True)
    assert not chained.is_chained(second)
