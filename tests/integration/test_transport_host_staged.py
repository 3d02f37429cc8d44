# SPDX-License-Identifier: Apache-2.0
"""Tensors of one device over a data plane that moves host memory, against a plain end of it.

On a CPU everything is staged as well; copies are made at once there, and no stream is involved.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tandemkv.cache_rank.protocol.connect import connect_transport
from tandemkv.cache_rank.protocol.errors import TransferAbortedError
from tandemkv.cache_rank.protocol.fake_transport import fake_pair
from tandemkv.cache_rank.protocol.gloo_transport import GlooTransport, connect_gloo
from tandemkv.cache_rank.protocol.host_staged import HostStagedTransport
from tandemkv.cache_rank.protocol.transport import Transport, Work
from tandemkv.kernels.placing import SideReader

Ends = tuple[HostStagedTransport, GlooTransport]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
_SLEEP_CYCLES = 200_000_000  # a tenth of a second, about

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=[CPU, pytest.param(CUDA, marks=pytest.mark.gpu)], ids=str)
def device(request: pytest.FixtureRequest) -> torch.device:
    found: torch.device = request.param
    return found


@pytest.fixture
def ends(tmp_path: Path, device: torch.device) -> Iterator[Ends]:
    """The rank with `device` and its peer, both in this process."""
    made: dict[int, GlooTransport] = {}

    def connect(rank: int) -> None:
        made[rank] = connect_gloo(tmp_path / "store-1", rank=rank, timeout_s=5.0)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield HostStagedTransport(made[0], device), made[1]
    for end in made.values():
        end.close()


def _await_arrival(work: Work) -> None:
    """Return once the transfer is complete, without waiting for it in the sense of `wait`."""
    deadline = time.monotonic() + 5.0
    while not work.is_done() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert work.is_done()


def test_is_a_transport(ends: Ends) -> None:
    same: tuple[Transport, Transport] = ends
    assert len(same) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32, torch.uint8])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 70_000)], ids=str)
def test_what_is_sent_arrives_both_ways(
    ends: Ends, device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    staged, plain = ends
    data = (torch.randn(shape) * 50).abs().to(dtype)
    there, back = torch.zeros_like(data), torch.zeros_like(data, device=device)
    recv = plain.issue_recv(there)
    assert staged.issue_send(data.to(device)).wait()
    assert recv.wait()
    assert torch.equal(there, data)
    recv = staged.issue_recv(back)
    plain.issue_send(there)
    assert recv.wait()
    assert recv.is_done()
    assert torch.equal(back.cpu(), data)
    assert staged.bytes_received == staged.bytes_sent == data.nbytes


def test_transfers_of_one_direction_keep_their_order(ends: Ends, device: torch.device) -> None:
    staged, plain = ends
    outs = [torch.zeros(2, device=device) for _ in range(20)]
    works = [staged.issue_recv(out) for out in outs]
    for n in range(20):
        plain.issue_send(torch.full((2,), float(n)))
    assert all(work.wait() for work in reversed(works))
    assert [out.tolist() for out in outs] == [[n, n] for n in range(20)]


def test_what_nobody_waits_for_is_not_written(ends: Ends, device: torch.device) -> None:
    staged, plain = ends
    out = torch.full((4,), 7.0, device=device)
    recv = staged.issue_recv(out)
    assert not recv.is_done()
    assert not recv.wait(0.0)
    assert not recv.wait(0.05)
    plain.issue_send(torch.ones(4))
    _await_arrival(recv)
    assert recv.wait(5.0), "a wait that gave up leaves the transfer valid"
    assert out.tolist() == [1, 1, 1, 1]

    out.fill_(7.0)
    unread = staged.issue_recv(out)
    plain.issue_send(torch.ones(4))
    _await_arrival(unread)
    assert out.tolist() == [7, 7, 7, 7]


def test_it_is_written_once_however_often_it_is_waited_for(
    ends: Ends, device: torch.device
) -> None:
    staged, plain = ends
    out = torch.zeros(4, device=device)
    recv = staged.issue_recv(out)
    waits: list[bool] = []
    threads = [threading.Thread(target=lambda: waits.append(recv.wait(5.0))) for _ in range(4)]
    for thread in threads:
        thread.start()
    plain.issue_send(torch.ones(4))
    for thread in threads:
        thread.join()
    assert waits == [True] * 4
    assert out.tolist() == [1, 1, 1, 1]
    out.fill_(2.0)
    assert recv.wait()
    assert recv.wait(0.0)
    assert recv.is_done()
    assert out.tolist() == [2, 2, 2, 2]


def test_a_tensor_may_be_written_to_once_its_send_is_issued(device: torch.device) -> None:
    """The pair in memory reads what was sent when the receive comes, not before."""
    ours, theirs = fake_pair()
    data, there = torch.ones(4, device=device), torch.zeros(4)
    send = HostStagedTransport(ours, device).issue_send(data)
    data.zero_()
    assert theirs.issue_recv(there).wait(5.0)
    assert send.wait(5.0)
    assert there.tolist() == [1, 1, 1, 1]


def test_empty_transfers_are_done_and_match_nothing(ends: Ends, device: torch.device) -> None:
    staged, plain = ends
    nothing = torch.empty(0, 4, device=device)
    assert staged.issue_send(nothing).wait()
    assert staged.issue_recv(nothing).wait()
    out = torch.zeros(2, device=device)
    recv = staged.issue_recv(out)
    plain.issue_send(torch.ones(2))
    assert recv.wait()
    assert out.tolist() == [1, 1]


def test_refuses_what_it_cannot_move(ends: Ends, device: torch.device) -> None:
    staged, _ = ends
    square = torch.zeros(4, 4, device=device)
    for tensor in (square.T, square[:, ::2]):
        for issue in (staged.issue_send, staged.issue_recv):
            with pytest.raises(ValueError, match=r"float32.*only contiguous tensors are staged"):
                issue(tensor)
    with pytest.raises(ValueError, match="contiguous CPU"):
        staged.issue_send(torch.zeros(3, device="meta"))


def test_what_is_elsewhere_is_handed_on_as_it_is() -> None:
    ours, theirs = fake_pair()
    staged = HostStagedTransport(ours, torch.device("meta"))
    data, out = torch.zeros(2), torch.zeros(2)
    staged.issue_send(data)
    data.fill_(3.0)
    there = torch.zeros(2)
    assert theirs.issue_recv(there).wait(5.0)
    assert there.tolist() == [3, 3], "it was copied"
    recv = staged.issue_recv(out)
    theirs.issue_send(torch.ones(2))
    assert recv.is_done()
    assert out.tolist() == [1, 1]


@pytest.mark.parametrize("breaker", ["abort", "close", "peer"])
def test_a_broken_pair_is_told_to_everybody_who_waits(
    ends: Ends, device: torch.device, breaker: str
) -> None:
    staged, plain = ends
    out = torch.full((4,), 7.0, device=device)
    recv = staged.issue_recv(out)
    assert not recv.wait(0.0)
    {"abort": staged.abort, "close": staged.close, "peer": plain.abort}[breaker]()
    for _ in range(2):
        with pytest.raises(TransferAbortedError):
            recv.wait(5.0)
    assert recv.is_done()
    with pytest.raises(TransferAbortedError):
        staged.issue_send(out).wait(5.0)
    assert out.tolist() == [7, 7, 7, 7]
    staged.close()
    staged.close()


def test_close_leaves_nothing(ends: Ends, device: torch.device, tmp_path: Path) -> None:
    staged, plain = ends
    recv = plain.issue_recv(torch.zeros(4))
    staged.issue_send(torch.ones(4, device=device)).wait()
    recv.wait()
    staged.close()
    plain.close()
    assert list(tmp_path.iterdir()) == []
    assert not [t for t in threading.enumerate() if t.name.startswith("gloo-")]


@pytest.mark.gpu
@pytest.mark.parametrize("device", [CUDA], indirect=True, ids=str)
def test_a_send_waits_for_what_is_computed(ends: Ends, device: torch.device) -> None:
    staged, plain = ends
    data, there = torch.zeros(1 << 20, device=device), torch.zeros(1 << 20)
    recv = plain.issue_recv(there)
    torch.cuda._sleep(_SLEEP_CYCLES)
    data += 1
    staged.issue_send(data)
    data += 1
    assert recv.wait()
    assert torch.equal(there, torch.ones(1 << 20))


@pytest.mark.gpu
@pytest.mark.parametrize("device", [CUDA], indirect=True, ids=str)
def test_what_came_is_in_place_for_every_stream(ends: Ends, device: torch.device) -> None:
    """Headers of packs are read past the stream that the layers are computed on."""
    staged, plain = ends
    reader = SideReader(device)
    out = torch.zeros(64, device=device)
    torch.cuda.synchronize()
    recv = staged.issue_recv(out)
    torch.cuda._sleep(_SLEEP_CYCLES)
    plain.issue_send(torch.ones(64))
    assert recv.wait()
    assert reader.read(out).tolist() == [1.0] * 64
    assert not torch.cuda.current_stream().query(), "it waited for the layer under way"


@pytest.mark.gpu
@pytest.mark.parametrize("device", [CUDA], indirect=True, ids=str)
def test_memory_that_is_still_read_is_not_written(ends: Ends, device: torch.device) -> None:
    """The allocator gives memory out again as soon as its last reader is queued."""
    staged, plain = ends
    size = 1 << 20
    kept = torch.zeros(size, device=device)
    before = torch.full((size,), 5.0, device=device)
    address = before.data_ptr()
    torch.cuda._sleep(_SLEEP_CYCLES)
    kept.copy_(before)
    del before
    out = torch.empty(size, device=device)
    assert out.data_ptr() == address, "the allocator did not reuse it: nothing is tested"
    recv = staged.issue_recv(out)
    plain.issue_send(torch.ones(size))
    assert recv.wait()
    assert torch.equal(kept.cpu(), torch.full((size,), 5.0))
    assert torch.equal(out.cpu(), torch.ones(size))


@pytest.mark.gpu
def test_gloo_on_a_gpu_is_staged(tmp_path: Path) -> None:
    made: dict[str, Transport] = {}

    def connect(rank: int, device: torch.device) -> None:
        made[device.type] = connect_transport(
            "gloo", tmp_path / "store-1", rank=rank, timeout_s=5.0, device=device
        )

    threads = [threading.Thread(target=connect, args=(i, d)) for i, d in enumerate((CUDA, CPU))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    out = torch.zeros(3, device=CUDA)
    recv = made["cuda"].issue_recv(out)
    made["cpu"].issue_send(torch.ones(3))
    assert recv.wait()
    assert out.tolist() == [1, 1, 1]
    for end in made.values():
        end.close()
