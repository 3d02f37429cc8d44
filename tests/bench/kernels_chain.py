# SPDX-License-Identifier: Apache-2.0
"""Time of all that a cache rank does in one layer of a decode step on a GPU, by kernel.

    python tests/bench/kernels_chain.py --filter 512,2,4096 1024,4,4096

A CUDA graph holds `score_topk`, `mirror_diff` and `exchange_rows` of several layers, each with
keys, books and pools of its own; figures are per layer. Queries move a little from replay to
replay, so that rows are fetched as in decoding. ``--filter`` tries tokens, warps and programs of
the pass that filters scores, ``--scan`` as ``--tuning`` of kernels_score.py does; ``--pool 1 0``
chooses by scores pooled over neighbours. ``--samples 128`` weighs samples too; ``--chained``
launches kernels as on a GPU that does nothing but select; ``--width`` is the longest context that
is allowed for, by default the length; ``--page`` how many tokens share scales; ``--channels 64``
has an index of a part of each key; ``--queries 0`` makes all scores of a head equal, as SGLang's
dummy weights do. The choice is compared with the reference first.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
from kernels_score import DIM, HEADS, PAGE, QO_HEADS, make_pool, replay_times, tune

from tandemkv.kernels.dispatch import plain
from tandemkv.kernels.exchange import exchange_rows
from tandemkv.kernels.mirror import make_mirror_scratch, mirror_diff
from tandemkv.kernels.score import KeyScan
from tandemkv.kernels.select import make_select_scratch, score_topk
from tandemkv.kernels.streams import let_chain
from tandemkv.kernels.triton_ops import select as triton_select


def make_layers(args: argparse.Namespace) -> Callable[[], None]:
    """Build `args.layers` layers; returns what enqueues one step, of all of them."""
    reqs, length, device = args.requests, args.length, torch.device("cuda")
    num_pages, page = reqs * length // args.page + 1, args.page
    pools = [make_pool(args.index, num_pages, page, args.channels) for _ in range(args.layers)]
    channels = None
    if args.channels < DIM:
        kept = [torch.randperm(DIM, device=device)[: args.channels] for _ in range(HEADS)]
        channels = torch.stack(kept)
    kv = torch.randn(2, num_pages * page, HEADS, DIM, device=device).bfloat16()
    res = torch.zeros(2, reqs + 1, args.resident, HEADS, DIM, device=device).bfloat16()
    books = torch.arange(args.resident, device=device, dtype=torch.int32)
    books = books.expand(args.layers, reqs + 1, HEADS, args.resident).contiguous()
    used = torch.zeros_like(books) - 1
    rows = torch.randperm(reqs, device=device) + 1
    width = max(length, args.width)
    pages = (torch.randperm(num_pages - 1, device=device).int() + 1).view(reqs, -1)
    table = torch.nn.functional.pad(pages, (0, (width - length) // page))
    base = args.queries * torch.randn(reqs, QO_HEADS, DIM, device=device)
    q = base.bfloat16()
    lo = torch.full((reqs,), 4, dtype=torch.int32, device=device)
    hi = torch.full((reqs,), length - 64, dtype=torch.int32, device=device)
    active = torch.ones(reqs, dtype=torch.bool, device=device)
    target = torch.full((reqs,), args.resident, dtype=torch.int32, device=device)
    step = torch.zeros((), dtype=torch.int32, device=device)
    counters = torch.zeros(4, dtype=torch.int64, device=device)
    weight = torch.zeros(reqs + 1, HEADS, args.samples, device=device) if args.samples else None
    scratch = make_select_scratch(reqs, QO_HEADS, HEADS, width, args.k, device)
    mirror_scratch = make_mirror_scratch(reqs, HEADS, width, device, may_repeat=False)
    options = {"width": width, "scale": DIM**-0.5, "page_size": page, "channels": channels}
    choose = partial(score_topk, k=args.k, pooled_positions=args.pool)

    def select(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, scales = pools[layer]
        scan = KeyScan(q, keys, table, lo, hi, k_scale=scales, active=active, **options)
        return choose(scan, scratch=scratch)

    keys, scales = pools[0]
    first = KeyScan(q[:1], keys, table[:1], lo[:1], hi[:1], k_scale=scales, **options)
    want = plain(choose)(first)[1]
    got = select(0)[1][:1]
    error = float((got.sort(-1).values - want.sort(-1).values).abs().max() / want.max())
    coded = 1 / 16 if args.index == "int4" else 0  # a code of a byte is apart from its share
    if not error < 2e-2 + coded:
        raise SystemExit(f"scores of the chosen differ from the reference by {error}; not timed")

    def run() -> None:
        step.add_(1)
        q.copy_(base + 0.3 * args.queries * torch.randn_like(base))
        for layer in range(args.layers):
            chosen, scores = select(layer)
            fetched = mirror_diff(
                chosen, books[layer], used[layer], step=step, num_protected=4, num_target=target,
                hi=hi, fetch_cap=args.cap, selected_scores=scores, active=active, rows=rows,
                counters=counters, log_weight=weight, scratch=mirror_scratch,
            )  # fmt: skip
            exchange_rows(*kv, table, *fetched, *res, rows, page_size=page)

    run.counters = counters  # type: ignore[attr-defined]
    return run


def by_kernel(run: Callable[[], None], layers: int) -> None:
    """Print the profiled time of each kernel of a layer."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            run()
        torch.cuda.synchronize()
    for event in profile.key_averages():
        if event.key.endswith("_kernel"):
            print(f"  {event.key}: {event.device_time_total / layers / 5:.1f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--index", default="int4", choices=("bf16", "int8", "int4"))
    for name, default in (
        ("length", 65536), ("width", 0), ("requests", 8), ("layers", 8), ("k", 2048),
        ("resident", 4100), ("cap", 128), ("samples", 0), ("replays", 30), ("page", PAGE),
        ("channels", DIM),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--pool", nargs=2, type=int, default=(0, 0), metavar=("BEFORE", "AFTER"))
    parser.add_argument("--queries", type=float, default=1.0, metavar="FACTOR")
    parser.add_argument("--chained", action="store_true")
    parser.add_argument("--filter", nargs="*", default=[], metavar="TOKENS,WARPS,PROGRAMS")
    parser.add_argument(
        "--scan", nargs="*", default=[], metavar="INDEX=N,STAGES,WARPS,PROGRAMS,REGS"
    )
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.chained:
        let_chain(torch.device("cuda"))
    run = make_layers(args)
    for setting in ["", *args.filter, *args.scan]:
        if "=" in setting:
            tune(setting)
        elif setting:
            values = (int(value) for value in setting.split(","))
            triton_select._BLOCK, triton_select._FILTER_WARPS, triton_select._FILTER_PROGRAMS = (
                values
            )
        times = replay_times(run, args.replays, args.layers)
        print(f"chain [{setting}]: {statistics.median(times):.1f} us a layer", flush=True)
        by_kernel(run, args.layers)
    print("hits, misses, fetched:", run.counters.tolist())  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
