# SPDX-License-Identifier: Apache-2.0
"""Times of the selection kernels of a decode step on a GPU, as JSON lines.

Each figure is one call of one layer: a CUDA graph of as many calls as the model has layers, each
on buffers of its own, is replayed, so that nothing is warm but what would be. Every kernel is
compared with its reference first.

    python tests/bench/kernels_select.py --output select.jsonl
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tandemkv.kernels.dispatch import plain
from tandemkv.kernels.exchange import exchange_rows
from tandemkv.kernels.mirror import make_mirror_scratch, mirror_diff
from tandemkv.kernels.samples import attend_samples, make_sample_scratch
from tandemkv.kernels.topk import make_topk_scratch
from tandemkv.kernels.triton_ops.topk import topk_positions

DEVICE = "cuda"
NUM_SINK = 4


@dataclass(frozen=True)
class Sizes:
    """What the figures are about."""

    num_reqs: int
    heads: int
    layers: int
    k: int
    resident: int
    cap: int
    dim: int
    page_size: int
    repeats: int


def microseconds(calls: list[Callable[[], object]], repeats: int) -> list[float]:
    """Return the time of one call in each replay of a graph of all of them, ascending."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]  # results stay allocated, as layers' results do
    times = []
    for _ in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    del kept
    return sorted(times[3:])


