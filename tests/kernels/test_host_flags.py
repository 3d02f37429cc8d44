# SPDX-License-Identifier: Apache-2.0
"""Host memory and flags between a GPU's captured graph and a thread on the CPU.

With a CPU in the place of the GPU the same calls are made one after another.
"""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from tandemkv.cache_rank.protocol.gpu_flags import GpuFlags, flag_specs
from tandemkv.cache_rank.protocol.memory.mapped_tensors import Homes, MappedTensors
from tandemkv.cache_rank.protocol.memory.shared_region import FlagIndex
from tandemkv.cache_rank.protocol.progress import BusyClock
from tandemkv.cache_rank.protocol.step_flags import WORDS_APART, StepFlags
from tandemkv.cache_rank.service.polled_signals import PolledSignals
from tandemkv.kernels.step_flags import raise_flags, send_rows, wait_flags

CPU = torch.device("cpu")
SIZE, WIDTH, LAYERS, STEPS = 8, 512, 3, 300
DEVICES = [
    pytest.param(CPU, id="CPU"),
    pytest.param(torch.device("cuda", 0), id="GPU", marks=pytest.mark.gpu),
]


def both_sides(device: torch.device, **shapes: tuple[int, ...]) -> tuple[MappedTensors, ...]:
    """Return tensors of zeros as the model's process maps them, and as the engine's does."""
    made = MappedTensors(Homes.beside_gpu(device, here=device))
    made.allocate_all(flag_specs(LAYERS, SIZE))
    for name in ("step_rows", "step_lengths"):
        made.allocate(name, (SIZE,), torch.int64)
    made.allocate("flags", (FlagIndex(LAYERS).count, WORDS_APART), torch.int64, "host")
    for name, shape in shapes.items():
        made.allocate(name, shape, torch.float32)
    seen = MappedTensors(Homes.beside_gpu(device, here=CPU))
    for spec, descriptor in zip(made.specs, made.descriptors, strict=True):
        seen.attach(spec, os.dup(descriptor))
    return made, seen


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@pytest.mark.parametrize("device", DEVICES)
def test_either_side_reads_what_the_other_has_written(device: torch.device) -> None:
    made, seen = both_sides(device, kv=(1 << 16, 16))
    pool, index = made["kv"], torch.randperm(1 << 16, device=device)[:1000]
    assert (pool.device, seen["kv"].device) == (device, CPU)
    assert not bool(pool.any())
    written = torch.randn(1000, 16, device=device)
    pool[index] = written  # by a kernel
    pool[:10].copy_(written[:10])  # by a copy
    synchronize(device)
    want = torch.zeros(1 << 16, 16)
    want[index.cpu()] = written.cpu()
    want[:10] = written[:10].cpu()
    assert torch.equal(seen["kv"], want)
    seen["kv"].mul_(2.0)
    assert torch.equal(pool[index].cpu(), 2 * want[index.cpu()])
    assert torch.equal(pool[:10].clone().cpu(), 2 * want[:10])
    seen.close()
    made.close()


@pytest.mark.parametrize("device", DEVICES)
def test_a_query_goes_to_the_host_and_its_output_comes_back(
    device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over hundreds of steps of three layers, whose outputs lie in the same memory."""
    made, seen = both_sides(device, queries=(LAYERS, SIZE, WIDTH), outputs=(SIZE, WIDTH))
    flags, gone = GpuFlags(made, LAYERS), threading.Event()
    base = torch.randn(SIZE, WIDTH, device=device)
    step, lost = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
    wrong = torch.zeros((), dtype=torch.int64, device=device)

    def attend() -> None:
        engine = PolledSignals(
            seen, StepFlags(seen["flags"]), LAYERS, is_gone=gone.is_set, clock=BusyClock()
        )
        for number in range(1, STEPS + 1):
            engine.begin(number)
            engine.await_begin()
            for layer in range(LAYERS):
                engine.await_query(layer, SIZE)
                torch.mul(seen["queries"][layer], 2.0, out=seen["outputs"])
                engine.raise_ready(layer)
            engine.settle()

    def forward() -> None:
        step.add_(1)
        raise_flags(flags.begin, step=step, lost=lost)
        for layer in range(LAYERS):
            query = base + step + layer
            ready = flags.query(layer, SIZE)
            send_rows(query, made["queries"][layer], ready, step=step, lost=lost)
            wait_flags(flags.ready(layer), step=step, lost=lost, timeout_s=5.0)
            output = made["outputs"].clone()
            wrong.add_((output != 2.0 * query).sum())
        wait_flags(flags.finished, step=step, lost=lost, timeout_s=5.0)

    run = forward
    if device.type == "cuda":
        lost.fill_(1)  # a rehearsal, which loads the kernels
        forward()
        synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            forward()
        for word in (step, lost, wrong):
            word.zero_()
        run = graph.replay
    engine = threading.Thread(target=attend, daemon=True)
    engine.start()
    began = time.perf_counter()
    for _ in range(STEPS):
        run()
    synchronize(device)
    took_us = (time.perf_counter() - began) / (STEPS * LAYERS) * 1e6
    gone.set()
    engine.join(10.0)
    with capsys.disabled():
        print(f"\n{device}: {took_us:.0f} us from a query to its output, of {SIZE} rows")
    assert int(lost) == 0, "a flag was not seen in time"
    assert int(wrong) == 0, "an output was read before it was whole"
    seen.close()
    made.close()
