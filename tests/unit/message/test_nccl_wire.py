# SPDX-License-Identifier: Apache-2.0
"""How two ends meet by NCCL, and part; its process group is played here, by queues."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any, ClassVar

import psutil
import pytest
import torch

from tandemkv.cache_rank.protocol.errors import CacheRankLostError, ProtocolError, SettingsError
from tandemkv.cache_rank.protocol.message import nccl_wire
from tandemkv.cache_rank.protocol.message.data_plane import CACHE_END, INFERENCE_END
from tandemkv.cache_rank.protocol.message.nccl_wire import (
    MOST_CTAS,
    NcclWire,
    interface_name,
    prepare_nccl,
)
from tandemkv.cache_rank.pump import gpu_link
from tandemkv.cache_rank.pump.gpu_link import most_ctas, open_wires

_CPU = torch.device("cpu")
_KEY = "0:1"


class Work:
    def wait(self) -> None:
        """The stream waits, here nobody."""


class Group:
    """Meets by an identifier in its store, at the first operation, as NCCL's group does."""

    meetings: ClassVar[dict[bytes, SimpleQueue[torch.Tensor]]] = {}

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        assert size == 2
        assert options._timeout > timedelta(days=1)
        self._store, self._rank, self._is_aborted = store, rank, False
        self._queue: SimpleQueue[torch.Tensor] | None = None
        self.num_aborts = 0

    def _meet(self) -> SimpleQueue[torch.Tensor]:
        if self._queue is None:
            if self._rank == INFERENCE_END:
                identifier = bytes([len(self.meetings)]) + b"=" + os.urandom(126)
                self.meetings[identifier] = SimpleQueue()
                self._store.set(_KEY, identifier)
            self._queue = self.meetings[bytes(self._store.get(_KEY))]
        return self._queue

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        assert (peer, tag) == (1 - self._rank, 0)
        self._meet().put(tensors[0].clone())
        return Work()

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        assert (peer, tag) == (1 - self._rank, 0)
        queue = self._meet()
        while not self._is_aborted:
            try:
                tensors[0].copy_(queue.get(timeout=0.01))
            except Empty:
                continue
            return Work()
        raise RuntimeError("aborted")

    def abort(self) -> None:
        self._is_aborted = True
        self.num_aborts += 1


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    def options() -> Any:
        return SimpleNamespace(_timeout=None, config=SimpleNamespace(max_ctas=None))

    group = type("Group", (Group,), {"Options": staticmethod(options), "meetings": {}})
    played = SimpleNamespace(
        HashStore=torch.distributed.HashStore, ProcessGroupNCCL=group,
        is_nccl_available=lambda: True,
    )  # fmt: skip
    monkeypatch.setattr(nccl_wire, "_dist", played)


def _wire(end: int, *, sends: bool, timeout_s: float = 10.0) -> NcclWire:
    return NcclWire(end, _CPU, sends=sends, timeout_s=timeout_s)


def _pair() -> tuple[NcclWire, NcclWire]:
    """Return both ends of the direction away from the inference rank, which have met."""
    near = _wire(INFERENCE_END, sends=True)
    far = _wire(CACHE_END, sends=False)
    with ThreadPoolExecutor(1) as pool:
        met = pool.submit(far.meet, near.place)
        near.meet()
        met.result()
    return near, far


def _num_aborts(wire: NcclWire) -> int:
    assert wire._breaker is not None
    wire._breaker.join(10.0)
    return int(wire._group.num_aborts)


def test_what_is_sent_comes() -> None:
    near, far = _pair()
    assert near.place.startswith(f"{_KEY}=".encode())
    assert not far.place
    for number in range(3):
        near.send(torch.full((5,), number, dtype=torch.uint8))
    out = torch.empty(5, dtype=torch.uint8)
    for number in range(3):
        far.receive(out)
        assert out.tolist() == [number] * 5


def test_each_direction_has_a_wire_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = list[int]()

    def wire(
        end: int, _: torch.device, *, sends: bool, timeout_s: float, most_ctas: int
    ) -> NcclWire:
        taken.append(most_ctas)
        return NcclWire(end, _CPU, sends=sends, timeout_s=timeout_s)

    monkeypatch.setattr(gpu_link, "NcclWire", wire)
    monkeypatch.setattr(gpu_link, "prepare_nccl", lambda _: None)
    gpu = torch.device("cuda", 0)
    near = open_wires(INFERENCE_END, gpu, "127.0.0.1", 10.0, num_sharing=3)
    places = tuple(wire.place for wire in near)
    far = open_wires(CACHE_END, gpu, "127.0.0.1", 10.0, places, num_sharing=3)
    assert taken == [4] * 4, "both ends of three cache ranks take a third, as NCCL rounds it"
    with ThreadPoolExecutor(4) as pool:
        met = [pool.submit(wire.meet, place) for wire, place in zip(far, places, strict=True)]
        for wire in near:
            wire.meet()
        assert all(each.result() is None for each in met)
    assert [wire.sends for wire in near] == [True, False]
    assert [wire.sends for wire in far] == [False, True]
    out = torch.empty(1, dtype=torch.uint8)
    for sender, receiver, number in ((near[0], far[0], 1), (far[1], near[1], 2)):
        sender.send(torch.tensor([number], dtype=torch.uint8))
        receiver.receive(out)
        assert out.item() == number
    assert open_wires(INFERENCE_END, _CPU, "127.0.0.1", 10.0) == ()
    for device, given in ((gpu, ()), (_CPU, places)):  # a host with GPUs, and one without
        with pytest.raises(ProtocolError, match="places to meet"):
            open_wires(CACHE_END, device, "127.0.0.1", 10.0, given)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 64])
