# SPDX-License-Identifier: Apache-2.0
"""Time of scoring one layer's keys on a GPU, beside a copy of as many bytes.

    PYTHONPATH=... python tests/bench/kernels_score.py --out score.json

A CUDA graph scores several layers, each with keys of its own, more than the L2 cache holds, as a
decode step does; figures are per layer, over replays. ``--tuning int4=64,5,4,8,0`` tries
another `Tuning` (0 registers: no limit). A reference check comes first.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from tandemkv.kernels.dispatch import plain
from tandemkv.kernels.score import POOLINGS, KeyScan, make_score_scratch, score_keys
from tandemkv.kernels.triton_ops import score as triton_score

HEADS, QO_HEADS, DIM, PAGE = 8, 32, 128, 64
KINDS = {"bf16": "native", "int8": "int8", "int4": "int4"}
MIN_ROTATED_BYTES = 1 << 30


def make_pool(
    index: str, num_pages: int, page: int = PAGE, dim: int = DIM
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys of one layer: random bits are as good as quantized keys."""
    cuda = torch.device("cuda")
    if index == "bf16":
        keys = torch.randn(num_pages * page, HEADS, dim, device=cuda, dtype=torch.bfloat16)
        return keys, None
    if index == "int8":
        codes = torch.randint(
            -127, 128, (num_pages * page, HEADS, dim), device=cuda, dtype=torch.int8
        )
        return codes, torch.rand(codes.shape[:2], device=cuda) * 0.02 + 0.01
    codes = torch.randint(
        0, 256, (num_pages, HEADS, page, dim // 2), device=cuda, dtype=torch.uint8
    )
    scales = torch.rand(num_pages, HEADS, 2, dim, device=cuda, dtype=torch.float16)
    scales[:, :, 0].mul_(0.2).add_(0.1)
    scales[:, :, 1].add_(-2.5)
    return codes, scales


def replay_times(run: Callable[[], None], num_replays: int, per_replay: int) -> np.ndarray:
    """Microseconds of one of `per_replay` parts of `run`, for each replay of its graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_replays + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return np.array(times) * 1e3 / per_replay


def row(figure: str, values: np.ndarray, unit: str) -> dict[str, object]:
    p10, median, p90 = (float(value) for value in np.percentile(values, [10, 50, 90]))
    low, high = min(p10, p90), max(p10, p90)
    return {"figure": figure, "value": median, "unit": unit, "p10": low, "p90": high}


def copy_bandwidth(num_replays: int) -> np.ndarray:
    """TB/s of a device-to-device copy of 1 GiB, bytes read and bytes written."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    # By a kernel: what `copy_` captures is a copy engine's, which is slower than the memory.
    times = replay_times(lambda: torch.neg(source, out=target), num_replays, 1)
    return 2 * source.nbytes / times / 1e6


def kernel_times(name: str, run: Callable[[], None], num_layers: int) -> Iterator[dict]:
    """Profiled microseconds of each kernel of a layer."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    for event in profile.key_averages():
        if event.key.startswith(("scan", "pool")):
            value = event.device_time_total / num_layers
            yield {"figure": f"{name}: {event.key}", "value": value, "unit": "us"}


def measure(index: str, length: int, num_reqs: int, args: argparse.Namespace) -> Iterator[dict]:
    page, dim = args.page, args.dim
    num_pages = num_reqs * length // page + 1
    first = make_pool(index, num_pages, page, dim)
    key_bytes = sum(part.nbytes for part in first if part is not None)
    num_layers = max(2, -(-MIN_ROTATED_BYTES // key_bytes))
    pools = [first, *(make_pool(index, num_pages, page, dim) for _ in range(num_layers - 1))]
    table = (torch.randperm(num_pages - 1, device="cuda").int() + 1).view(num_reqs, -1)
    q = torch.randn(num_reqs, QO_HEADS, dim, device="cuda", dtype=torch.bfloat16)
    lo = torch.full((num_reqs,), 4, dtype=torch.int32, device="cuda")
    hi = torch.full((num_reqs,), length - 64, dtype=torch.int32, device="cuda")
    out = torch.zeros(num_reqs, HEADS, length, device="cuda")
    scratch = make_score_scratch(num_reqs, QO_HEADS, HEADS, length, out.device)
    for pooling in args.poolings:
        options = {"width": length, "scale": dim**-0.5, "pooling": pooling, "page_size": page}

        def run(pooling_options: dict = options) -> None:
            for pool, scale in pools:
                scan = KeyScan(q, pool, table, lo, hi, k_scale=scale, **pooling_options)
                score_keys(scan, out=out, scratch=scratch)

        name = f"score {index} {num_reqs}x{length} {pooling}"
        times = replay_times(run, args.replays, num_layers)
        pool, scale = pools[-1]
        one = KeyScan(q[:1], pool, table[:1], lo[:1], hi[:1], k_scale=scale, **options)
        want = plain(score_keys)(one)
        got, want = out[0, :, 4 : length - 64], want[0, :, 4 : length - 64]
        error = float((got - want).abs().max() / want.abs().max())
        if not error < 2e-2:
            sys.exit(f"{name}: relative error {error} against the reference; not timed")
        yield row(name, times, "us")
        if args.by_kernel:
            yield from kernel_times(name, run, num_layers)
        yield {"figure": f"{name}: largest error", "value": error, "unit": "of the largest score"}
        yield {"figure": f"{name}: keys and scales", "value": key_bytes / 1e6, "unit": "MB"}
        rates = key_bytes / times / 1e6
        yield row(f"{name}: keys read", rates, "TB/s")
        yield row(f"{name}: share of copy", rates / args.copy * 100, "%")


def tune(setting: str) -> None:
    name, _, values = setting.partition("=")
    block_n, stages, warps, programs, registers = (int(value) for value in values.split(","))
    triton_score.TUNING[KINDS[name]] = triton_score.Tuning(
        block_n=block_n, stages=stages, warps=warps, programs=programs, registers=registers or None
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--indexes", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--poolings", nargs="+", default=list(POOLINGS), choices=POOLINGS)
    parser.add_argument("--lengths", nargs="+", type=int, default=[32768, 65536])
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--dim", type=int, default=DIM, help="channels that the keys have")
    parser.add_argument("--page", type=int, default=PAGE, help="tokens of a page; 128 is served")
    parser.add_argument("--replays", type=int, default=30)
    parser.add_argument(
        "--tuning", nargs="*", default=[], metavar="INDEX=N,STAGES,WARPS,PROGRAMS,REGS"
    )
    parser.add_argument("--pool", metavar="TOKENS,WARPS", help="of the second pass")
    parser.add_argument("--by-kernel", action="store_true", help="profile the two passes")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.pool:
        tokens, warps = args.pool.split(",")
        triton_score.POOL = (int(tokens), int(warps))
    torch.manual_seed(0)
    copies = copy_bandwidth(args.replays)
    args.copy = float(np.median(copies))
    rows: list[dict] = [row("copy of 1 GiB", copies, "TB/s")]
    for setting in args.tuning or [None]:
        if setting is not None:
            tune(setting)
        for index in args.indexes:
            if setting is not None and not setting.startswith(index):
                continue
            for length in args.lengths:
                label = "" if setting is None else f" [{setting}]"
                for entry in measure(index, length, args.requests, args):
                    rows.append(entry | {"figure": entry["figure"] + label})
                    print(f"{rows[-1]['figure']}: {entry['value']:.4g} {entry['unit']}", flush=True)
    print(f"copy: {args.copy:.2f} TB/s; {torch.cuda.get_device_name()}, torch {torch.__version__}")
    if args.out:
        args.out.write_text("".join(json.dumps(entry) + "\n" for entry in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
