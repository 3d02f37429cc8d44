# SPDX-License-Identifier: Apache-2.0
"""The acceptance items. Each returns a JSON object with figures and ``pass``."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import exactness
import life_cycle
import sockets
from rank_servers import Server, environment, model_dir, ours, stock

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("quality", ROOT / "tests/bench/quality.py")
assert _spec is not None
assert _spec.loader is not None
quality = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(quality)

SPARSE_512 = {"budget_tokens": 512, "resident_factor": 2.0, "num_recent_tokens": 64}
# Streaming attends to as many tokens as the others: 4 + 2 * 512 + 64.
STREAMING_512 = {"policy": "streaming", "num_recent_tokens": 1088}
STREAMING_1024 = {"policy": "streaming", "num_recent_tokens": 2112}
DENSE = {"policy": "look_ahead", "budget_tokens": 4200}


def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir())


def _long_ids() -> list[int]:
    return list(_tokenizer()(quality.texts()["language reference"][:120_000])["input_ids"])


def _parallel(jobs: int, tasks: dict[str, Any]) -> dict[str, Any]:
    with ThreadPoolExecutor(jobs) as pool:
        futures = {name: pool.submit(task) for name, task in tasks.items()}
        return {name: future.result() for name, future in futures.items()}


def exact(jobs: int) -> dict[str, Any]:
    """20 prompts of 50-3000 tokens x 64: tokens of stock SGLang, alone and four at a time."""
    prompts = exactness.make_prompts(_long_ids(), count=20, shortest=50, longest=3000)
    passes = (
        ("alone", 1, True),
        ("four at a time, radix hits", 4, False),
        ("four at a time", 4, True),
    )

    def collect(server: Server) -> dict[str, Any]:
        found = {}
        for name, at_once, cold in passes:
            if cold:
                exactness.flush(server)
            found[name] = exactness.run(server, prompts, new_tokens=64, at_once=at_once)
        return found

    def reference() -> dict[str, Any]:
        with stock() as server:
            return collect(server)

    def variant(selection: dict[str, Any]) -> Any:
        def run() -> dict[str, Any]:
            with ours({"selection": selection}) as server:
                found = collect(server)
                return found | {"counters": server.values()}

        return run

    tasks = {"stock": reference} | {n: variant(s) for n, s in exactness.VARIANTS.items()}
    found = _parallel(jobs, tasks)
    rows = {}
    for name in exactness.VARIANTS:
        inference, cache = found[name]["counters"]
        rows[name] = {
            pass_name: exactness.compare(found[name][pass_name], found["stock"][pass_name])
            for pass_name, _, _ in passes
        } | {
            "packs": inference["packs_total"],
            "fetched_rows": cache["fetched_rows_total"],
            "exact_rows": inference["exact_rows_total"],
            "stale_reads": cache["stale_reads_total"],
        }
    return {
        "prompt_lengths": [len(p) for p in prompts],
        "new_tokens": 64,
        "rows": rows,
        "pass": all(row[name]["pass"] for row in rows.values() for name, _, _ in passes)
        and all(row["stale_reads"] == 0 for row in rows.values()),
    }


def perplexity(jobs: int) -> dict[str, Any]:
    """Forced decode of four real texts, against dense."""
    settings = {p: SPARSE_512 | {"policy": p} for p in ("look_ahead", "oracle", "async_spade")}
    settings |= {"last_query": SPARSE_512 | {"policy": "last_query"}, "exact": {"policy": "exact"}}
    settings |= {"streaming": STREAMING_512, "dense": DENSE}
    corpus, tokenizer = quality.texts(), _tokenizer()

    def task(selection: dict[str, Any]) -> Any:
        def run() -> Any:
            tree = {"selection": selection, "evaluation": True, "max_running_requests": 4}
            with ours(tree) as server:
                rows = quality.perplexity(
                    server.url, tokenizer, corpus, quality.PREFIX_TOKENS, quality.FORCED_TOKENS
                )
                return {row["text"]: row["nll"] for row in rows}

        return run

    return summarise_perplexity(_parallel(jobs, {n: task(s) for n, s in settings.items()}))


def summarise_perplexity(nll: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Change of perplexity against dense, mean over texts; bootstrap interval over tokens."""
    rng, rows = random.Random(0), {}
    dense = nll["dense"]
    for name, texts in nll.items():
        gaps = {t: [a - b for a, b in zip(v, dense[t], strict=True)] for t, v in texts.items()}
        draws = sorted(
            statistics.fmean(statistics.fmean(rng.choices(g, k=len(g))) for g in gaps.values())
            for _ in range(2000)
        )
        mean = statistics.fmean(statistics.fmean(g) for g in gaps.values())
        rows[name] = {
            "nll": statistics.fmean(statistics.fmean(v) for v in texts.values()),
            "change_percent": 100 * math.expm1(mean),
            "interval_95_percent": [100 * math.expm1(draws[i]) for i in (50, 1949)],
            "change_percent_by_text": {
                t: 100 * math.expm1(statistics.fmean(g)) for t, g in gaps.items()
            },
        }
    return {
        "prefix_tokens": quality.PREFIX_TOKENS,
        "forced_tokens_through_decode": quality.FORCED_TOKENS - 1,
        "attended_tokens": 4 + 2 * 512 + 64,
        "exact_layers": "0,1",
        "rows": rows,
        "pass": abs(rows["look_ahead"]["change_percent"]) <= 1.0,
    }


