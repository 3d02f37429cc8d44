# SPDX-License-Identifier: Apache-2.0
"""The NCCL transport between two processes with a GPU each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from tandemkv.cache_rank.protocol.errors import (
    CacheRankLostError,
    TransferAbortedError,
    TransferTimeoutError,
)
from tandemkv.cache_rank.protocol.nccl_lane import NcclLane, NcclWork
from tandemkv.cache_rank.protocol.nccl_transport import NcclTransport, connect_nccl

PEER = Path(__file__).with_name("nccl_peer.py")


class Pair:
    """This process on the first GPU, a peer on the second."""

    def __init__(self, store: Path, scenario: str, timeout_s: float = 30.0) -> None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible[1]}
        self.process = subprocess.Popen(
            [sys.executable, str(PEER), str(store), str(timeout_s), scenario],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        torch.cuda.set_device(0)
        self.transport: NcclTransport = connect_nccl(store, rank=0, timeout_s=timeout_s)

    def end(self) -> None:
        self.transport.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def pairs(tmp_path: Path) -> Iterator[list[Pair]]:
    made: list[Pair] = []
    yield made
    for pair in made:
        pair.end()


@pytest.mark.multi_gpu(2)
@pytest.mark.timeout(120)
def test_sizes_both_ways(pairs: list[Pair], tmp_path: Path) -> None:
    pairs.append(pair := Pair(tmp_path / "store-1", "echo"))
    transport, total = pair.transport, 0
    for size in (1, 3, 4096, 1 << 20, (8 << 20) + 5):
        data = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
        back = torch.empty_like(data)
        transport.issue_send(torch.tensor([size], device="cuda"))
        transport.issue_send(data)
        assert transport.issue_recv(back).wait()
        assert torch.equal(back, data)
        total += size
    assert transport.bytes_received == total
    assert transport.bytes_sent == total + 5 * 8
    transport.issue_send(torch.tensor([0], device="cuda"))
    assert pair.process.stdout is not None
    assert pair.process.stdout.read().split() == ["connected", "ok"]


@pytest.mark.multi_gpu(2)
@pytest.mark.timeout(120)
def test_receives_finish_in_order_though_only_the_last_is_waited_for(
    pairs: list[Pair], tmp_path: Path
) -> None:
    pairs.append(pair := Pair(tmp_path / "store-1", "forget"))
    outs = [torch.empty(1 + n % 3, device="cuda") for n in range(40)]
    works = [pair.transport.issue_recv(out) for out in outs]
    assert works[-1].wait()
    assert all(work.is_done() for work in works)
    assert [float(out[0]) for out in outs] == [float(n) for n in range(40)]


@pytest.mark.multi_gpu(2)
@pytest.mark.timeout(120)
def test_a_bounded_wait_leaves_the_transfer_valid(pairs: list[Pair], tmp_path: Path) -> None:
    pairs.append(pair := Pair(tmp_path / "store-1", "late"))
    out = torch.zeros(4, dtype=torch.uint8, device="cuda")
    work = pair.transport.issue_recv(out)
    assert not work.wait(0.1)
    assert work.wait()
    assert out.tolist() == [1, 1, 1, 1]


@pytest.mark.multi_gpu(2)
@pytest.mark.timeout(120)
def test_a_dead_peer_is_survived_and_replaced(pairs: list[Pair], tmp_path: Path) -> None:
    pairs.append(pair := Pair(tmp_path / "store-1", "silent"))
    work = pair.transport.issue_recv(torch.empty(1 << 20, device="cuda"))
    assert not work.wait(0.05)
    pair.process.send_signal(signal.SIGKILL)
    pair.process.wait()
    assert not work.wait(0.5), "NCCL does not tell; should it, the heartbeat is not needed"
    pair.transport.abort()
    with pytest.raises(TransferAbortedError):
        work.wait()
    with pytest.raises(TransferAbortedError):
        pair.transport.issue_send(torch.ones(1, device="cuda")).wait()
    assert float((torch.ones(1 << 20, device="cuda") * 3).sum()) == 3 << 20
    pairs.append(again := Pair(tmp_path / "store-2", "late"))
    assert again.transport.issue_recv(torch.empty(4, dtype=torch.uint8, device="cuda")).wait()


@pytest.mark.multi_gpu(2)
@pytest.mark.timeout(120)
def test_an_overdue_transfer_breaks_the_pair(pairs: list[Pair], tmp_path: Path) -> None:
    pairs.append(pair := Pair(tmp_path / "store-1", "silent", timeout_s=20.0))
    pair.transport._recvs._timeout_s = 0.5
    with pytest.raises(TransferTimeoutError, match="transfer_timeout_s"):
        pair.transport.issue_recv(torch.empty(8, device="cuda")).wait()
    with pytest.raises(TransferAbortedError):
        pair.transport.issue_recv(torch.empty(8, device="cuda")).wait()


@pytest.mark.multi_gpu(2)
@pytest.mark.timeout(120)
def test_nothing_listens_beyond_loopback(pairs: list[Pair], tmp_path: Path) -> None:
    before = listening_elsewhere()
    pairs.append(Pair(tmp_path / "store-1", "silent"))
    assert listening_elsewhere() <= before


@pytest.mark.gpu
@pytest.mark.timeout(60)
def test_nobody_comes(tmp_path: Path) -> None:
    with pytest.raises(CacheRankLostError, match="no data plane"):
        connect_nccl(tmp_path / "store-1", rank=0, timeout_s=5.0, connect_timeout_s=2.0)


def listening_elsewhere() -> set[str]:
    """Local addresses (hex) of TCP listeners that are not on loopback."""
    found = set()
    for name, loopback in (("tcp", "0100007F"), ("tcp6", "00000000000000000000000001000000")):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state = line.split()[:4]
            if state == "0A" and local.split(":")[0] != loopback:
                found.add(f"{name} {local}")
    return found


class ScriptedMark:
    """Stands in for an event behind an operation on the GPU."""

    def __init__(self) -> None:
        self.is_finished = False

    def query(self) -> bool:
        return self.is_finished


class ScriptedLane(NcclLane):
    """Posts to a list instead of a GPU."""

    posted: list[ScriptedMark]

    def _post_one(self, work: NcclWork) -> ScriptedMark:
        self.posted.append(ScriptedMark())
        return self.posted[-1]


class Script:
    """A lane on the CPU whose operations end when the test says so."""

    def __init__(self, *, posts_at_once: bool, timeout_s: float = 5.0) -> None:
        self.errors: list[Exception] = []
        self.lane = ScriptedLane(
            self.never, torch.device("cpu"), timeout_s, self.on_error, posts_at_once=posts_at_once
        )
        self.posted = self.lane.posted = []

    def never(self, tensor: torch.Tensor) -> NoReturn:
        raise AssertionError(tensor.shape)

    def on_error(self, error: Exception) -> None:
        self.errors.append(error)
        self.lane.fail(error)


def test_a_send_is_posted_when_issued_and_a_receive_when_waited_for() -> None:
    sends, recvs = Script(posts_at_once=True), Script(posts_at_once=False)
    sends.lane.issue(torch.ones(1))
    assert len(sends.posted) == 1
    works = [recvs.lane.issue(torch.ones(n)) for n in (1, 2, 3)]
    assert not recvs.posted
    assert not works[1].wait(0)
    assert len(recvs.posted) == 2, "the earlier one first, the later one not yet"
    for operation in recvs.posted:
        operation.is_finished = True
    assert works[1].wait()
    assert works[0].is_done()
    assert recvs.lane.num_bytes == 4 + 8
    assert not recvs.lane.is_idle
    assert not sends.lane.is_idle


def test_an_aborted_transfer_is_no_finished_one() -> None:
    script = Script(posts_at_once=True)
    done, aborted = (script.lane.issue(torch.ones(1)) for _ in range(2))
    script.posted[0].is_finished = True
    assert done.wait()
    script.lane.fail(TransferAbortedError("the transport was aborted"))
    script.posted[1].is_finished = True  # as an aborted kernel is
    with pytest.raises(TransferAbortedError, match="aborted"):
        aborted.wait()
    assert aborted.is_done()
    assert done.wait(), "what was there stays there"
    with pytest.raises(TransferAbortedError):
        script.lane.issue(torch.ones(1)).wait()
    assert script.lane.issue(torch.ones(0)).wait()


def test_an_overdue_wait_breaks_both_lanes() -> None:
    script = Script(posts_at_once=False, timeout_s=0.05)
    with pytest.raises(TransferTimeoutError, match=r"4 bytes .* transfer_timeout_s=0\.05"):
        script.lane.issue(torch.ones(1)).wait()
    assert isinstance(script.errors[0], TransferAbortedError)


def test_only_tensors_of_the_device_travel() -> None:
    lane = Script(posts_at_once=True).lane
    with pytest.raises(ValueError, match="contiguous"):
        lane.issue(torch.ones(2, 2).t())
    with pytest.raises(ValueError, match="on meta"):
        lane.issue(torch.ones(1, device="meta"))
