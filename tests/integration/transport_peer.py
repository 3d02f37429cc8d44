# SPDX-License-Identifier: Apache-2.0
"""The other rank of `test_transport_gloo.py`: ``transport_peer.py STORE TIMEOUT_S SCENARIO``.

Prints ``connected`` when the pair stands, and ``ok`` when its scenario went as it should.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from tandemkv.cache_rank.protocol.errors import TransferAbortedError
from tandemkv.cache_rank.protocol.gloo_transport import connect_gloo
from tandemkv.cache_rank.protocol.transport import Transport


def echo(transport: Transport) -> None:
    """Return what comes: a length (int64), then so many bytes; length 0 ends."""
    length = torch.empty(1, dtype=torch.int64)
    while True:
        transport.issue_recv(length).wait()
        if not length.item():
            return
        data = torch.empty(int(length.item()), dtype=torch.uint8)
        transport.issue_recv(data).wait()
        transport.issue_send(data).wait()


def ping_pong(transport: Transport) -> None:
    """Return 4 KiB 330 times."""
    data = torch.empty(4096, dtype=torch.uint8)
    for _ in range(330):
        transport.issue_recv(data).wait()
        transport.issue_send(data).wait()


def late(transport: Transport) -> None:
    """Send 4 bytes twice, a while after the other side has asked."""
    for _ in range(2):
        time.sleep(0.5)
        transport.issue_send(torch.ones(4, dtype=torch.uint8)).wait()


def forget(transport: Transport) -> None:
    """Send 40 tensors of several sizes and wait for the last only."""
    works = [transport.issue_send(torch.full((1 + n % 3,), float(n))) for n in range(40)]
    works[-1].wait()


def aborted(transport: Transport) -> None:
    """Expect the other side to break the pair."""
    try:
        transport.issue_recv(torch.empty(7)).wait()
    except TransferAbortedError:
        return
    raise AssertionError("the receive came through")


def silent(transport: Transport) -> None:
    """Say nothing."""
    time.sleep(60)


if __name__ == "__main__":
    torch.set_num_threads(1)
    store, timeout_s, scenario = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    end = connect_gloo(store, rank=1, timeout_s=timeout_s)
    print("connected", flush=True)
    globals()[scenario](end)
    end.close()
    print("ok", flush=True)