def needle(jobs: int) -> dict[str, Any]:
    """20 prompts of 3-6K tokens with a fact at a random depth; budget 1024."""
    settings = {p: {"policy": p, "budget_tokens": 1024} for p in ("look_ahead", "async_spade")}
    settings |= {"last_query": {"policy": "last_query", "budget_tokens": 1024}}
    settings |= {"streaming": STREAMING_1024, "dense": DENSE}
    corpus, tokenizer = quality.texts(), _tokenizer()

    def task(selection: dict[str, Any]) -> Any:
        def run() -> Any:
            with ours({"selection": selection, "max_running_requests": 4}) as server:
                return quality.needle(server.url, tokenizer, corpus)

        return run

    return summarise_needle(_parallel(jobs, {n: task(s) for n, s in settings.items()}))


def summarise_needle(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Right answers by policy."""
    right = {name: sum(r["is_right"] for r in rows) for name, rows in found.items()}
    return {
        "attended_tokens": 4 + 2 * 1024 + 64,
        "right_of_20": right,
        "rows": found,
        "pass": right["dense"] >= 15
        and right["look_ahead"] >= right["dense"] - 1
        and right["streaming"] < right["look_ahead"] - 3,
    }


def mass(jobs: int) -> dict[str, Any]:
    """Attention mass recovered on the attended tokens, in float64."""
    settings = {p: SPARSE_512 | {"policy": p} for p in ("look_ahead", "async_spade")}
    settings |= {"streaming": STREAMING_512}
    corpus, tokenizer = quality.texts(), _tokenizer()

    def task(selection: dict[str, Any]) -> Any:
        def run() -> Any:
            with tempfile.TemporaryDirectory() as folder:
                probe = Path(folder) / "probe.jsonl"
                tree = {"selection": selection, "evaluation": True, "max_running_requests": 4}
                with ours(tree, environ={"TANDEMKV_PROBE_FILE": str(probe)}) as server:
                    quality.perplexity(server.url, tokenizer, corpus, 4500, 96)
                    counters = server.values()[1]
                return probe.read_text().splitlines(), counters

        return run

    found = _parallel(jobs, {n: task(s) for n, s in settings.items()})
    return summarise_mass(found)


def summarise_mass(found: dict[str, tuple[list[str], dict[str, float]]]) -> dict[str, Any]:
    """Mean recovered mass by policy, and the oracle's at as many tokens."""
    rows: dict[str, Any] = {}
    for name, (lines, counters) in found.items():
        probes = [json.loads(line) for line in lines]
        rows[name] = {
            "mass": statistics.fmean(m for p in probes for m in p["mass"]),
            "oracle_mass": statistics.fmean(m for p in probes for m in p["oracle_mass"]),
            "probes": len(probes),
            "attended_tokens": sorted({p["attended"] for p in probes}),
            "counters": {
                k: counters[k]
                for k in ("selections_total", "fetched_rows_total", "evictions_total")
            },
        }
    order = [rows["look_ahead"]["oracle_mass"]]
    order += [rows[name]["mass"] for name in ("look_ahead", "async_spade", "streaming")]
    return {
        "order": ["oracle", "look_ahead", "async_spade", "streaming"],
        "mass": order,
        "rows": rows,
        "pass": order == sorted(order, reverse=True),
    }


def life(_jobs: int) -> dict[str, Any]:
    """200 requests with aborts and hang-ups; then nothing is left anywhere."""
    ids = _long_ids()
    small = {"policy": "look_ahead", "budget_tokens": 96, "num_recent_tokens": 16}
    with ours({"selection": small}) as server:
        files_before = sum(p.num_fds() for p in server.processes())
        outcomes = life_cycle.storm(server, ids, count=200, longest=900)
        idle_s = life_cycle.wait_idle(server, 60.0)
        body = {
            "input_ids": ids[:300],
            "sampling_params": {"max_new_tokens": 500, "temperature": 0, "ignore_eos": True},
        }
        life_cycle.read_some(server, body, lines=3)
        hang_up_s = life_cycle.wait_idle(server, 30.0)
        idle = life_cycle.books(server)
        left = life_cycle.after_flush(server)
        files_after = sum(p.num_fds() for p in server.processes())
        listeners = [
            {"process": name, "address": address, "port": port}
            for name, address, port in sockets.listening(server)
        ]
        own = sockets.of_cache_rank(server)
    return {
        "outcomes": outcomes,
        "seconds_to_idle": idle_s,
        "seconds_from_hang_up_to_free": hang_up_s,
        "books_at_idle": idle,
        "books_after_flush": left,
        "open_files": [files_before, files_after],
        "listeners_of_all_processes": listeners,
        "listeners_of_the_cache_rank": own,
        "pass": left["cache_slots_live"] == 0
        and left["cache_rows_live"] == 0
        and left["stale_reads"] == 0
        and hang_up_s < 5.0
        and files_after <= files_before + 8
        and all(sockets.is_loopback(address) for address, _ in own),
    }


def dead_cache_rank(_jobs: int) -> dict[str, Any]:
    """Kill -9 in mid-stream: errors within 5 s, unready, then service again."""
    ids = _long_ids()
    small = {"policy": "look_ahead", "budget_tokens": 96, "num_recent_tokens": 16}
    with ours({"selection": small}) as server, ThreadPoolExecutor(4) as pool:
        body = {
            "input_ids": ids[:500],
            "sampling_params": {"max_new_tokens": 900, "temperature": 0, "ignore_eos": True},
        }
        pending = [pool.submit(server.post, "/generate", body) for _ in range(4)]
        while server.values()[1]["rows_live"] < 4:
            time.sleep(0.2)
        os.kill(server.cache_rank_pid(), signal.SIGKILL)
        start = time.monotonic()
        codes = [p.result()[0] for p in pending]
        ended_s = time.monotonic() - start
        unready = server.get("/tandemkv/ready")[0] == 503
        while server.get("/tandemkv/ready")[0] != 200 and time.monotonic() - start < 120:
            unready = True
            time.sleep(0.1)
        back_s = time.monotonic() - start
        after, _ = server.post(
            "/generate", {"text": "Hello", "sampling_params": {"max_new_tokens": 4}}
        )
    return {
        "codes": codes,
        "seconds_to_last_error": ended_s,
        "turned_unready": unready,
        "seconds_to_ready_again": back_s,
        "code_after": after,
        "pass": ended_s < 5.0 and unready and after == 200 and set(codes) == {503},
    }


def speed(_jobs: int) -> dict[str, Any]:
    """Decode time per token of ours and of stock SGLang, one after the other in one run."""
    ids, rows = _long_ids(), {}
    settings = {"look_ahead": SPARSE_512 | {"policy": "look_ahead"}, "exact": {"policy": "exact"}}

    def measure(server: Server) -> dict[str, float]:
        found = {}
        for length in (500, 3000, 6000):
            times = []
            for new in (2, 34, 2, 34, 2, 34):  # prefix cached after the first
                start = time.perf_counter()
                server.generate(
                    input_ids=ids[:length],
                    sampling_params={"max_new_tokens": new, "temperature": 0, "ignore_eos": True},
                )
                times.append(time.perf_counter() - start)
            gaps = [(b - a) / 32 * 1e3 for a, b in zip(times[2::2], times[3::2], strict=True)]
            found[str(length)] = statistics.median(gaps)
        return found

    with stock() as server:
        rows["stock SGLang, torch_native"] = measure(server)
    for name, selection in settings.items():
        with ours({"selection": selection}) as server:
            rows[name] = measure(server)
    return {"ms_per_token_by_context": rows, "budget_tokens": 512, "pass": True}


def outside(_jobs: int) -> dict[str, Any]:
    """Run sglang.bench_serving with random ids (openai-python is in tests/e2e)."""
    small = {"policy": "look_ahead", "budget_tokens": 96, "num_recent_tokens": 16}
    with ours({"selection": small}) as server:
        out = Path(tempfile.mkdtemp()) / "bench.jsonl"
        argv = [
            *(sys.executable, "-P", "-W", "ignore", "-m", "sglang.bench_serving"),
            *("--backend", "sglang-oai", "--base-url", server.url, "--tokenizer", model_dir()),
            *("--dataset-name", "random-ids", "--num-prompts", "12", "--random-input-len", "256"),
            *("--random-output-len", "16", "--max-concurrency", "4", "--output-file", str(out)),
            *("--model", "smollm2"),
        ]
        done = subprocess.run(
            argv, env=environment(), capture_output=True, text=True, timeout=900, check=False
        )
        lines = out.read_text().splitlines() if out.exists() else []
    figures = json.loads(lines[-1]) if lines else {}
    kept = {k: figures.get(k) for k in ("completed", "output_throughput", "median_tpot_ms")}
    return {
        "bench_serving": kept,
        "stderr": "" if lines else done.stderr[-2000:],
        "pass": figures.get("completed") == 12,
    }


ITEMS = {
    "exact": exact,
    "perplexity": perplexity,
    "needle": needle,
    "mass": mass,
    "life_cycle": life,
    "dead_cache_rank": dead_cache_rank,
    "speed": speed,
    "outside": outside,
}
