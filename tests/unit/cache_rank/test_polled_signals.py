# SPDX-License-Identifier: Apache-2.0
"""Flags between a forward pass whose kernels poll, and an engine on the CPU that polls too."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from tandemkv.cache_rank.protocol.gpu_flags import GpuFlags, flag_specs
from tandemkv.cache_rank.protocol.memory.mapped_tensors import MappedTensors
from tandemkv.cache_rank.protocol.memory.shared_region import FlagIndex
from tandemkv.cache_rank.protocol.progress import BusyClock
from tandemkv.cache_rank.protocol.step_flags import WORDS_APART, StepFlags
from tandemkv.cache_rank.protocol.step_ring import EntryKind, StepEntry, StepRow
from tandemkv.cache_rank.service.polled_signals import PolledSignals
from tandemkv.cache_rank.service.signals import StepAbortedError
from tandemkv.kernels.step_flags import raise_flags, wait_flags

LAYERS, BATCH = 3, 4
AT = FlagIndex(LAYERS)


class World:
    """The engine's side, and words that a GPU's kernels would read and write."""

    def __init__(self) -> None:
        self.tensors = MappedTensors()
        self.tensors.allocate_all(flag_specs(LAYERS, BATCH))
        for name in ("step_rows", "step_lengths"):
            self.tensors.allocate(name, (BATCH,), torch.int64)
        self.tensors.allocate("flags", (AT.count, WORDS_APART), torch.int64)
        self.host, self.gone = StepFlags(self.tensors["flags"]), threading.Event()
        self.gpu, self.clock = GpuFlags(self.tensors, LAYERS), BusyClock()
        self.engine = PolledSignals(
            self.tensors, self.host, LAYERS, is_gone=self.gone.is_set, clock=self.clock
        )
        self.lost = torch.zeros(1, dtype=torch.int32)

    def forward_raises(self, flags: torch.Tensor, step: int) -> None:
        raise_flags(flags, step=torch.tensor([step], dtype=torch.int32), lost=self.lost)

    def forward_waits(self, flags: torch.Tensor, step: int) -> bool:
        wanted = torch.tensor([step], dtype=torch.int32)
        wait_flags(flags, step=wanted, lost=self.lost, timeout_s=5.0)
        return not bool(self.lost.any())


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.tensors.close()


def test_a_step_goes_to_and_fro_between_two_threads(world: World) -> None:
    engine, gpu, answers = world.engine, world.gpu, torch.zeros(LAYERS)

    def attend() -> None:
        for step in (1, 2):
            engine.begin(step)
            engine.await_begin()
            for layer in range(LAYERS):
                engine.await_query(layer, 2)
                answers[layer] = 10 * step + layer
                engine.raise_ready(layer)
            engine.await_end()
            engine.settle()
            engine.finish()

    thread = threading.Thread(target=attend, daemon=True)
    thread.start()
    for step in (1, 2):
        world.forward_raises(gpu.begin, step)
        for layer in range(LAYERS):
            world.forward_raises(gpu.query(layer, 2), step)
            assert world.forward_waits(gpu.ready(layer), step)
            assert answers[layer] == 10 * step + layer
        world.forward_raises(gpu.end, step)
        assert world.forward_waits(gpu.finished, step)
    thread.join(5.0)
    assert not thread.is_alive()
    assert world.host.value(AT.FINISHED) == 2
    assert world.host.value(AT.PROGRESS) == 2 * (LAYERS + 1)


def test_every_row_has_to_be_there_and_later_steps_will_do(world: World) -> None:
    engine, gpu = world.engine, world.gpu
    engine.begin(2**31 + 3)  # numbers wrap around in a word of 32 bits
    gpu.query(0, 3).fill_(-(2**31) + 3)
    engine.await_query(0, 3)
    gpu.query(0, 3)[1] = -(2**31) + 2
    world.gone.set()
    with pytest.raises(StepAbortedError, match="was given up"):
        engine.await_query(0, 3)
    gpu.query(0, 3)[1] = -(2**31) + 9
    engine.await_query(0, 3)
    engine.raise_ready(1)
    assert gpu.ready(1).tolist() == [-(2**31) + 3]


@pytest.mark.parametrize("ends", ["gone", "aborted"])
def test_a_wait_ends_with_the_inference_rank_and_is_no_work(world: World, ends: str) -> None:
    found: list[BaseException] = []

    def wait() -> None:
        world.engine.begin(4)
        world.clock.begin()
        try:
            world.engine.await_input(1)
        except StepAbortedError as error:
            found.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    assert world.clock.busy_s() < 0.1, "a wait for the other side is no work of its own"
    if ends == "gone":
        world.gone.set()
    else:
        world.host.raise_to(AT.ABORTED, 4)
    thread.join(5.0)
    assert len(found) == 1


def test_requests_are_those_that_the_gpu_has_written(world: World) -> None:
    world.tensors["step_rows"][:2] = torch.tensor([3, 1])
    world.tensors["step_lengths"][:2] = torch.tensor([70, 80])
    rows = tuple(StepRow(row=0, generation=0, length=1) for _ in range(2))
    entry = StepEntry(kind=EntryKind.DECODE, step=1, rows=rows)
    found = world.engine.requests_of(entry)
    world.tensors["step_rows"].zero_()  # by the next step
    assert [x.tolist() for x in found] == [[3, 1], [70, 80]]


def test_the_step_is_settled_before_it_is_finished(world: World) -> None:
    world.engine.begin(5)
    world.engine.raise_loaded()
    assert world.gpu.finished.item() == 0
    world.engine.settle()
    assert (world.gpu.finished.item(), world.host.value(AT.FINISHED)) == (5, 0)
    world.engine.finish()
    assert world.host.value(AT.FINISHED) == 5