def test_transfers_of_one_gpu_take_no_more_of_it_than_one_alone(count: int) -> None:
    """NCCL rounds up to a power of two."""
    each = most_ctas(count)
    assert each == 1 or count * each <= MOST_CTAS < 2 * (count + 1) * each
    assert each & (each - 1) == 0
    assert each >= 1


def test_abort_ends_a_wait_and_all_that_would_come() -> None:
    _, far = _pair()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(far.receive, torch.empty(1, dtype=torch.uint8))
        far.abort("the epoch is over")
        with pytest.raises(CacheRankLostError, match="the epoch is over"):
            waiting.result(timeout=10.0)
    with pytest.raises(CacheRankLostError, match="the epoch is over"):
        far.send(torch.zeros(1, dtype=torch.uint8))
    far.abort("again")
    assert _num_aborts(far) == 1


def test_who_uses_a_wire_does_not_wait_for_its_abort() -> None:
    """It ends when graphs are dropped that the same thread has to let go of."""
    near, _ = _pair()
    with ThreadPoolExecutor(1) as pool, near._posting:  # as if an abort had begun
        sending = pool.submit(near.send, torch.zeros(1, dtype=torch.uint8))
        near.abort("the epoch is over")
        with pytest.raises(CacheRankLostError, match="the epoch is over"):
            sending.result(timeout=10.0)
    assert _num_aborts(near) == 1


def test_abort_waits_for_no_other() -> None:
    """Freeing one communicator waits for the transfers of all: both are to be under way."""
    near, far = _pair()
    is_other_aborted = threading.Event()
    abort = near._group.abort

    def wait_and_abort() -> None:
        assert is_other_aborted.wait(10.0)
        abort()

    near._group.abort = wait_and_abort
    near.abort("the epoch is over")
    far.abort("the epoch is over")
    assert _num_aborts(far) == 1
    is_other_aborted.set()
    assert _num_aborts(near) == 1


def test_nobody_comes() -> None:
    near = _wire(INFERENCE_END, sends=False, timeout_s=0.2)
    with pytest.raises(CacheRankLostError, match="did not come in time"):
        near.meet()
    assert _num_aborts(near) == 1


@pytest.mark.parametrize("place", [b"", b"0:1", b"0:1=", b"=x"])
def test_a_place_that_is_none(place: bytes) -> None:
    with pytest.raises(ProtocolError, match="none of NCCL's"):
        _wire(CACHE_END, sends=False).meet(place)


def test_a_torch_without_nccl_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_wire._dist, "is_nccl_available", lambda: False)
    with pytest.raises(SettingsError, match="--device cpu"):
        _wire(CACHE_END, sends=False)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.7"])
def test_it_meets_on_the_interface_of_an_address(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _forget_all(monkeypatch)
    assert interface_name(address) == "lo"
    prepare_nccl(address)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


def test_an_interface_with_an_ipv6_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its netmask is written in a way that `ipaddress` does not read, and a scope may follow."""
    one, half = ":".join(["ffff"] * 8), "ffff:ffff:ffff:ffff::"
    hardware = SimpleNamespace(family=socket.AF_PACKET, address="02:fc:00:00:00:01", netmask=None)

    def found(address: str, netmask: str) -> SimpleNamespace:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return SimpleNamespace(family=family, address=address, netmask=netmask)

    interfaces = {
        "lo": [found("127.0.0.1", "255.0.0.0"), found("::1", one), hardware],
        "eth0": [hardware, found("192.0.2.2", "255.255.255.0"), found("fd00::2", half)],
        "eth1": [found("fe80::fc:ff:fe00:1%eth1", half)],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    assert interface_name("::1") == "lo"
    assert interface_name("fd00::2") == "eth0"
    assert interface_name("fe80::fc:ff:fe00:1") == "eth1"
    for other in ("fd00::3", "::2", "192.0.2.3"):  # of the same network, and of another machine
        with pytest.raises(SettingsError, match="none of this machine"):
            interface_name(other)


def _forget_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what `prepare_nccl` sets be unset, now and behind the test."""
    known = nccl_wire._LEFT_TO_US, nccl_wire._UNUSED, nccl_wire._ON_ONE_HOST
    for name in ("NCCL_SOCKET_IFNAME", *(name for names in known for name in names)):
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)


def test_graphs_have_nothing_beside_their_chain_where_no_network_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between two hosts NCCL keeps the order of what these do; a user's own wish stays."""
    name = "NCCL_GRAPH_MIXING_SUPPORT"
    _forget_all(monkeypatch)
    prepare_nccl("127.0.0.1")
    assert os.environ[name] == "0"
    monkeypatch.setenv(name, "1")
    prepare_nccl("127.0.0.1")
    assert os.environ[name] == "1"
    monkeypatch.delenv(name)
    monkeypatch.setattr(nccl_wire, "interface_name", lambda _: "eth0")
    prepare_nccl("192.0.2.1")
    assert name not in os.environ


@pytest.mark.parametrize("call", [interface_name, prepare_nccl])
def test_an_interface_of_another_machine(
    call: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*nccl_wire._LEFT_TO_US, *nccl_wire._UNUSED):
        monkeypatch.setenv(name, "0")
    with pytest.raises(SettingsError, match=r"192\.0\.2\.1"):
        call("192.0.2.1")
