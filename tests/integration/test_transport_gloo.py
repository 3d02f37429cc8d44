# SPDX-License-Identifier: Apache-2.0
"""A gloo pair of two processes: what it carries, and what happens when one of them fails."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tandemkv.cache_rank.protocol.errors import (
    CacheRankLostError,
    TransferAbortedError,
    TransferTimeoutError,
)
from tandemkv.cache_rank.protocol.gloo_transport import GlooTransport, connect_gloo
from tandemkv.cache_rank.protocol.transport import Transport, Work

pytestmark = pytest.mark.timeout(60)


class Peer:
    """The other process and our end of the pair."""

    def __init__(self, store: Path, scenario: str, timeout_s: float) -> None:
        script = Path(__file__).parent / "transport_peer.py"
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(script), str(store), str(timeout_s), scenario],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.store = store
        self.transport = connect_gloo(store, rank=0, timeout_s=timeout_s)
        assert self._line() == "connected\n"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def finish(self) -> None:
        """The scenario went well and the process ends."""
        assert self._line() == "ok\n"
        assert self.process.wait(10) == 0

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.transport.close()


Meet = Callable[..., Peer]


@pytest.fixture
def meet(tmp_path: Path) -> Iterator[Meet]:
    peers: list[Peer] = []

    def make(scenario: str, timeout_s: float = 20.0) -> Peer:
        peers.append(Peer(tmp_path / f"store-{len(peers)}", scenario, timeout_s))
        return peers[-1]

    yield make
    for peer in peers:
        peer.end()


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[GlooTransport, GlooTransport]]:
    """Both ends in this process: enough where no process needs to fail."""
    made: dict[int, GlooTransport] = {}

    def connect(rank: int) -> None:
        made[rank] = connect_gloo(tmp_path / "store-1", rank=rank, timeout_s=5.0)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield made[0], made[1]
    for end in made.values():
        end.close()


def _fails(work: Work, error: type[Exception], within_s: float) -> None:
    start = time.monotonic()
    with pytest.raises(error):
        work.wait()
    assert time.monotonic() - start < within_s


def test_is_a_transport(ends: tuple[GlooTransport, GlooTransport]) -> None:
    same: tuple[Transport, Transport] = ends
    assert len(same) == 2


def test_echo_of_many_sizes(meet: Meet) -> None:
    peer = meet("echo")
    generator = torch.Generator().manual_seed(0)
    total = 0
    for size in (1, 3, 4096, 65_537, 10_000_000, 1):
        data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        back = torch.zeros_like(data)
        works = [
            peer.transport.issue_send(torch.tensor([size])),
            peer.transport.issue_send(data),
            peer.transport.issue_recv(back),
        ]
        assert all(work.wait() for work in reversed(works))
        assert torch.equal(data, back)
        total += size
    assert peer.transport.bytes_received == total
    assert peer.transport.bytes_sent == total + 6 * 8
    assert peer.transport.issue_send(torch.tensor([0])).wait()
    peer.finish()


def test_ping_pong(meet: Meet, record_property: Callable[[str, object], None]) -> None:
    peer = meet("ping_pong")
    data, times_us = torch.zeros(4096, dtype=torch.uint8), []
    for _ in range(330):
        start = time.perf_counter()
        recv = peer.transport.issue_recv(data)
        peer.transport.issue_send(data)
        recv.wait()
        times_us.append((time.perf_counter() - start) * 1e6)
    record_property("round_trip_us", statistics.median(times_us))
    peer.finish()


def test_bounded_wait_harms_nothing(meet: Meet) -> None:
    peer = meet("late")
    out = torch.zeros(4, dtype=torch.uint8)
    recv = peer.transport.issue_recv(out)
    assert not recv.is_done()
    assert not recv.wait(0.05)
    assert not recv.wait(0.0)
    assert recv.wait(5.0)
    assert out.tolist() == [1, 1, 1, 1]
    recv = peer.transport.issue_recv(out)
    deadline = time.monotonic() + 5.0
    while not recv.is_done() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert recv.wait()
    peer.finish()


def test_order_and_sends_nobody_waits_for(meet: Meet) -> None:
    peer = meet("forget")
    time.sleep(0.1)
    outs = [torch.zeros(1 + n % 3) for n in range(40)]
    works = [peer.transport.issue_recv(out) for out in outs]
    assert works[20].wait()
    assert all(work.is_done() for work in works[:20])
    assert works[-1].wait(5.0)
    assert [int(out[0]) for out in outs] == list(range(40))
    peer.finish()


def test_killed_peer_is_noticed_at_once(meet: Meet) -> None:
    peer = meet("silent")
    recv, bounded = (peer.transport.issue_recv(torch.empty(8)) for _ in range(2))
    threading.Timer(0.2, peer.process.kill).start()
    with pytest.raises(TransferAbortedError, match="gone"):
        bounded.wait(10.0)
    _fails(recv, TransferAbortedError, 0.1)
    _fails(peer.transport.issue_send(torch.empty(8)), TransferAbortedError, 0.1)
    start = time.monotonic()
    peer.transport.close()
    assert time.monotonic() - start < 1.0


def test_killed_peer_wakes_an_unbounded_wait(meet: Meet) -> None:
    peer = meet("silent")
    recv = peer.transport.issue_recv(torch.empty(8))
    threading.Timer(0.2, peer.process.kill).start()
    _fails(recv, TransferAbortedError, 2.0)


def test_stopped_peer_then_abort(meet: Meet) -> None:
    peer = meet("silent")
    peer.process.send_signal(signal.SIGSTOP)
    transport = peer.transport
    big = torch.zeros(20_000_000, dtype=torch.uint8)
    recv, send = transport.issue_recv(torch.empty(8)), transport.issue_send(big)
    assert not recv.wait(0.2)
    assert not send.wait(0.2)
    errors: list[tuple[str, float]] = []

    def wait(work: Work, timeout_s: float | None) -> None:
        try:
            work.wait(timeout_s)
        except TransferAbortedError as error:
            errors.append((str(error), time.monotonic()))

    second = transport.issue_recv(torch.empty(3))
    waits = [(recv, None), (recv, 10.0), (send, None), (send, 10.0), (second, None)]
    threads = [threading.Thread(target=wait, args=each) for each in waits]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    start = time.monotonic()
    transport.abort()
    assert time.monotonic() - start < 0.2
    for thread in threads:
        thread.join(5.0)
    assert [text for text, _ in errors] == ["the transport was aborted"] * 5
    assert max(at for _, at in errors) - start < 1.0
    _fails(transport.issue_send(torch.empty(1)), TransferAbortedError, 0.1)
    transport.abort()
    transport.close()
    assert time.monotonic() - start < 2.0
    assert {t.name for t in threading.enumerate() if t.name.startswith("gloo-")} == set()


def test_abort_frees_the_threads_that_wait_in_gloo(meet: Meet) -> None:
    """The process group's own abort would not reach them."""
    peer = meet("silent")
    peer.process.send_signal(signal.SIGSTOP)
    recv = peer.transport.issue_recv(torch.empty(8))
    threading.Timer(0.2, peer.transport.abort).start()
    _fails(recv, TransferAbortedError, 1.2)
    deadline = time.monotonic() + 1.0
    while not peer.transport._recvs.is_idle and time.monotonic() < deadline:
        time.sleep(0.01)
    assert peer.transport._recvs.is_idle


