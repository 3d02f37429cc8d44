# SPDX-License-Identifier: Apache-2.0
"""Memory of K/V that no prompt needs is given back, in a time that the inference rank waits."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandemkv.cache_rank.protocol.memory.descriptor_messages import TensorSpec
from tandemkv.cache_rank.protocol.memory.mapped_tensors import MappedTensors
from tandemkv.cache_rank.pump import near
from tandemkv.cache_rank.pump.near import StagedSlots

_LAYERS, _SLOTS, _HEADS, _DIM = 2, 1024, 4, 256
_NONE = torch.empty(0, dtype=torch.int64)


class _Counted:
    """A mapped file that counts what is given back."""

    def __init__(self, file: mmap.mmap) -> None:
        self._file, self.num_calls = file, 0

    def madvise(self, *args: int) -> None:
        self.num_calls += 1
        self._file.madvise(*args)


@pytest.fixture
def tensors() -> Iterator[MappedTensors]:
    made = MappedTensors()
    made.allocate_sparse(TensorSpec("kv", (_LAYERS, 2, _SLOTS, _HEADS, _DIM), "float32"))
    yield made
    made.close()


def _staged(tensors: MappedTensors) -> tuple[StagedSlots, _Counted]:
    side: Any = SimpleNamespace(tensors=tensors)
    staged = StagedSlots(side)
    staged._file = counted = _Counted(staged._file)  # type: ignore[assignment]
    return staged, counted


def _num_pages(tensors: MappedTensors) -> int:
    return os.fstat(tensors.descriptors[0]).st_blocks * 512 // mmap.PAGESIZE


def test_scattered_slots_are_given_back_over_several_prompts(
    tensors: MappedTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that continues an answer, which was decoded beside seven others."""
    monkeypatch.setattr(near, "_MOST_CALLS", 4 * 2 * _LAYERS * 8)
    staged, counted = _staged(tensors)
    tensors["kv"].fill_(1)
    staged.note(torch.arange(_SLOTS))
    kept = torch.arange(0, _SLOTS, 8)
    pages = [_num_pages(tensors)]
    for _ in range(4):
        assert not len(staged.begin_prompts(kept, _NONE))
        pages.append(_num_pages(tensors))
    assert counted.num_calls == 2 * _LAYERS * len(kept)
    assert all(after < before for before, after in pairwise(pages))
    assert pages[-1] == 2 * _LAYERS * len(kept)
    staged.begin_prompts(kept, _NONE)
    assert counted.num_calls == 2 * _LAYERS * len(kept), "there was nothing to give"
    is_kept = torch.zeros(_SLOTS, dtype=torch.bool)
    is_kept[kept] = True
    assert bool((tensors["kv"][:, :, is_kept] == 1).all())
    assert bool((tensors["kv"][:, :, ~is_kept] == 0).all())


def test_what_has_most_to_give_is_given_back_first(
    tensors: MappedTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(near, "_MOST_CALLS", 1)
    staged, counted = _staged(tensors)
    tensors["kv"].fill_(1)
    staged.begin_prompts(torch.tensor([8, 16]), torch.tensor([17]))
    assert counted.num_calls == 2 * _LAYERS
    assert bool((tensors["kv"][:, :, 18:] == 0).all())
    assert bool((tensors["kv"][:, :, :18] == 1).all())


def test_what_is_written_later_is_given_back_again(tensors: MappedTensors) -> None:
    staged, _ = _staged(tensors)
    prompt = torch.arange(32, 64)
    staged.begin_prompts(_NONE, prompt)
    staged.note(prompt)
    tensors["kv"][:, :, 32:200] = 1
    staged.note(torch.arange(64, 200))
    assert staged.begin_prompts(torch.arange(190, 210), _NONE).tolist() == list(range(200, 210))
    assert bool((tensors["kv"][:, :, 190:200] == 1).all())
    assert bool((tensors["kv"][:, :, :190] == 0).all())
    everything = torch.arange(len(tensors["kv"][0, 0]))
    missing = staged.begin_prompts(everything, _NONE)
    assert len(everything) - len(missing) == 20
