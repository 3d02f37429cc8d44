# SPDX-License-Identifier: Apache-2.0
"""The fake keeps the promises of a transport, and breaks them on demand only."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tandemkv.cache_rank.protocol.errors import (
    ProtocolError,
    TransferAbortedError,
    TransferTimeoutError,
)
from tandemkv.cache_rank.protocol.fake_transport import fake_pair
from tandemkv.cache_rank.protocol.transport import Transport


def test_is_a_transport() -> None:
    ends: tuple[Transport, Transport] = fake_pair()
    assert len(ends) == 2


def test_both_directions_in_order() -> None:
    a, b = fake_pair()
    outs = [torch.empty(3) for _ in range(5)]
    recvs = [b.issue_recv(out) for out in outs]
    sends = [a.issue_send(torch.full((3,), float(n))) for n in range(5)]
    assert all(work.wait() for work in (*sends, *recvs))
    assert [int(out[0]) for out in outs] == [0, 1, 2, 3, 4]
    back = torch.empty(2, dtype=torch.int32)
    b.issue_send(torch.tensor([1, 2], dtype=torch.int32))
    assert a.issue_recv(back).wait()
    assert back.tolist() == [1, 2]
    assert (a.bytes_sent, b.bytes_received, a.bytes_received) == (60, 60, 8)


def test_shapes_may_differ_sizes_may_not() -> None:
    a, b = fake_pair()
    out = torch.empty(2, 3)
    a.issue_send(torch.arange(6.0))
    assert b.issue_recv(out).wait()
    assert out.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("other", [torch.empty(4), torch.empty(3, dtype=torch.int32)])
def test_mismatch_fails_both_ends(other: torch.Tensor) -> None:
    a, b = fake_pair()
    send, recv = a.issue_send(torch.zeros(3)), b.issue_recv(other)
    for work in (send, recv, a.issue_send(torch.zeros(1))):
        with pytest.raises(ProtocolError, match="float32"):
            work.wait()


def test_empty_transfers_are_done_at_once_and_match_nothing() -> None:
    a, b = fake_pair()
    assert a.issue_send(torch.empty(0)).wait()
    out = torch.empty(1)
    recv = b.issue_recv(out)
    assert not recv.is_done()
    a.issue_send(torch.ones(1))
    assert recv.is_done()


def test_wait_gives_up_and_may_be_repeated() -> None:
    a, b = fake_pair()
    recv = b.issue_recv(torch.empty(1))
    start = time.monotonic()
    assert not recv.wait(0.05)
    assert 0.04 < time.monotonic() - start < 0.5
    threading.Timer(0.05, lambda: a.issue_send(torch.ones(1))).start()
    assert recv.wait(2.0)
    assert recv.wait(0.0)


def test_own_timeout_breaks_the_pair() -> None:
    a, b = fake_pair(timeout_s=0.05)
    with pytest.raises(TransferTimeoutError):
        b.issue_recv(torch.empty(1)).wait()
    with pytest.raises(TransferAbortedError):
        a.issue_send(torch.empty(1)).wait()


def test_delay_by_number() -> None:
    a, b = fake_pair(delay=lambda number: 0.1 if number == 1 else 0.0)
    recvs = [b.issue_recv(torch.empty(1)) for _ in range(3)]
    for _ in range(3):
        a.issue_send(torch.ones(1))
    assert recvs[0].is_done()
    assert not recvs[1].is_done()
    assert not recvs[2].is_done()  # order is kept
    assert not recvs[1].wait(0.01)
    assert recvs[2].wait(1.0)
    assert recvs[1].is_done()


def test_hold_and_release() -> None:
    a, b = fake_pair()
    a.hold()
    recvs = [b.issue_recv(torch.empty(1)) for _ in range(3)]
    for _ in range(3):
        a.issue_send(torch.ones(1))
    assert not recvs[0].is_done()
    a.release(1)
    assert [r.is_done() for r in recvs] == [True, False, False]
    threading.Timer(0.05, a.release).start()
    assert recvs[2].wait(2.0)


@pytest.mark.parametrize("how", ["abort", "kill", "close"])
def test_breaking_an_end_wakes_both(how: str) -> None:
    a, b = fake_pair()
    recv, send = b.issue_recv(torch.empty(1)), b.issue_send(torch.empty(1))
    threading.Timer(0.05, getattr(a, how)).start()
    for work in (recv, send):
        with pytest.raises(TransferAbortedError):
            work.wait(5.0)
    for end in (a, b):
        with pytest.raises(TransferAbortedError):
            end.issue_recv(torch.empty(1)).wait()
        end.close()


def test_what_is_done_stays_done_after_an_abort() -> None:
    a, b = fake_pair()
    out = torch.empty(1)
    recv, send = b.issue_recv(out), a.issue_send(torch.ones(1))
    a.abort()
    assert recv.wait()
    assert send.wait()


def test_strided_tensors_are_refused() -> None:
    a, b = fake_pair()
    with pytest.raises(ValueError, match="contiguous"):
        a.issue_send(torch.zeros(4, 4).T)
    with pytest.raises(ValueError, match="contiguous"):
        b.issue_recv(torch.zeros(4)[::2])