def test_abort_reaches_the_other_side(meet: Meet) -> None:
    peer = meet("aborted")
    time.sleep(0.2)
    peer.transport.issue_recv(torch.empty(1))
    peer.transport.abort()
    peer.finish()


def test_own_timeout(meet: Meet) -> None:
    peer = meet("silent", timeout_s=0.5)
    recv, later = (peer.transport.issue_recv(torch.empty(8)) for _ in range(2))
    start = time.monotonic()
    with pytest.raises(TransferTimeoutError, match=r"transfer_timeout_s=0\.5"):
        recv.wait()
    assert 0.4 < time.monotonic() - start < 2.0
    _fails(later, TransferAbortedError, 0.2)


def test_sizes_that_disagree_time_out_instead_of_killing_the_process(
    ends: tuple[GlooTransport, GlooTransport],
) -> None:
    small = ends[1].issue_recv(torch.empty(1))
    ends[0].issue_send(torch.zeros(100))
    assert not small.wait(0.3)
    ends[0].abort()
    with pytest.raises(TransferAbortedError):
        small.wait()


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.bool, torch.int8, torch.int64, torch.uint16]
)
def test_dtypes(ends: tuple[GlooTransport, GlooTransport], dtype: torch.dtype) -> None:
    data = (torch.arange(12) % 2).reshape(3, 4).to(dtype)
    out = torch.zeros_like(data)
    recv = ends[1].issue_recv(out)
    assert ends[0].issue_send(data).wait()
    assert recv.wait()
    assert torch.equal(data, out)


