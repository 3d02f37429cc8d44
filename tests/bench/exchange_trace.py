# SPDX-License-Identifier: Apache-2.0
"""How long a layer's selection takes between two GPUs, and its kernels, from a Chrome trace.

    tandemkv bench decode --config 1+1-peer --points 8x64k --profile --work-dir DIR
    python tests/bench/exchange_trace.py DIR/1+1-peer_batch8/traces/decode_8x65536_rank0.json.gz

A selection begins where the cache GPU has seen the flag of the residual stream, the end of a wait,
and ends with the copy of its rows, both in the order in which they end. The first layer's has the
GPU to itself and stands apart; the second's begins late on purpose and is left out.
"""

import argparse
import gzip
import json
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

KERNELS = (
    "_project_kernel", "_rotate_kernel", "scan_kernel", "bound_kernel", "filter_kernel",
    "select_kernel", "_mirror_kernel", "_exchange_kernel",
)  # fmt: skip


def kernels_of(path: Path, device: int) -> list[dict[str, Any]]:
    """Return the kernels of a GPU, in the order in which they end."""
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    found = [
        event for event in events
        if event.get("cat") == "kernel" and event["args"].get("device") == device
    ]  # fmt: skip
    return sorted(found, key=_end)


def _end(event: dict[str, Any]) -> float:
    return float(event["ts"]) + float(event["dur"])


def _row(figure: str, values: list[float]) -> dict[str, Any]:
    cuts = statistics.quantiles(values, n=10) if len(values) > 1 else values * 9
    return {
        "figure": figure, "value": round(statistics.median(values), 1), "unit": "us",
        "p10": round(cuts[0], 1), "p90": round(cuts[-1], 1), "n": len(values),
    }  # fmt: skip


def rows(path: Path, num_layers: int, device: int = 1, num_late: int = 1) -> list[dict[str, Any]]:
    """Return rows of a trace of whole steps, each of `num_layers` selections.

    The last `num_late` of a step are for the next one: nobody waits for them, nor they for a flag.
    """
    kernels = kernels_of(path, device)
    seen = [event for event in kernels if event["name"] == "_wait_kernel"]
    copied = [event for event in kernels if event["name"] == "_exchange_kernel"]
    num_steps, awaited = len(copied) // num_layers, num_layers - num_late
    if not copied or len(copied) % num_layers or len(seen) != num_steps * awaited:
        message = f"{path}: {len(seen)} waits, {len(copied)} copies: not {num_layers} a step"
        raise SystemExit(message)
    first, others = [], []
    for step in range(num_steps):
        begun = seen[step * awaited : (step + 1) * awaited]
        done = copied[step * num_layers :][:awaited]
        spans = [_end(end) - _end(begin) for begin, end in zip(begun, done, strict=True)]
        first.append(spans[0])
        others += spans[1 if num_late else 2 :]
    mirrors = sorted(float(event["ts"]) for event in kernels if event["name"] == "_mirror_kernel")
    apart = [end - begin for begin, end in pairwise(mirrors)]
    found = [
        _row("exchange", others), _row("exchange_first_layer", first),
        _row("mirror_to_mirror", apart),
    ]  # fmt: skip
    for name in KERNELS:
        times = [float(event["dur"]) for event in kernels if event["name"] == name]
        if times:
            found.append(_row(name.strip("_"), times))
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path, help="decode_<point>_rank0.json.gz")
    parser.add_argument("--layers", type=int, default=36, help="selections of a step")
    parser.add_argument("--late", type=int, default=1, help="late layers")
    args = parser.parse_args()
    for path in args.traces:
        for row in rows(path, args.layers, num_late=args.late):
            print(json.dumps({"trace": path.name, **row}))


if __name__ == "__main__":
    main()
