# SPDX-License-Identifier: Apache-2.0
"""Descriptors outlive whoever made the memory, and are had by who knows the token."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from descriptors import open_descriptors

from tandemkv.cache_rank.protocol.errors import CacheRankError, CacheRankLostError
from tandemkv.cache_rank.protocol.memory.descriptor_holder import DescriptorHolder, ask_holder
from tandemkv.cache_rank.protocol.memory.descriptor_messages import (
    TensorsMessage,
    TensorSpec,
    exchange,
)
from tandemkv.cache_rank.protocol.memory.descriptor_socket import let_hold, take_held
from tandemkv.cache_rank.protocol.memory.mapped_tensors import MappedTensors

TOKEN = b"t" * 32


def num_descriptors() -> int:
    """Open ones, once the holder has closed its ends of connections."""
    counts, process = [open_descriptors()], psutil.Process()
    while len(counts) < 3 or len(set(counts[-3:])) > 1:
        time.sleep(0.05)
        counts.append(process.num_fds())
    return counts[-1]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "h.sock"


@pytest.fixture
def holder(path: Path) -> Iterator[DescriptorHolder]:
    found = DescriptorHolder(path, TOKEN)
    yield found
    found.close()


def made(value: float) -> MappedTensors:
    tensors = MappedTensors()
    tensors.allocate("kv", (4,), torch.float32).fill_(value)
    return tensors


def test_memory_outlives_its_maker(path: Path, holder: DescriptorHolder) -> None:
    before = num_descriptors()
    tensors = made(3.0)
    assert let_hold(path, tensors, token=TOKEN, group="kept")
    tensors.close()
    for _ in range(2):
        found = take_held(path, token=TOKEN, group="kept")
        assert found.specs == (TensorSpec("kv", (4,), "float32", "engine"),)
        assert found["kv"].tolist() == [3.0] * 4
        found.close()
    assert num_descriptors() == before + 1, "one is held"


def test_what_comes_later_takes_the_place_of_what_was(path: Path, holder: DescriptorHolder) -> None:
    before = num_descriptors()
    for value in (1.0, 2.0, 5.0):
        tensors = made(value)
        assert let_hold(path, tensors, token=TOKEN, group="kept")
        tensors.close()
    found = take_held(path, token=TOKEN, group="kept")
    assert found["kv"].tolist() == [5.0] * 4
    found.close()
    assert not take_held(path, token=TOKEN, group="books").specs
    assert num_descriptors() == before + 1


def test_what_is_no_more_is_let_go_of(path: Path, holder: DescriptorHolder) -> None:
    before = num_descriptors()
    tensors = made(1.0)
    assert let_hold(path, tensors, token=TOKEN, group="kept")
    assert let_hold(path, MappedTensors(), token=TOKEN, group="kept")
    assert not take_held(path, token=TOKEN, group="kept").specs
    question = TensorsMessage(token=TOKEN, group="kept")
    exchange(path, question, tensors.descriptors, timeout_s=5)  # of which nobody has use
    tensors.close()
    assert num_descriptors() == before


def test_strangers_get_nothing_and_leave_nothing(path: Path, holder: DescriptorHolder) -> None:
    tensors = made(3.0)
    assert let_hold(path, tensors, token=TOKEN, group="kept")
    before = num_descriptors()
    assert not take_held(path, token=b"x" * 32, group="kept").specs
    other = made(9.0)
    assert not let_hold(path, other, token=b"x" * 32, group="kept")
    other.close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(str(path))
        stranger.send(b"\xc1 no message")
        assert stranger.recv(16) == b""
    found = take_held(path, token=TOKEN, group="kept")
    assert found["kv"].tolist() == [3.0] * 4
    found.close()
    assert num_descriptors() == before
    tensors.close()


def test_without_a_holder_all_is_made_anew(path: Path) -> None:
    tensors = made(1.0)
    for each in (tensors, MappedTensors()):
        assert not let_hold(path, each, token=TOKEN, group="kept")
    assert not take_held(path, token=TOKEN, group="kept").specs
    tensors.close()


def test_its_end_lets_go_of_everything(path: Path) -> None:
    before = num_descriptors()
    holder = DescriptorHolder(path, TOKEN)
    tensors = made(1.0)
    assert let_hold(path, tensors, token=TOKEN, group="kept")
    tensors.close()
    holder.close()
    holder.close()
    assert not path.exists()
    assert num_descriptors() == before


def test_a_probe_is_answered_by_a_holder_that_knows_the_token(
    path: Path, holder: DescriptorHolder
) -> None:
    tensors = made(3.0)
    assert let_hold(path, tensors, token=TOKEN, group="kept")
    before = num_descriptors()
    ask_holder(path, token=TOKEN)
    assert num_descriptors() == before
    with pytest.raises(CacheRankLostError, match="hung up"):
        ask_holder(path, token=b"x" * 32)
    tensors.close()
    holder.close()
    with pytest.raises(CacheRankLostError, match="nobody answers"):
        ask_holder(path, token=TOKEN)


def test_one_process_holds_at_a_time(path: Path, holder: DescriptorHolder) -> None:
    with pytest.raises(CacheRankError, match="another live process serves it"):
        DescriptorHolder(path, TOKEN)
    ask_holder(path, token=TOKEN)
    holder.close()
    DescriptorHolder(path, TOKEN).close()
