# SPDX-License-Identifier: Apache-2.0
"""Flags between GPUs, and appends; interpreted where there is no GPU."""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from own_process import run_cases

from tandemkv.kernels.append import append_tokens
from tandemkv.kernels.exchange import SampleWeights, exchange_rows
from tandemkv.kernels.flags import raise_flags, send_rows, wait_flags
from tandemkv.kernels.step_flags import StepWait

pytest.importorskip("triton")


@pytest.mark.timeout(900)  # interpreted, minutes on a busy core
def test_triton_kernels_equal_the_references(tmp_path: Path) -> None:
    run_cases("triton_flags_cases.py", tmp_path)


def test_flags_on_a_cpu() -> None:
    up = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="nobody would raise them"):
        wait_flags(up)
    out = torch.zeros(2, 3)
    send_rows(torch.ones(2, 3), torch.full((2, 3), 2.0), out, up)
    assert out.tolist() == [[3.0] * 3] * 2
    wait_flags(up)
    assert up.tolist() == [0, 0]
    raise_flags(up[1:])
    assert up.tolist() == [0, 1]


def test_bad_arguments_of_flags() -> None:
    up = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="timeout_s=0"):
        wait_flags(up, timeout_s=0)
    with pytest.raises(ValueError, match="flags"):
        raise_flags(up.long())
    with pytest.raises(ValueError, match="out"):
        send_rows(torch.ones(2, 3), None, torch.ones(2, 4), up)


def test_an_append_waits_on_a_cpu() -> None:
    token, at = torch.ones(1, 1, 2), torch.zeros(1, dtype=torch.int64)
    resident, up = torch.zeros(2, 1, 1, 1, 2), torch.ones(2, dtype=torch.int32)
    append_tokens(token, token, at, at, *resident, awaited=up)
    assert resident.tolist() == [[[[[1.0, 1.0]]]]] * 2
    assert up.tolist() == [0, 0]
    with pytest.raises(RuntimeError, match="nobody would raise them"):
        append_tokens(token, token, at, at, *resident, awaited=up)
    with pytest.raises(ValueError, match="awaited"):
        append_tokens(token, token, at, at, *resident, awaited=up.long())


def test_an_append_checks_what_it_waits_for() -> None:
    token, at = torch.ones(1, 1, 2), torch.zeros(1, dtype=torch.int64)
    resident, word = torch.zeros(2, 1, 1, 1, 2), torch.ones(1, dtype=torch.int32)
    wait = StepWait(flags=word, step=word, lost=0 * word, timeout_s=1.0)
    append_tokens(token, token, at, at, *resident, awaited=wait)
    for changed in ({"flags": word.long()}, {"timeout_s": 0.0}, {"lost": torch.ones(2).int()}):
        with pytest.raises(ValueError, match=next(iter(changed))):
            append_tokens(token, token, at, at, *resident, awaited=replace(wait, **changed))


@pytest.mark.gpu
def test_an_append_is_not_done_before_the_flags_are_up() -> None:
    device = torch.device("cuda", 0)
    token, at = torch.ones(1, 1, 2, device=device), torch.zeros(1, device=device).long()
    resident, up = torch.zeros(2, 1, 1, 1, 2, device=device), torch.zeros(1, device=device).int()
    raise_flags(up)  # compiled before anything polls, as the other
    append_tokens(token, token, at, at, *resident, awaited=up)
    torch.cuda.synchronize()
    assert not up.any()
    other, done = torch.cuda.Stream(), torch.cuda.Event()
    append_tokens(token, token, at, at, *resident, awaited=up)
    done.record()
    time.sleep(0.05)
    assert not done.query()
    with torch.cuda.stream(other):
        raise_flags(up)
    done.synchronize()
    assert not up.any()


