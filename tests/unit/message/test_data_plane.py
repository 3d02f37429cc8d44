# SPDX-License-Identifier: Apache-2.0
"""The data plane between two hosts, its ends in two processes or threads of this one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from descriptors import open_descriptors

from tandemkv.cache_rank.protocol.errors import CacheRankLostError, ProtocolError, SettingsError
from tandemkv.cache_rank.protocol.memory.mapped_tensors import MappedTensors
from tandemkv.cache_rank.protocol.message import data_plane
from tandemkv.cache_rank.protocol.message.closed_port import drop_strangers
from tandemkv.cache_rank.protocol.message.data_plane import (
    CACHE_END,
    INFERENCE_END,
    TOKEN_BYTES,
    DataPlane,
    MeetingPoint,
)
from tandemkv.cache_rank.pump.session import PumpSession

pytestmark = pytest.mark.timeout(60)
_LOOPBACK, _TOKEN = "127.0.0.1", b"t" * TOKEN_BYTES


def _may_filter() -> bool:
    with socket.socket() as listener:
        listener.listen()
        try:
            drop_strangers([listener.fileno()])
        except OSError:
            return False
    return True


def _point(end: int, timeout_s: float = 10.0, interface: str = _LOOPBACK) -> MeetingPoint:
    return MeetingPoint(interface, end, timeout_s=timeout_s, transfer_timeout_s=5.0)


def _points(interfaces: tuple[str, str] = (_LOOPBACK, _LOOPBACK)) -> list[MeetingPoint]:
    return [_point(end, interface=interfaces[end]) for end in (INFERENCE_END, CACHE_END)]


def _meet(ours: MeetingPoint, theirs: MeetingPoint) -> tuple[DataPlane, DataPlane]:
    found: list[DataPlane] = []
    thread = threading.Thread(target=lambda: found.append(theirs.meet(ours.place, _TOKEN)))
    thread.start()
    plane = ours.meet(theirs.place, _TOKEN)
    thread.join()
    return plane, found[0]


def _pair(interfaces: tuple[str, str] = (_LOOPBACK, _LOOPBACK)) -> tuple[DataPlane, DataPlane]:
    return _meet(*_points(interfaces))


def _move(sender: DataPlane, receiver: DataPlane, body: torch.Tensor) -> torch.Tensor:
    """A message is taken by the other end before `send` returns."""
    thread = threading.Thread(target=sender.send, args=(body,))
    thread.start()
    found = receiver.receive()
    thread.join()
    return found


class _Breaking:
    """A pair of gloo's that breaks while it writes a header, of which only the body is told."""

    class Work:
        def __init__(self, tag: int) -> None:
            self._is_header = tag == data_plane._HEADER_TAG

        def wait(self, timeout: timedelta) -> None:
            if self._is_header:
                time.sleep(timeout.total_seconds())
            raise RuntimeError("Connection closed by peer")

    def send(self, _tensors: list[torch.Tensor], _peer: int, tag: int) -> Work:
        return self.Work(tag)

    recv = send


def test_a_send_that_the_pair_breaks_under_ends_at_once() -> None:
    """Who ends the epoch waits for the thread that sends."""
    plane = DataPlane(_Breaking(), CACHE_END, None, timeout_s=30.0)
    begun = time.monotonic()
    with pytest.raises(CacheRankLostError, match="closed by peer"):
        plane.send(torch.ones(1, dtype=torch.uint8))
    assert time.monotonic() - begun < 5.0


class _Stuck:
    """A pair of gloo's that broke in the middle of a message: who waits for it is not told."""

    def __init__(self) -> None:
        self.is_waiting, self.go_on = threading.Event(), threading.Event()

    def wait(self, _: timedelta) -> None:
        self.is_waiting.set()
        assert self.go_on.wait(30)

    def recv(self, _tensors: list[torch.Tensor], _peer: int, tag: int) -> _Stuck:
        if tag == data_plane._NEVER_TAG:
            raise RuntimeError("Connection closed by peer")
        return self


def test_an_epoch_ends_without_who_waits_in_vain() -> None:
    """And what that gets at last is for nobody: the memory is the next epoch's."""
    group, (ours, theirs) = _Stuck(), socket.socketpair()
    plane, taken = DataPlane(group, CACHE_END, None, timeout_s=60.0), list[torch.Tensor]()
    session = PumpSession(1, plane, ours, (MappedTensors(),))
    lanes: Any = SimpleNamespace(abort=lambda _: None, watches=lambda _: (), close=lambda: None)
    session.start(lanes, lambda: taken.append(plane.receive()))
    assert group.is_waiting.wait(10)
    begun = time.monotonic()
    session.close()
    assert time.monotonic() - begun < 10
    assert theirs.recv(1) == b""
    group.go_on.set()
    (thread,) = session._threads
    thread.join(10)
    assert not taken
    assert session.reason == "it was closed"
    theirs.close()


def _bytes(size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def _listening(process: psutil.Process) -> set[tuple[str, int]]:
    found = process.net_connections(kind="tcp")
    return {(x.laddr.ip, x.laddr.port) for x in found if x.status == psutil.CONN_LISTEN}


def test_messages_of_any_size_in_order_both_ways() -> None:
    ours, theirs = _pair()
    bodies = [_bytes(size, seed) for seed, size in enumerate((1, 4096, 3_000_001, 17))]
    for sender, receiver in ((ours, theirs), (theirs, ours)):
        for body in bodies:
            assert torch.equal(_move(sender, receiver, body), body)
    assert ours.bytes_sent == theirs.bytes_received == sum(len(body) for body in bodies)
    ours.close()
    theirs.close()


def test_between_two_addresses_and_nowhere_else() -> None:
    before = _listening(psutil.Process())
    ours, theirs = _pair(("127.0.0.2", "127.0.0.3"))
    assert {host for host, _ in _listening(psutil.Process()) - before} == {"127.0.0.2", "127.0.0.3"}
    assert torch.equal(_move(ours, theirs, _bytes(100, 0)), _bytes(100, 0))
    ours.close()
    theirs.close()


def test_strangers_who_come_before_both_have_met_disturb_nothing() -> None:
    before = _listening(psutil.Process())
    points = _points()
    for address in _listening(psutil.Process()) - before:
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096)):
            with socket.create_connection(address) as stranger:
                stranger.sendall(data)
    ours, theirs = _meet(*points)
    assert torch.equal(_move(ours, theirs, _bytes(5000, 1)), _bytes(5000, 1))
    ours.close()
    theirs.close()


