# SPDX-License-Identifier: Apache-2.0
"""The other rank of `test_transport_nccl.py`: ``nccl_peer.py STORE TIMEOUT_S SCENARIO``.

Prints ``connected`` when the pair stands, and ``ok`` when its scenario went as it should.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from tandemkv.cache_rank.protocol.nccl_transport import connect_nccl
from tandemkv.cache_rank.protocol.transport import Transport


def echo(transport: Transport) -> None:
    """Return what comes: a length (int64), then so many bytes; length 0 ends."""
    length = torch.empty(1, dtype=torch.int64, device="cuda")
    while True:
        transport.issue_recv(length).wait()
        if not length.item():
            return
        data = torch.empty(int(length.item()), dtype=torch.uint8, device="cuda")
        transport.issue_recv(data).wait()
        transport.issue_send(data).wait()


def late(transport: Transport) -> None:
    """Send 4 bytes, a while after the other side has asked."""
    time.sleep(1.0)
    transport.issue_send(torch.ones(4, dtype=torch.uint8, device="cuda")).wait()
    time.sleep(1.0)


def forget(transport: Transport) -> None:
    """Send 40 tensors of several sizes and wait for the last only."""
    works = [
        transport.issue_send(torch.full((1 + n % 3,), float(n), device="cuda")) for n in range(40)
    ]
    works[-1].wait()
    time.sleep(1.0)


def silent(transport: Transport) -> None:
    """Say nothing."""
    time.sleep(120)


if __name__ == "__main__":
    store, timeout_s, scenario = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    end = connect_nccl(store, rank=1, timeout_s=timeout_s)
    print("connected", flush=True)
    globals()[scenario](end)
    end.close()
    print("ok", flush=True)