@pytest.mark.parametrize(
    "far_index",
    [
        pytest.param(0, marks=pytest.mark.gpu, id="one GPU for both"),
        pytest.param(1, marks=pytest.mark.multi_gpu(2), id="two GPUs"),
    ],
)
def test_two_gpus_take_turns_in_one_graph(far_index: int) -> None:
    """Rows travel there and back by flags, over many replays of graphs of two sizes.

    Appends wait for them and for the weights of samples that come along, what is deferred has run
    by the end of a step, and so has what is queued behind its last selection for the next one.
    """
    from tandemkv.inference_rank.links.peer_memory import enable_peer_access, seen_from
    from tandemkv.inference_rank.links.side_stream import SideStream

    main, far = torch.device("cuda", 0), torch.device("cuda", far_index)
    enable_peer_access(main, far)
    torch.cuda.set_device(main)
    num_layers, shape = 6, (4, 512)
    side = SideStream(main, far, num_layers, num_lanes=2, max_batch=4, is_far=True)
    there = torch.zeros((num_layers, *shape), device=far)
    there_from_main = seen_from(main, there)
    rows = torch.arange(shape[0], device=far)
    first = torch.zeros((shape[0], 1, 1), dtype=torch.int32, device=far)
    num_done = torch.zeros((num_layers, 1), dtype=torch.int32, device=far)
    back = torch.zeros((num_layers, *shape), device=main)
    back_from_there = seen_from(far, back)
    next_step = torch.zeros(shape, device=far)
    start, late = torch.zeros(shape, device=main), torch.zeros((num_layers, *shape), device=far)
    token, at = torch.ones(1, 1, 8, device=main), torch.zeros(1, dtype=torch.int64, device=main)
    resident = torch.zeros(2, 1, 1, 1, 8, device=main)
    # As many as a row is wide: they are to be what the row is.
    weights = torch.zeros((num_layers, shape[0], 1, shape[1]), device=main)
    weights_from_there = seen_from(far, weights)
    active = torch.ones(shape[0], dtype=torch.bool, device=far)

    def step(size: int) -> torch.Tensor:
        x = start[:size] + 1
        for layer in range(num_layers):
            signal = side.signal(layer, size)
            if signal is None:
                there_from_main[layer, :size].copy_(x)
            else:
                send_rows(x, None, there_from_main[layer, :size], signal.raised)
            with side.fork(lane=layer % 2, signal=signal, after=(layer + 1) % 2):
                torch.cuda._sleep(300_000)  # longer than a layer: who reads must wait
                sums = (there[layer] * 2)[:size, None]
                target = back_from_there[layer, :size, None, None]
                flag = side.done_flags(layer)
                carried = SampleWeights(
                    source=sums, target=weights_from_there[layer, :size], active=active[:size]
                )
                exchange_rows(
                    sums, sums, rows[:size, None], first[:size], first[:size], target, target,
                    rows[:size], weights=carried, flag=flag,
                    num_done=None if flag is None else num_done[layer],
                )  # fmt: skip
                side.note_done(layer)
            awaited = side.join_by_flags(layer)
            append_tokens(token, token, at, at, *resident, awaited=awaited)
            x = x + (back[layer, :size] + weights[layer, :size, 0]) / 2
            side.defer(layer % 2, partial(late[layer].copy_, there[layer]))
            if layer == num_layers - 2:  # its own and those before it have been sent
                with side.fork(lane=1, behind=0):
                    torch.cuda._sleep(300_000)
                    next_step[:size].copy_(there[layer, :size])
        side.finish_deferred()
        x = x * 1  # the forward pass goes on, and joins later
        side.join_all()
        return x

    factor = 3.0**num_layers
    assert torch.equal(step(shape[0]), torch.full(shape, factor, device=main))
    graphs, found = [], []
    for size in (shape[0], shape[0] // 2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            found.append(step(size))
    for turn in range(200):
        start.fill_(turn)
        late.zero_()
        torch.cuda.synchronize(far)
        graphs[turn % 2].replay()
        out = found[turn % 2]
        assert torch.equal(out, torch.full_like(out, (turn + 1) * factor))
        size = len(out)
        assert torch.equal(late[:, :size], there[:, :size])
        assert late[:, :size].all()
        assert torch.equal(next_step[:size], there[num_layers - 2, :size])
