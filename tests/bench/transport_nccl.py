# SPDX-License-Identifier: Apache-2.0
"""Time of a transfer over the NCCL transport, each way, as the ranks make it: host waits included.

``python tests/bench/transport_nccl.py [OUT]`` on a machine with two GPUs; one JSON line a figure.
A transfer up is what ends with a one-byte answer, so its time is that of the transfer and of the
answer; the answer alone is timed as size 1.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from tandemkv.cache_rank.protocol.nccl_transport import NcclTransport, connect_nccl

MIB = 1 << 20
SIZES = (1, 64 << 10, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
WARM_UP, REPEATS = 5, 30


def answer(transport: NcclTransport) -> None:
    """The other rank: the same transfers, mirrored."""
    tick = torch.zeros(1, dtype=torch.uint8, device="cuda")
    for size in SIZES:
        data = torch.zeros(size, dtype=torch.uint8, device="cuda")
        for _ in range(WARM_UP + REPEATS):
            transport.issue_recv(data).wait()
            transport.issue_send(tick).wait()
        for _ in range(WARM_UP + REPEATS):
            transport.issue_recv(tick).wait()
            transport.issue_send(data).wait()


def measure(transport: NcclTransport, size: int, *, up: bool) -> list[float]:
    """Seconds of each transfer with the byte that goes the other way."""
    data = torch.zeros(size, dtype=torch.uint8, device="cuda")
    tick = torch.zeros(1, dtype=torch.uint8, device="cuda")
    sent, received = (data, tick) if up else (tick, data)
    seconds = []
    for _ in range(WARM_UP + REPEATS):
        start = time.perf_counter()
        transport.issue_send(sent)
        transport.issue_recv(received).wait()
        seconds.append(time.perf_counter() - start)
    return seconds[WARM_UP:]


def main(out: Path | None) -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        peer = subprocess.Popen(
            [sys.executable, "-P", __file__, "--peer", str(store)],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": visible[1]},
        )
        transport = connect_nccl(store, rank=0, timeout_s=60.0)
        lines = []
        for size in SIZES:
            for up in (True, False):
                seconds = measure(transport, size, up=up)
                ordered = sorted(seconds)
                median = statistics.median(seconds)
                lines.append(
                    {
                        "figure": "nccl_transfer",
                        "direction": "up" if up else "down",
                        "bytes": size,
                        "median_us": round(median * 1e6, 1),
                        "p10_us": round(ordered[len(ordered) // 10] * 1e6, 1),
                        "p90_us": round(ordered[len(ordered) * 9 // 10] * 1e6, 1),
                        "gb_per_s": round(size / median / 1e9, 2),
                        "repeats": REPEATS,
                        "gpu": torch.cuda.get_device_name(),
                        "torch": torch.__version__,
                        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
                        "note": "host time of issue and wait, with one byte the other way",
                    }
                )
        text = "\n".join(json.dumps(line) for line in lines) + "\n"
        sys.stdout.write(text)
        if out is not None:
            out.write_text(text, encoding="utf-8")
        peer.wait(30)
        transport.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        end = connect_nccl(Path(sys.argv[2]), rank=1, timeout_s=60.0)
        answer(end)
        time.sleep(0.5)  # what was sent last has arrived
        end.close()
    else:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
