# SPDX-License-Identifier: Apache-2.0
"""Time of an LFPS step on one core, beside exact top-k and full attention.

    OMP_NUM_THREADS=1 python tests/bench/lfps.py --out docs/benchmarks/lfps.json

One layer, one request, float32. Keys and queries are synthetic, made so that attention has the
vertical and slash lines that the method is about: some positions carry a strong key of a few
topics that the query drifts between, and keys carry a rotating part that the query meets again at
fixed distances. What is compared is the policy as it is served (paged K and V, Python
included), with both rivals in NumPy/torch on contiguous K and V, and compiled by Numba.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch

from tandemkv.cache_rank.policies.attending import AttendInput
from tandemkv.cache_rank.policies.base import PolicyContext, SeedInput, StoredKV
from tandemkv.cache_rank.policies.lfps import LfpsPolicy
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings

HEADS, DIM, SINK, RECENT = 8, 128, 4, 64
ROTATING, TOPICS = 64, 16
DISTANCES = (90, 517, 1031, 2113, 4099, 9001)
FAST = {"reassoc", "contract", "nsz", "arcp"}
# Scored at 128K with a = 0.2, in the paper's Table 4.
PAPER_SHARE = 0.017
PERCENTILES = (10, 50, 90)


class Synthetic:
    """A stream of keys, values and queries whose attention has vertical and slash lines."""

    def __init__(self, length: int, group: int, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.length, self.group = length, group
        shape = (length, HEADS, DIM)
        keys = self.random.standard_normal(shape, dtype=np.float32)
        self.values = self.random.standard_normal(shape, dtype=np.float32)
        half = ROTATING // 2
        self.frequencies = (1.0 / 3000.0 ** (np.arange(half) / half)).astype(np.float64)
        keys[:, :, :ROTATING] = self.rotated(np.arange(length))[:, None] * 1.4
        keys[:, :, ROTATING : ROTATING + TOPICS] *= 0.1
        heavy = self.random.choice(length, size=max(64, length // 33), replace=False)
        keys[heavy, :, ROTATING : ROTATING + TOPICS] = 1.5 * self.random.standard_normal(
            (len(heavy), HEADS, TOPICS), dtype=np.float32
        )
        keys[:SINK, :, -1] = 10.0
        self.keys = keys
        heads = HEADS * group
        self.topic = self.random.standard_normal((heads, TOPICS))
        self.drift = np.zeros_like(self.topic)
        self.strength = self.random.uniform(0.5, 1.0, (heads, len(DISTANCES)))

    def rotated(self, position: Any) -> Any:
        """Unit vectors that turn with position: their product depends on distance alone."""
        angle = np.asarray(position, np.float64)[..., None] * self.frequencies
        return np.concatenate([np.cos(angle), np.sin(angle)], -1).astype(np.float32)

    def query(self, position: int) -> Any:
        """Return the queries ``[Hq, D]`` of a position; called in ascending order."""
        heads = HEADS * self.group
        out = self.random.standard_normal((heads, DIM)).astype(np.float32)
        lines = np.stack([self.rotated(position - d) for d in DISTANCES])
        fade = self.strength * (self.random.uniform(size=self.strength.shape) < 0.7)
        out[:, :ROTATING] = 2.6 * fade @ lines
        self.drift = 0.97 * self.drift + 0.08 * self.random.standard_normal(self.topic.shape)
        out[:, ROTATING : ROTATING + TOPICS] = 7.0 * (self.topic + self.drift)
        out[:, -1] = 4.0
        return out


@numba.njit(nogil=True, fastmath=FAST)
def full_numba(query: Any, keys: Any, values: Any, scale: Any, out: Any) -> None:
    """Attention of ``[Hq, D]`` over contiguous ``[H, n, D]``, block by block."""
    group = query.shape[0] // keys.shape[0]
    logits = np.empty(256, np.float32)
    for hq in range(query.shape[0]):
        h = hq // group
        highest, total = np.float32(-np.inf), np.float32(0.0)
        out[hq] = 0.0
        for start in range(0, keys.shape[1], 256):
            end = min(keys.shape[1], start + 256)
            peak = highest
            for i in range(start, end):
                dot = np.float32(0.0)
                for d in range(query.shape[1]):
                    dot += query[hq, d] * keys[h, i, d]
                logits[i - start] = dot * scale
                peak = max(peak, logits[i - start])
            shrink = np.exp(highest - peak)
            total *= shrink
            for d in range(query.shape[1]):
                out[hq, d] *= shrink
            highest = peak
            for i in range(start, end):
                weight = np.exp(logits[i - start] - peak)
                total += weight
                for d in range(query.shape[1]):
                    out[hq, d] += weight * values[h, i, d]
        for d in range(query.shape[1]):
            out[hq, d] /= total


@numba.njit(nogil=True, fastmath=FAST)
def topk_numba(query: Any, keys: Any, values: Any, scale: Any, k: Any, out: Any) -> None:
    """Exact top-k attention over contiguous ``[H, n, D]``: per head the k best of its group."""
    heads, n, dim = keys.shape
    group = query.shape[0] // heads
    logits = np.empty((group, n), np.float32)
    pooled = np.empty(n, np.float32)
    for h in range(heads):
        pooled[:] = 0.0
        for g in range(group):
            highest = np.float32(-np.inf)
            for i in range(n):
                dot = np.float32(0.0)
                for d in range(dim):
                    dot += query[h * group + g, d] * keys[h, i, d]
                logits[g, i] = dot * scale
                highest = max(highest, logits[g, i])
            if group == 1:
                pooled[:] = logits[g]
            else:
                total = np.float32(0.0)
                for i in range(n):
                    total += np.exp(logits[g, i] - highest)
                for i in range(n):
                    pooled[i] += np.exp(logits[g, i] - highest) / total
        edge = np.partition(pooled, n - k)[n - k]
        for g in range(group):
            highest = np.float32(-np.inf)
            for i in range(n):
                if pooled[i] >= edge:
                    highest = max(highest, logits[g, i])
            total = np.float32(0.0)
            row = out[h * group + g]
            row[:] = 0.0
            for i in range(n):
                if pooled[i] >= edge:
                    weight = np.exp(logits[g, i] - highest)
                    total += weight
                    for d in range(dim):
                        row[d] += weight * values[h, i, d]
            row /= total


def full_torch(query: Any, keys: Any, values: Any, scale: float) -> Any:
    """Attention by two batched products."""
    grouped = query.view(HEADS, -1, DIM)
    return torch.softmax(grouped @ keys.transpose(1, 2) * scale, dim=-1) @ values


def topk_torch(query: Any, keys: Any, values: Any, scale: float, k: int) -> Any:
    """Exact top-k attention; the indices too."""
    grouped = query.view(HEADS, -1, DIM)
    logits = grouped @ keys.transpose(1, 2) * scale
    pooled = logits[:, 0] if logits.shape[1] == 1 else torch.softmax(logits, dim=-1).mean(1)
    best = pooled.topk(k, dim=-1).indices
    weights = logits.gather(2, best[:, None].expand(-1, logits.shape[1], -1)).softmax(-1)
    picked = values.gather(1, best[..., None].expand(-1, -1, DIM))
    return weights @ picked, best


def rivals(
    query: Any, near: tuple[Any, Any], arrays: tuple[Any, Any], scale: float, k: int, out: Any
) -> dict[str, Callable[[], Any]]:
    """Return what LFPS is compared with, on torch's and NumPy's views of the same K and V."""
    as_array, scale32 = query.numpy(), np.float32(scale)
    return {
        "full_torch": lambda: full_torch(query, *near, scale),
        "full_numba": lambda: full_numba(as_array, *arrays, scale32, out),
        "topk_torch": lambda: topk_torch(query, *near, scale, k),
        "topk_numba": lambda: topk_numba(as_array, *arrays, scale32, k, out),
    }


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return milliseconds that this thread, the only one, had a core for; and the result."""
    start = time.thread_time()
    found = call()
    return (time.thread_time() - start) * 1e3, found


