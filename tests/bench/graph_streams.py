# SPDX-License-Identifier: Apache-2.0
"""How long a captured graph takes when the process has used more streams besides.

    python tests/bench/graph_streams.py --priorities=-1,-1,0,0 --out docs/benchmarks/streams.json

One process measures one list of priorities: what a process has used, it has used for good.
`CUDA_DEVICE_MAX_CONNECTIONS` is recorded. Decision record 14.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path

import torch

SIZE, BATCH = 4096, 8


def capture(stream: torch.cuda.Stream, x: torch.Tensor, w: torch.Tensor) -> torch.cuda.CUDAGraph:
    """Capture 600 kernels, one behind another."""
    with torch.cuda.stream(stream):
        for _ in range(3):
            _ = (x @ w + 1) * 0.5
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(200):
            _ = (x @ w + 1) * 0.5
    return graph


def replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    """Median of five times ten replays."""
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    found = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(10):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 10)
    return round(statistics.median(found), 4)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--priorities", default="-1,-1,0,0", help="of the streams used one by one")
    parser.add_argument("--out", type=Path, help="JSON file that the result is added to")
    args = parser.parse_args()
    x = torch.randn(BATCH, SIZE, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    graph = capture(torch.cuda.Stream(), x, w)
    rows = [{"figure": "replay", "streams": 0, "value": replay_ms(graph), "unit": "ms"}]
    kept = []
    for number, priority in enumerate(map(int, args.priorities.split(",")), 1):
        kept.append(torch.cuda.Stream(priority=priority))
        with torch.cuda.stream(kept[-1]):
            torch.ones(1, device="cuda").add_(1)
        torch.cuda.synchronize()
        value = replay_ms(graph)
        rows.append({"figure": "replay", "streams": number, "value": value, "unit": "ms"})
    another = replay_ms(capture(torch.cuda.Stream(), x, w))
    rows.append({"figure": "captured_anew", "streams": len(kept), "value": another, "unit": "ms"})
    result = {
        "command": f"python tests/bench/graph_streams.py --priorities={args.priorities}",
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
        "rows": rows,
    }
    print(json.dumps(result, indent=1))
    if args.out:
        before = json.loads(args.out.read_text(encoding="utf-8")) if args.out.is_file() else []
        args.out.write_text(json.dumps([*before, result], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