def test_empty_transfers_are_done_and_match_nothing(
    ends: tuple[GlooTransport, GlooTransport],
) -> None:
    assert ends[0].issue_send(torch.empty(0, 4)).wait()
    out = torch.zeros(2)
    recv = ends[1].issue_recv(out)
    ends[0].issue_send(torch.ones(2))
    assert recv.wait()
    assert out.tolist() == [1, 1]


def test_refuses_what_gloo_cannot_move(ends: tuple[GlooTransport, GlooTransport]) -> None:
    for tensor in (torch.zeros(4, 4).T, torch.zeros(8)[::2], torch.zeros(3, device="meta")):
        for issue in (ends[0].issue_send, ends[0].issue_recv):
            with pytest.raises(ValueError, match="contiguous CPU"):
                issue(tensor)


def test_close_is_idempotent_and_leaves_nothing(
    ends: tuple[GlooTransport, GlooTransport], tmp_path: Path
) -> None:
    out = torch.zeros(4)
    recv = ends[1].issue_recv(out)
    ends[0].issue_send(torch.ones(4)).wait()
    recv.wait()
    for _ in range(2):
        for end in ends:
            end.close()
    assert list(tmp_path.iterdir()) == []
    assert not [t for t in threading.enumerate() if t.name.startswith("gloo-")]
    with pytest.raises(TransferAbortedError, match="closed"):
        ends[0].issue_send(torch.ones(4)).wait()


def test_nobody_comes(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(CacheRankLostError, match="no data plane within"):
        connect_gloo(tmp_path / "store-1", rank=0, timeout_s=5.0, connect_timeout_s=0.5)
    assert time.monotonic() - start < 3.0
    assert list(tmp_path.iterdir()) == []


def test_other_threads_run_while_we_wait_for_the_other_rank(tmp_path: Path) -> None:
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.02):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    with pytest.raises(CacheRankLostError):
        connect_gloo(tmp_path / "store-1", rank=0, timeout_s=5.0, connect_timeout_s=0.6)
    done.set()
    thread.join()
    assert len(ticks) > 10


def _listeners(pid: int) -> list[str]:
    """Local addresses, in hex, on which `pid` listens for TCP."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/net/{table}")
        if path.exists():
            for line in path.read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    found.append(fields[1].split(":")[0])
    return found


def test_only_loopback_listens(meet: Meet) -> None:
    before = _listeners(os.getpid())
    peer = meet("silent")
    theirs = _listeners(peer.process.pid)
    ours = _listeners(os.getpid())
    loopback = {"0100007F", "00000000000000000000000001000000"}
    assert len(theirs) == 1
    assert set(theirs) <= loopback
    assert len(ours) <= len(before) + 1
    assert set(ours) - set(before) <= loopback
    peer.transport.close()
    assert sorted(_listeners(os.getpid())) == sorted(before)