def spread(values: list[float]) -> dict[str, float]:
    """Return median, p10 and p90."""
    p10, p50, p90 = np.percentile(values, PERCENTILES)
    return {"median": round(p50, 4), "p10": round(p10, 4), "p90": round(p90, 4)}


def measure(n: int, group: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run one size; `n` positions are candidates in the first step."""
    steps = args.steps
    data = Synthetic(SINK + n + RECENT + steps, group, args.seed)
    budget = int(args.budget * n)
    selection = SelectionSettings(
        policy="lfps", budget_tokens=budget, num_sink_tokens=SINK, num_recent_tokens=RECENT,
        options={"threshold": args.threshold},
    )  # fmt: skip
    model = ModelSpec(
        architecture="LlamaForCausalLM", num_layers=1, num_qo_heads=HEADS * group,
        num_kv_heads=HEADS, head_dim=DIM, hidden_size=HEADS * group * DIM,
        max_context=data.length, dtype="float32", model_hash="synthetic",
    )  # fmt: skip
    policy = LfpsPolicy(PolicyContext(model=model, selection=selection))
    k, v = torch.from_numpy(data.keys), torch.from_numpy(data.values)
    slots = torch.arange(data.length, dtype=torch.int32)[None]
    prompt = SINK + n + RECENT - 1
    queries = np.stack([data.query(p) for p in range(prompt - policy.options.rows, prompt)])
    seed = SeedInput(
        layer=0, owner=(1, 1), queries=torch.from_numpy(queries),
        positions=torch.arange(prompt - len(queries), prompt), score=None, lo=SINK, hi=SINK + n,
        stored=StoredKV(k, v, slots), budget=budget,
    )  # fmt: skip
    seed_ms, _ = timed(lambda: policy.observe_stored(seed))
    near = [x[SINK : SINK + n + steps].transpose(0, 1).contiguous() for x in (k, v)]
    near_numpy = [x.numpy() for x in near]
    out = np.empty((HEADS * group, DIM), np.float32)
    times: dict[str, list[float]] = {}
    recalls, masses, errors, topk_errors, candidates, attended = [], [], [], [], [], []
    for step in range(steps):
        length = prompt + 1 + step
        hi = length - RECENT
        query = torch.from_numpy(data.query(length - 1))[None]
        request = AttendInput(
            layer=0, owners=[(1, 1)], query=query, lengths=torch.tensor([length]),
            lo=torch.tensor([SINK]), hi=torch.tensor([hi]), stored=StoredKV(k, v, slots),
            budget=budget,
        )  # fmt: skip
        ms, found = timed(lambda r=request: policy.attend(r))
        times.setdefault("lfps", []).append(ms)
        attended.append(found.num_attended / HEADS)
        candidates.append(found.num_scored / HEADS)
        if step % args.every:
            continue
        keys, values = near[0][:, : hi - SINK], near[1][:, : hi - SINK]
        np_keys, np_values = near_numpy[0][:, : hi - SINK], near_numpy[1][:, : hi - SINK]
        q, scale = query[0], model.scale
        runs = rivals(query[0], (keys, values), (np_keys, np_values), scale, budget, out)
        results = {}
        for name, run in runs.items():
            if step == 0:
                run()  # compiles
            ms, results[name] = timed(run)
            times.setdefault(name, []).append(ms)
        grouped = q.view(HEADS, -1, DIM)
        exact_lse = torch.logsumexp((grouped @ keys.transpose(1, 2) * scale).double(), -1).flatten()
        lse = found.merged[0, :, -1].double()
        masses.append(float((lse - exact_lse).exp().mean()))
        full = results["full_torch"].reshape(-1, DIM)
        errors.append(float((found.merged[0, :, :-1] - full).norm() / full.norm()))
        best_out = results["topk_torch"][0].reshape(-1, DIM)
        topk_errors.append(float((best_out - full).norm() / full.norm()))
        best_mass = (
            torch.logsumexp(
                (grouped @ keys.transpose(1, 2) * scale)
                .gather(2, results["topk_torch"][1][:, None].expand(-1, group, -1))
                .double(),
                -1,
            ).flatten()
            - exact_lse
        ).exp()
        recalls.append(float(((lse - exact_lse).exp() / best_mass).mean()))

    def part(order: list[int]) -> dict[str, Any]:
        """Figures of the first tenth of the steps in `order`."""
        first = order[: max(1, steps // 10)]
        ms = statistics.median(times["lfps"][i] for i in first)
        return {
            "scored_tokens_per_head": statistics.median(candidates[i] for i in first),
            "lfps_ms": round(ms, 4),
            "speedup": {k: round(v / ms, 2) for k, v in medians.items() if k != "lfps"},
        }

    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "candidates_of_context": n, "query_heads_per_kv_head": group, "budget_tokens": budget,
        "ms": {name: spread(values) for name, values in times.items()},
        "speedup": {
            name: round(medians[name] / medians["lfps"], 2) for name in medians if name != "lfps"
        },
        "busiest_decile_of_steps": part(sorted(range(steps), key=lambda i: -candidates[i])),
        "steps_nearest_to_1.7_percent_scored": part(
            sorted(range(steps), key=lambda i: abs(candidates[i] - PAPER_SHARE * n))
        ),
        "seed_ms": round(seed_ms, 1),
        "scored_tokens_per_head": spread(candidates),
        "attended_tokens_per_head": spread(attended),
        "share_of_softmax_mass": spread(masses),
        "mass_relative_to_exact_topk": spread(recalls),
        "relative_error_of_output": spread(errors),
        "relative_error_of_exact_topk": spread(topk_errors),
    }  # fmt: skip


def main() -> None:
    """Measure all sizes and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--every", type=int, default=8, help="rivals run in every n-th step")
    parser.add_argument("--budget", type=float, default=0.02)
    parser.add_argument("--threshold", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    result = {
        "command": " ".join(["python", "tests/bench/lfps.py", *sys.argv[1:]]),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "numpy", "numba", "tandemkv")},
        "cores_used": 1,
        "clock": "CPU time of the only thread",
        "dtype": "float32", "kv_heads": HEADS, "head_dim": DIM, "sink": SINK, "recent": RECENT,
        "lfps": {"rows": 32, "decay": 0.95, "sparsity": 0.85, "threshold": args.threshold},
        "steps": args.steps,
        "runs": [measure(n, g, args) for n in args.sizes for g in args.groups],
    }  # fmt: skip
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
