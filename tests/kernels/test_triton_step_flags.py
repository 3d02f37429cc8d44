# SPDX-License-Identifier: Apache-2.0
"""Flags that hold step numbers, and appends; `test_triton_ops` runs the cases without a wait."""

import os
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tandemkv.cache_rank.protocol.memory.mapped_tensors import Homes, MappedTensors
from tandemkv.kernels.append import append_tokens
from tandemkv.kernels.exchange import exchange_rows
from tandemkv.kernels.step_flags import StepWait, raise_flags, send_rows, wait_flags
from tandemkv.kernels.streams import let_chain

pytest.importorskip("triton")


def words(*values: int, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_bad_arguments() -> None:
    step, lost = words(1), words(0)
    with pytest.raises(ValueError, match="timeout_s=0"):
        wait_flags(words(0), step=step, lost=lost, timeout_s=0)
    with pytest.raises(ValueError, match="stamp"):
        wait_flags(words(0), step=step, lost=lost, timeout_s=1, stamp=words(0, 0))
    with pytest.raises(ValueError, match="flags"):
        raise_flags(words(0).long(), step=step, lost=lost)
    with pytest.raises(ValueError, match="lost"):
        raise_flags(words(0), step=step, lost=words(0, 0))
    with pytest.raises(ValueError, match="out"):
        send_rows(torch.ones(2, 3), torch.ones(2, 4), words(0, 0), step=step, lost=lost)


def test_an_append_checks_what_it_waits_for() -> None:
    token, at = torch.ones(1, 1, 2), torch.zeros(1, dtype=torch.int64)
    resident, word = torch.zeros(2, 1, 1, 1, 2), words(1)
    wait = StepWait(flags=word, step=word, lost=0 * word, timeout_s=1.0)
    append_tokens(token, token, at, at, *resident, awaited=wait)
    for changed in ({"flags": word.long()}, {"timeout_s": 0.0}, {"lost": words(1, 1)}):
        with pytest.raises(ValueError, match=next(iter(changed))):
            append_tokens(token, token, at, at, *resident, awaited=replace(wait, **changed))


@pytest.mark.gpu
def test_an_append_is_not_done_before_its_step_is_raised() -> None:
    token, at = torch.ones(1, 1, 2, device="cuda"), torch.zeros(1, device="cuda").long()
    resident = torch.zeros(2, 1, 1, 1, 2, device="cuda")
    flags, step, lost, raised = (words(x, device="cuda") for x in (1, 1, 0, 2))
    wait = StepWait(flags=flags, step=step, lost=lost, timeout_s=20.0)
    # Compiled before anything polls, as the other.
    raise_flags(flags, step=step, lost=lost)
    append_tokens(token, token, at, at, *resident, awaited=wait)
    step.fill_(2)
    torch.cuda.synchronize()
    other, done = torch.cuda.Stream(), torch.cuda.Event()
    append_tokens(token, token, at, at, *resident, awaited=wait)
    done.record()
    time.sleep(0.05)
    assert not done.query()
    with torch.cuda.stream(other):
        raise_flags(flags, step=raised, lost=lost)
    done.synchronize()
    assert (flags.item(), lost.item()) == (2, 0)


@pytest.mark.gpu
def test_a_wait_ends_at_its_limit_and_later_ones_at_once() -> None:
    flags, step, lost = (words(x, device="cuda") for x in (0, 1, 1))
    wait_flags(flags, step=step, lost=lost, timeout_s=1.0)  # compiled
    lost.zero_()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(100):
        wait_flags(flags, step=step, lost=lost, timeout_s=0.3)
    raise_flags(flags, step=step, lost=lost)
    torch.cuda.synchronize()
    took = time.perf_counter() - began
    assert 0.29 < took < 0.9, "one wait lasts, 99 do not"
    assert (lost.item(), flags.item()) == (1, 0)
    assert (torch.ones(4, device="cuda") + 1).tolist() == [2.0] * 4  # the context is usable


@pytest.mark.gpu
def test_a_wait_ends_when_the_host_says_that_the_epoch_is_lost() -> None:
    flags, step, lost = (words(x, device="cuda") for x in (0, 1, 1))
    wait_flags(flags, step=step, lost=lost, timeout_s=1.0)
    lost.zero_()
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    began = time.perf_counter()
    wait_flags(flags, step=step, lost=lost, timeout_s=20.0)
    with torch.cuda.stream(other):
        lost.fill_(7)
    torch.cuda.synchronize()
    assert time.perf_counter() - began < 5.0
    assert lost.item() == 7


@pytest.mark.parametrize(
    "far_index",
    [
        pytest.param(0, marks=pytest.mark.gpu, id="one GPU for both"),
        pytest.param(1, marks=pytest.mark.multi_gpu(2), id="two GPUs"),
    ],
)
def test_two_graphs_meet_in_memory_that_each_gpu_maps(far_index: int) -> None:
    """Rows go to the other GPU and come back, with flags behind them, over hundreds of steps."""
    pytest.importorskip("cuda.bindings.driver")
    main, far = torch.device("cuda", 0), torch.device("cuda", far_index)
    size, width, steps = 8, 512, 300
    made = MappedTensors(Homes(inference=main, engine=far, here=main))
    made.allocate("streams", (size, width), torch.float32, "engine")
    made.allocate("to_engine", (size,), torch.int32, "engine")
    for kind in "kv":
        made.allocate(kind, (size, 1, 1, width), torch.float32, "inference")
    made.allocate("to_inference", (1,), torch.int32, "inference")
    with torch.cuda.device(far):
        seen = MappedTensors(Homes(inference=main, engine=far, here=far))
        for spec, descriptor in zip(made.specs, made.descriptors, strict=True):
            seen.attach(spec, os.dup(descriptor))
    if far != main:
        let_chain(far)
    base = torch.randn(size, width, device=main)
    wrong = torch.zeros((), dtype=torch.int64, device=main)
    rows = torch.arange(size, device=far)
    first = torch.zeros((size, 1, 1), dtype=torch.int32, device=far)
    step, lost, far_step, far_lost = (
        words(value, device=str(device)) for device in (main, far) for value in (0, 1)
    )

    def forward() -> None:
        step.add_(1)
        hidden = base + step
        send_rows(hidden, made["streams"], made["to_engine"], step=step, lost=lost)
        wait_flags(made["to_inference"], step=step, lost=lost, timeout_s=5.0)
        for kind in "kv":
            wrong.add_((made[kind][:, 0, 0] != hidden).sum())

    def engine() -> None:
        far_step.add_(1)
        wait_flags(seen["to_engine"], step=far_step, lost=far_lost, timeout_s=5.0)
        pool = seen["streams"][:, None]
        exchange_rows(
            pool, pool, rows[:, None], first, first, seen["k"], seen["v"], rows
        )  # fmt: skip
        raise_flags(seen["to_inference"], step=far_step, lost=far_lost, follows=True)

    replays = [_captured(engine, far), _captured(forward, main)]
    for word in (lost, far_lost, wrong):  # until then waits ended at once
        word.zero_()
    torch.cuda.synchronize(main)
    torch.cuda.synchronize(far)
    for _ in range(steps):
        for replay in replays:
            replay()
    torch.cuda.synchronize(main)
    torch.cuda.synchronize(far)
    assert (lost.item(), far_lost.item()) == (0, 0)
    assert step.item() == far_step.item() == steps + 1
    assert wrong.item() == 0
    seen.close()
    made.close()


def _captured(body: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Run `body`, so that its kernels are loaded; return what replays it on a stream of its own."""
    with torch.cuda.device(device):
        stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            body()
        torch.cuda.synchronize(device)
        with torch.cuda.graph(graph, stream=stream):
            body()

    def replay() -> None:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            graph.replay()

    return replay