def rows_of(figure: str, times: list[float], num_bytes: int) -> Iterator[dict[str, object]]:
    middle = statistics.median(times)
    low, high = times[len(times) // 10], times[len(times) - 1 - len(times) // 10]
    yield {"figure": figure, "value": middle, "unit": "us", "p10": low, "p90": high}
    if num_bytes:
        speeds = [num_bytes / time / 1e3 for time in (middle, high, low)]
        keys = ("value", "p10", "p90")
        yield {"figure": figure, "unit": "GB/s", **dict(zip(keys, speeds, strict=True))}


def bench_topk(sizes: Sizes, length: int, width: int) -> Iterator[dict[str, object]]:
    shape = (sizes.num_reqs, sizes.heads, width)
    scores = [torch.randn(shape, device=DEVICE) for _ in range(sizes.layers)]
    lo = torch.full((sizes.num_reqs,), NUM_SINK, device=DEVICE)
    hi = torch.full((sizes.num_reqs,), length, device=DEVICE)
    scratch = make_topk_scratch(*shape[:2], sizes.k, DEVICE)
    chosen_scores = torch.empty((*shape[:2], sizes.k), device=DEVICE)

    def ours(of: torch.Tensor) -> torch.Tensor:
        return topk_positions(
            of, sizes.k, lo=lo, hi=hi, sort=False, scratch=scratch, out_scores=chosen_scores
        )

    candidates = scores[0][..., NUM_SINK:length]
    want = candidates.topk(min(sizes.k, length - NUM_SINK)).values
    ours(scores[0])
    assert torch.equal(chosen_scores.sort(descending=True).values[..., : want.shape[-1]], want)
    num_bytes = sizes.num_reqs * sizes.heads * (length - NUM_SINK) * 4
    name = f"{length // 1024}K of {width // 1024}K"
    calls: list[Callable[[], object]] = [lambda s=s: ours(s) for s in scores]  # type: ignore[misc]
    yield from rows_of(f"topk_positions, {name}", microseconds(calls, sizes.repeats), num_bytes)
    if width != length:
        return
    cut = [s[..., NUM_SINK:length] for s in scores]
    calls = [lambda s=s: torch.topk(s, sizes.k, sorted=False) for s in cut]  # type: ignore[misc]
    yield from rows_of(f"torch.topk, {name}", microseconds(calls, sizes.repeats), num_bytes)
    try:
        import flashinfer
    except ImportError:
        pass
    else:
        flat = [s.view(-1, width) for s in scores]
        calls = [lambda s=s: flashinfer.top_k(s, sizes.k) for s in flat]  # type: ignore[misc]
        yield from rows_of(f"flashinfer.top_k, {name}", microseconds(calls, sizes.repeats), 0)
    for score in scores:
        score.mul_(2).round_()  # some twenty values: the threshold is one of thousands of equals
    calls = [lambda s=s: ours(s) for s in scores]  # type: ignore[misc]
    figure = f"topk_positions, {name}, few values"
    yield from rows_of(figure, microseconds(calls, sizes.repeats), num_bytes)


def mirrors(sizes: Sizes, length: int, missing: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield per layer: selected, its scores, positions of the slots, their last use."""
    shape = (sizes.num_reqs, sizes.heads, length)
    for _ in range(sizes.layers):
        shuffled = torch.rand(shape, device=DEVICE).argsort(-1).int()
        resident = shuffled[..., : sizes.resident].contiguous()
        num_hits = sizes.k - missing
        outside = shuffled[..., sizes.resident : sizes.resident + missing]
        selected = torch.cat([resident[..., -num_hits:], outside], -1).contiguous()
        used = torch.randint(0, 999, resident.shape, device=DEVICE, dtype=torch.int32)
        yield selected, torch.randn(selected.shape, device=DEVICE), resident, used


def bench_mirror(
    sizes: Sizes, length: int, missing: int, num_samples: int = 0
) -> Iterator[dict[str, object]]:
    scratch = make_mirror_scratch(sizes.num_reqs, sizes.heads, length, DEVICE)
    layers = list(mirrors(sizes, length, missing))
    weights = None
    if num_samples:
        weights = torch.zeros(sizes.num_reqs, sizes.heads, num_samples, device=DEVICE)
    keywords = {
        "step": torch.tensor(1000, dtype=torch.int32, device=DEVICE),
        "num_protected": NUM_SINK,
        "num_target": torch.full((sizes.num_reqs,), sizes.resident, device=DEVICE),
        "hi": torch.full((sizes.num_reqs,), length, device=DEVICE),
        "fetch_cap": sizes.cap,
        "log_weight": weights,
    }
    selected, scores, resident, used = layers[0]
    ours = [resident.clone(), used.clone()]
    theirs = [resident.clone(), used.clone()]
    got = mirror_diff(selected, *ours, **keywords, selected_scores=scores, scratch=scratch)
    found = None if weights is None else weights.clone()
    want = plain(mirror_diff)(selected, *theirs, **keywords, selected_scores=scores)
    assert all(map(torch.equal, (*got, *ours), (*want, *theirs)))
    if weights is not None and found is not None:
        torch.testing.assert_close(found, weights, rtol=2e-5, atol=2e-5)
    state = [(resident.clone(), used.clone()) for _, _, resident, used in layers]

    def restore(layer: int) -> None:
        state[layer][0].copy_(layers[layer][2])
        state[layer][1].copy_(layers[layer][3])

    def step(layer: int) -> object:
        restore(layer)
        selected, scores, *_ = layers[layer]
        return mirror_diff(
            selected, *state[layer], **keywords, selected_scores=scores, scratch=scratch
        )

    # The mirror is put back before each call; that alone is timed too, and taken off.
    restores: list[Callable[[], object]] = [lambda i=i: restore(i) for i in range(sizes.layers)]  # type: ignore[misc]
    steps: list[Callable[[], object]] = [lambda i=i: step(i) for i in range(sizes.layers)]  # type: ignore[misc]
    overhead = statistics.median(microseconds(restores, sizes.repeats))
    times = [time - overhead for time in microseconds(steps, sizes.repeats)]
    besides = f", weights of {num_samples} samples" if num_samples else ""
    yield from rows_of(f"mirror_diff, {missing} missing, {length // 1024}K{besides}", times, 0)


def bench_samples(sizes: Sizes, num_samples: int) -> Iterator[dict[str, object]]:
    """Time attention over samples that lie anywhere in a pool, four query heads a KV head."""
    num_slots, layers = 8 * 65536, 6  # 6 GB of pools
    query_heads = 4 * sizes.heads
    pools = torch.randn(layers, 2, num_slots, sizes.heads, sizes.dim, device=DEVICE).bfloat16()
    q = torch.randn(sizes.num_reqs, query_heads, sizes.dim, device=DEVICE).bfloat16()
    lse = torch.randn(sizes.num_reqs, query_heads, device=DEVICE)
    slots = torch.randint(0, num_slots, (sizes.num_reqs, num_samples), device=DEVICE).int()
    weight = torch.randn(layers, sizes.num_reqs, sizes.heads, num_samples, device=DEVICE) + 4
    weight[torch.rand(weight.shape, device=DEVICE) < 0.1] = float("-inf")
    rows = torch.arange(sizes.num_reqs, device=DEVICE)
    active = torch.ones(sizes.num_reqs, dtype=torch.bool, device=DEVICE)
    before = torch.randn(q.shape, device=DEVICE).bfloat16()
    out, want = before.clone(), before.clone()
    scale = sizes.dim**-0.5
    scratch = make_sample_scratch(sizes.num_reqs, query_heads, num_samples, sizes.dim, DEVICE)

    def call(layer: int) -> None:
        attend_samples(
            q, *pools[layer], slots, rows, weight[layer], active, out, lse, scale=scale,
            scratch=scratch,
        )  # fmt: skip

    call(0)
    plain(attend_samples)(
        q, *pools[0], slots, rows, weight[0], active, want, lse, scale=scale, lse_unit=1.0
    )
    torch.testing.assert_close(out, want.to(out.dtype), rtol=1.6e-2, atol=1.6e-2)
    calls: list[Callable[[], object]] = [lambda i=i: call(i) for i in list(range(layers)) * 6]  # type: ignore[misc]
    num_bytes = 2 * sizes.num_reqs * num_samples * sizes.heads * sizes.dim * 2
    times = microseconds(calls, sizes.repeats)
    yield from rows_of(f"attend_samples, {num_samples} a head", times, num_bytes)


def bench_rows(sizes: Sizes) -> Iterator[dict[str, object]]:
    length, pages = 32768, 32768 // sizes.page_size
    num_slots = sizes.num_reqs * length
    row_shape = (sizes.heads, sizes.dim)
    layers = 12  # 6 GB of pools; each is larger than a cache
    pools = torch.randn(layers, 2, num_slots, *row_shape, device=DEVICE).bfloat16()
    res = torch.zeros(
        layers, 2, sizes.num_reqs, sizes.resident, *row_shape, dtype=torch.bfloat16, device=DEVICE
    )
    shape = (sizes.num_reqs, sizes.heads, sizes.cap)
    table = torch.randperm(sizes.num_reqs * pages, device=DEVICE).view(sizes.num_reqs, pages).int()
    rows = torch.randperm(sizes.num_reqs, device=DEVICE)
    keys = torch.rand((layers, *shape[:2], length), device=DEVICE)
    fetch = keys.argsort(-1)[..., : sizes.cap].int().contiguous()
    to = keys[..., : sizes.resident].argsort(-1)[..., : sizes.cap].int().contiguous()

    def exchange(i: int) -> None:
        exchange_rows(*pools[i], table, fetch[i], to[i], *res[i], rows, page_size=sizes.page_size)

    exchange(0)
    assert bool(res[0].any())
    num_bytes = 2 * 2 * fetch[0].numel() * sizes.dim * 2  # read and written, K and V
    calls: list[Callable[[], object]] = [
        lambda i=i: exchange(i)  # type: ignore[misc]
        for i in list(range(layers)) * (sizes.layers // layers)
    ]
    figure = f"exchange_rows, {sizes.cap} rows a head, pages of {sizes.page_size}"
    yield from rows_of(figure, microseconds(calls, sizes.repeats), num_bytes)


def figures(sizes: Sizes, lengths: list[int], *, only_samples: bool) -> Iterator[dict[str, object]]:
    for num_samples in (0, 128, 256, 512):
        yield from bench_mirror(sizes, 65536, 128, num_samples)
    for num_samples in (128, 256, 512, 1024):
        yield from bench_samples(sizes, num_samples)
    if only_samples:
        return
    for length in lengths:
        yield from bench_topk(sizes, length, length)
    yield from bench_topk(sizes, 65536, 262144)
    for missing in (0, 128, 1000):
        yield from bench_mirror(sizes, 65536, missing)
    yield from bench_rows(sizes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--lengths", default="8192,32768,65536,131072")
    for name, default in (
        ("num-reqs", 8), ("heads", 8), ("layers", 36), ("k", 2048), ("resident", 4100),
        ("cap", 128), ("dim", 128), ("page-size", 64), ("repeats", 30),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only-samples", action="store_true", help="what samples cost, no more")
    parser.add_argument("--output", type=Path)
    arguments = vars(parser.parse_args())
    lengths = [int(length) for length in arguments.pop("lengths").split(",")]
    output: Path | None = arguments.pop("output")
    only_samples: bool = arguments.pop("only_samples")
    if not torch.cuda.is_available():
        parser.error("no GPU: the kernels that are timed here run on one only")
    torch.manual_seed(0)
    lines = []
    for row in figures(Sizes(**arguments), lengths, only_samples=only_samples):
        print(json.dumps(row), flush=True)
        lines.append(json.dumps({**row, **arguments, "gpu": torch.cuda.get_device_name()}))
    if output is not None:
        output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
