# SPDX-License-Identifier: Apache-2.0
"""Item *speed*: decode of ours and of stock SGLang, in turns in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

from rank_servers import Server, ours, stock
from workbench import EXACT_LAYERS, SPARSE_512, Bench, Checks, long_ids

LENGTHS = (500, 3000, 6000)
NEW_TOKENS = 34
ROUNDS = 3
TURNS = 2
"""Each server is started so often, in turns: an idle one beside it would take CPU time."""
STOCK = "stock SGLang, torch_native"

Found = dict[str, dict[str, list[float]]]


def run(_bench: Bench) -> dict[str, Any]:
    """Milliseconds per token of one request and of four at once, by context length."""
    servers: dict[str, Callable[[], AbstractContextManager[Server]]] = {
        STOCK: stock,
        "look_ahead, K = 512": lambda: ours({"selection": SPARSE_512 | {"policy": "look_ahead"}}),
        "exact": lambda: ours({"selection": {"policy": "exact"}}),
    }
    ids = long_ids()
    times: dict[str, Found] = {name: {} for name in servers}
    for _ in range(TURNS):
        for name, start in servers.items():
            with start() as server:
                measure(server, ids, times[name])
    checks = Checks()
    figures = [t for row in times.values() for kind in row.values() for t in kind.values()]
    checks.add("figures", len(figures), "all above 0", min(map(min, figures)) > 0)
    medians = {
        name: {
            kind: {length: statistics.median(found) for length, found in by_length.items()}
            for kind, by_length in row.items()
        }
        for name, row in times.items()
    }
    ratios = {
        name: {
            kind: {length: value / medians[STOCK][kind][length] for length, value in row.items()}
            for kind, row in kinds.items()
        }
        for name, kinds in medians.items()
        if name != STOCK
    }
    return checks.result(
        ms_per_step_by_context=medians,
        ratio_to_stock=ratios,
        all_ms_per_step=times,
        exact_layers=EXACT_LAYERS,
    )


def measure(server: Server, ids: list[int], times: Found) -> None:
    """Add times of a decode step: long minus short generations after a cached prompt."""
    for at_once in (1, 4):
        by_length = times.setdefault(f"{at_once} at once", {})
        for length in LENGTHS:
            prompts = [[100 + i, *ids[: length - 1]] for i in range(at_once)]
            _timed(server, prompts, 2)
            for _ in range(ROUNDS):
                short = _timed(server, prompts, 2)
                long = _timed(server, prompts, NEW_TOKENS)
                gap = (long - short) / (NEW_TOKENS - 2) * 1e3
                by_length.setdefault(str(length), []).append(gap)


def _timed(server: Server, prompts: list[list[int]], new_tokens: int) -> float:
    def one(prompt: list[int]) -> None:
        params = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        server.generate(input_ids=prompt, sampling_params=params)

    start = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(one, prompts))
    return time.perf_counter() - start
