# SPDX-License-Identifier: Apache-2.0
"""Item *speed*: decode of ours and of stock SGLang, one after the other in one run."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rank_servers import Server, ours, stock
from workbench import EXACT_LAYERS, SPARSE_512, Bench, Checks, long_ids

LENGTHS = (500, 3000, 6000)
NEW_TOKENS = 34
ROUNDS = 3


def run(_bench: Bench) -> dict[str, Any]:
    """Milliseconds per token of one request and of four at once, by context length."""
    ids, rows = long_ids(), {}
    with stock() as server:
        rows["stock SGLang, torch_native"] = measure(server, ids)
    selections: dict[str, dict[str, Any]] = {
        "look_ahead, K = 512": SPARSE_512 | {"policy": "look_ahead"},
        "exact": {"policy": "exact"},
    }
    for name, selection in selections.items():
        with ours({"selection": selection}) as server:
            rows[name] = measure(server, ids)
    checks = Checks()
    times = [t for row in rows.values() for kind in row.values() for t in kind.values()]
    checks.add("figures", len(times), "all above 0", min(times) > 0)
    return checks.result(ms_per_step_by_context=rows, exact_layers=EXACT_LAYERS)


def measure(server: Server, ids: list[int]) -> dict[str, dict[str, float]]:
    """Median time of a decode step: long minus short generations after a cached prompt."""
    found: dict[str, dict[str, float]] = {}
    for at_once in (1, 4):
        by_length = {}
        for length in LENGTHS:
            prompts = [[100 + i, *ids[: length - 1]] for i in range(at_once)]
            _timed(server, prompts, 2)
            gaps = []
            for _ in range(ROUNDS):
                short = _timed(server, prompts, 2)
                long = _timed(server, prompts, NEW_TOKENS)
                gaps.append((long - short) / (NEW_TOKENS - 2) * 1e3)
            by_length[str(length)] = statistics.median(gaps)
        found[f"{at_once} at once"] = by_length
    return found


def _timed(server: Server, prompts: list[list[int]], new_tokens: int) -> float:
    def one(prompt: list[int]) -> None:
        params = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        server.generate(input_ids=prompt, sampling_params=params)

    start = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(one, prompts))
    return time.perf_counter() - start
