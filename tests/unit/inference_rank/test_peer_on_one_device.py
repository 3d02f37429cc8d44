# SPDX-License-Identifier: Apache-2.0
"""Transport ``peer`` where one device stands for two GPUs: flags, and where things lie."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandemkv.cache_rank.engine.scan_order import ScanOrder
from tandemkv.cache_rank.protocol.errors import ContractError, SettingsError
from tandemkv.cache_rank.protocol.one_device import ONE_DEVICE_VARIABLE
from tandemkv.cache_rank.protocol.settings import RankSettings
from tandemkv.inference_rank import sglang_versions
from tandemkv.inference_rank.attention.pool import make_peer_pool_class
from tandemkv.inference_rank.links import layer_streams
from tandemkv.inference_rank.links.layer_streams import LayerStreams
from tandemkv.inference_rank.links.peer_memory import enable_peer_access, seen_from
from tandemkv.inference_rank.links.side_stream import SideStream
from tandemkv.inference_rank.start.local import cache_device_of
from tandemkv.kernels import streams
from tandemkv.kernels.flags import raise_flags

CPU, LAYERS, MAX_BATCH = torch.device("cpu"), 3, 4


@pytest.fixture
def side() -> SideStream:
    return SideStream(CPU, CPU, LAYERS, num_lanes=2, max_batch=MAX_BATCH, is_far=True)


def raised_for(side: SideStream, layer: int, size: int) -> None:
    """As the last kernel of what is done for a layer."""
    flags = side.done_flags(layer, size)
    assert flags is not None
    raise_flags(flags)
    side.note_done(layer, size)


def test_a_step_raises_whatever_it_waits_for(side: SideStream) -> None:
    rows = LayerStreams(
        num_layers=LAYERS, max_batch=MAX_BATCH, width=2, dtype=torch.float32, device=CPU,
        cache_device=CPU, is_far=True,
    )  # fmt: skip
    for size in (MAX_BATCH, 2, 3):
        side.begin_step()
        for layer in range(LAYERS):
            hidden = torch.full((size, 2), float(layer))
            signals = [side.signal(layer, size), side.signal((layer + 1) % LAYERS, size)]
            there = rows.put_beside(layer, hidden, hidden, signals)
            rows.join()
            for target, signal in zip((layer, (layer + 1) % LAYERS), signals, strict=True):
                with side.fork(there, lane=target % 2, signal=signal):
                    assert there.eq(2 * layer).all()
            raised_for(side, layer, size)
            awaited = side.join_by_flags(layer)
            assert awaited is not None
            assert awaited.tolist() == [1] * size
            awaited.zero_()  # by the caller, who waits in a launch of its own
            raised_for(side, layer, 1)
            side.join(layer)
            side.join(layer)  # nothing is left to wait for
        side.finish_deferred()
        side.join_all()


def test_flags_that_are_down_are_not_waited_for_silently(side: SideStream) -> None:
    signal = side.signal(0, 2)
    assert signal is not None
    with pytest.raises(RuntimeError, match="down"), side.fork(signal=signal):
        raise AssertionError("the rows have not been sent")
    raise_flags(signal.raised[:1])
    with pytest.raises(RuntimeError, match=r"\[1, 0\].*down"), side.fork(signal=signal):
        raise AssertionError("one row has not been sent")
    side.note_done(1)
    with pytest.raises(RuntimeError, match="down"):
        side.join(1)
    raised_for(side, 2, 1)
    side.note_done(2, 2)
    with pytest.raises(RuntimeError, match=r"\[1, 0\].*down"):
        side.join(2)


def test_flags_that_nobody_waits_for_are_named(side: SideStream) -> None:
    signal = side.signal(1, 3)
    assert signal is not None
    raise_flags(signal.raised)
    with pytest.raises(ContractError, match=r"forward pass has raised flags of rows \[1\]"):
        side.join_all()
    with pytest.raises(ContractError, match="forward pass"):
        side.join_all()  # a step that failed: they stay up until the next one begins
    side.begin_step()
    flags = side.done_flags(2)
    assert flags is not None
    raise_flags(flags)  # and not noted as done
    with pytest.raises(ContractError, match=r"cache rank has raised flags of rows \[2\]"):
        side.join_all()


def test_a_step_that_failed_leaves_nothing_to_the_next(side: SideStream) -> None:
    signal = side.signal(0, 2)
    assert signal is not None
    raise_flags(signal.raised)
    raised_for(side, 1, 2)
    side.note_done(2)
    side.begin_step()
    side.join_all()
    assert side.join_by_flags(1) is None
    again = side.signal(0, 2)
    assert again is not None
    with pytest.raises(RuntimeError, match="down"), side.fork(signal=again):
        raise AssertionError("the rows of the step before were taken for this one's")


def test_near_there_are_no_flags() -> None:
    side = SideStream(CPU, CPU, LAYERS)
    assert not side.uses_flags
    assert side.signal(0, 1) is None
    assert side.done_flags(0) is None
    side.begin_step()
    with side.fork(torch.ones(1)):
        side.note_done(0)
    assert side.join_by_flags(0) is None
    side.join_all()


def test_in_order_no_scan_waits_for_a_choice() -> None:
    order = ScanOrder(CPU, is_kept=True)
    order.note_choice()
    order.await_choice()
    order.end_step()


def test_one_tensor_is_seen_by_both() -> None:
    tensor = torch.zeros(2, 3).T  # of memory that two GPUs could not share
    assert seen_from(CPU, tensor) is tensor
    enable_peer_access(CPU, CPU)

    class Base:
        def __init__(self) -> None:
            self.device, self.size, self.page_size = "cpu", 1, 1
            self._create_buffers()

        def _create_buffers(self) -> None:
            self.k_buffer, self.v_buffer = [torch.zeros(2)], [torch.ones(2)]

        def _build_kv_buffer_descs(self) -> list[torch.Tensor]:
            return self.k_buffer + self.v_buffer

        def _init_data_ptrs_and_strides(self) -> None:
            self.pointers = [t.data_ptr() for t in self.k_buffer + self.v_buffer]

    pool = make_peer_pool_class(Base, CPU)()
    assert pool.cache_k[0] is pool.k_buffer[0]
    assert pool.cache_v[0] is pool.v_buffer[0]
    assert pool.pointers == [pool.cache_k[0].data_ptr(), pool.cache_v[0].data_ptr()]


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_where_the_cache_rank_works(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ONE_DEVICE_VARIABLE, raising=False)
    runner = SimpleNamespace(device=device)
    monkeypatch.setattr(sglang_versions, "tensor_size", lambda: 2)
    peer, local = (
        RankSettings.model_validate({"placement": {"link": name}}) for name in ("peer", "local")
    )
    assert cache_device_of(runner, local) == torch.device(device)
    if device == "cpu":
        with pytest.raises(SettingsError, match="the model is on cpu; use --cache-ranks 0"):
            cache_device_of(runner, peer)
    else:
        assert cache_device_of(runner, peer) == torch.device("cuda", 3)
    for value, is_asked in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv(ONE_DEVICE_VARIABLE, value)
        assert cache_device_of(runner, local) == torch.device(device)
        if is_asked:
            assert cache_device_of(runner, peer) == torch.device(device)


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
    beside = layer_streams.stream_beside(one, one)
    assert all(beside is not stream for stream in (forward, *waiting))
    assert made[-1] == (one, streams.FORWARD_PRIORITY)
    layer_streams.stream_beside(one, two)
    assert len(made) == 10, "between two GPUs it is the lowest of the forward pass's GPU, as ever"