def test_a_kernel_that_takes_no_filter_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(data_plane, "drop_strangers", refuse)
    ours, theirs = _pair()
    assert torch.equal(_move(ours, theirs, _bytes(100, 1)), _bytes(100, 1))
    assert "stays open to strangers" in caplog.text
    ours.close()
    theirs.close()


@pytest.mark.skipif(not _may_filter(), reason="this kernel takes no filter from this process")
def test_once_both_have_met_nobody_else_gets_a_descriptor() -> None:
    process = psutil.Process()
    before = _listening(process)
    ours, theirs = _pair()
    addresses = _listening(process) - before
    assert len(addresses) == 2
    held = open_descriptors()
    for address in addresses:
        for _ in range(20):
            with socket.socket() as stranger:
                stranger.settimeout(0.01)
                with pytest.raises(TimeoutError):
                    stranger.connect(address)
    assert open_descriptors() == held
    assert torch.equal(_move(ours, theirs, _bytes(3_000_000, 1)), _bytes(3_000_000, 1))
    ours.close()
    theirs.close()


def test_abort_ends_a_wait_at_once() -> None:
    ours, theirs = _pair()
    found: list[Exception] = []

    def wait() -> None:
        try:
            theirs.receive()
        except CacheRankLostError as error:
            found.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    broken: list[str] = []

    def fail(reason: str) -> None:
        raise RuntimeError(reason)

    theirs.breaks_with += [fail, broken.append]
    theirs.abort("no heartbeat")
    theirs.abort("again")
    thread.join(5.0)
    assert broken == ["no heartbeat"]
    assert not thread.is_alive()
    assert "no heartbeat" in str(found[0])
    with pytest.raises(CacheRankLostError, match="no heartbeat"):
        theirs.send(_bytes(1, 0))
    with pytest.raises(CacheRankLostError, match="gone"):
        ours.receive()


def test_a_header_out_of_order_is_refused() -> None:
    ours, theirs = _pair()
    ours._sent[1] = 7  # as if messages had been lost

    def send() -> None:
        with contextlib.suppress(CacheRankLostError):
            ours.send(_bytes(9, 0))

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(ProtocolError, match="message 8 of 9 bytes"):
        theirs.receive()
    sender.join()


@pytest.mark.parametrize("size", [0, (64 << 20) + 1])
def test_bodies_out_of_bounds_are_not_sent(size: int) -> None:
    ours, theirs = _pair()
    with pytest.raises(ValueError, match="at most"):
        ours.send(torch.empty(size, dtype=torch.uint8))
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    ("interface", "said"),
    [("0.0.0.0", "every interface"), ("192.0.2.1", "address of this machine"), ("eth0", "IP")],
)
def test_the_interface_must_be_one_of_this_machine(interface: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        _point(INFERENCE_END, interface=interface)


def test_nobody_comes() -> None:
    other = _point(CACHE_END, timeout_s=0.1)
    place = other.place
    other._thread.join()  # it has given up
    point = _point(INFERENCE_END, timeout_s=1.0)
    with pytest.raises(CacheRankLostError, match="do not meet"):
        point.meet(place, _TOKEN)


def test_another_end_than_the_one_that_was_told() -> None:
    ours, theirs = _point(INFERENCE_END), _point(CACHE_END)
    found: list[Exception] = []

    def meet() -> None:
        try:
            theirs.meet(ours.place, b"x" * TOKEN_BYTES)
        except ProtocolError as error:
            found.append(error)

    thread = threading.Thread(target=meet)
    thread.start()
    with pytest.raises(ProtocolError, match="another end was met"):
        ours.meet(theirs.place, _TOKEN)
    thread.join()
    assert "another end" in str(found[0])


@pytest.mark.parametrize("place", [b"", b"x" * 170, b"\0" * 9])
def test_a_place_that_is_none(place: bytes) -> None:
    point = _point(INFERENCE_END, timeout_s=1.0)
    with pytest.raises(ProtocolError, match="none of this version"):
        point.meet(place, _TOKEN)
    point.close()


_OTHER_END = f"""
import os, signal, sys
from tandemkv.cache_rank.protocol.message.data_plane import CACHE_END, MeetingPoint
point = MeetingPoint("{_LOOPBACK}", CACHE_END, timeout_s=30, transfer_timeout_s=5)
print(point.place.hex(), flush=True)
plane = point.meet(bytes.fromhex(sys.stdin.readline()), {_TOKEN!r})
plane.receive()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_is_noticed_at_once() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _OTHER_END],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    place = bytes.fromhex(process.stdout.readline())
    point = _point(INFERENCE_END, timeout_s=30.0)
    process.stdin.write(f"{point.place.hex()}\n")
    process.stdin.flush()
    plane = point.meet(place, _TOKEN)
    plane.send(_bytes(8, 0))
    started = time.monotonic()
    with pytest.raises(CacheRankLostError, match="gone"):
        plane.receive()
    assert time.monotonic() - started < 10
    assert process.wait() == -signal.SIGKILL
