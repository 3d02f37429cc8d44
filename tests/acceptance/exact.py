# SPDX-License-Identifier: Apache-2.0
"""Item *exact*: with everything covered, the tokens of stock SGLang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import exactness
from rank_servers import Server, ours, stock
from workbench import Bench, Checks, long_ids

NEW_TOKENS = 64


def run(bench: Bench) -> dict[str, Any]:
    """20 unrelated prompts of 50-3000 tokens and 20 in families, x 64 new tokens."""
    ids = long_ids()
    unrelated = exactness.make_prompts(ids, count=20, shortest=50, longest=3000)
    families = exactness.make_families(ids, families=5, shortest=60, longest=2400)
    passes = {
        "alone": (unrelated, 1, True),
        "four at a time": (unrelated, 4, True),
        "again, whole prompt cached, four at a time": (unrelated, 4, False),
        "shared prefixes, alone": (families, 1, True),
        "shared prefixes, four at a time": (families, 4, True),
    }

    def collect(server: Server) -> dict[str, Any]:
        found = {}
        for name, (prompts, at_once, is_cold) in passes.items():
            if is_cold:
                exactness.flush(server)
            found[name] = exactness.run(server, prompts, new_tokens=NEW_TOKENS, at_once=at_once)
        return found

    def reference() -> dict[str, Any]:
        with stock() as server:
            return collect(server)

    def variant(selection: dict[str, Any]) -> Callable[[], dict[str, Any]]:
        def task() -> dict[str, Any]:
            with ours({"selection": selection}) as server:
                return collect(server) | {"counters": server.values()}

        return task

    tasks = {"stock": reference} | {n: variant(s) for n, s in exactness.VARIANTS.items()}
    found = bench.run("exact", tasks)
    checks, rows = Checks(), {}
    for name in exactness.VARIANTS:
        inference, cache = found[name]["counters"]
        rows[name] = {p: exactness.compare(found[name][p], found["stock"][p]) for p in passes}
        _judge(checks, name, rows[name], inference, cache)
        rows[name]["counters"] = {
            key: inference[key]
            for key in ("decode_steps_total", "sparse_rows_total", "dense_rows_total",
                        "exact_rows_total", "seeded_rows_total")
        } | {key: cache[key] for key in ("selections_total", "fetched_rows_total")}  # fmt: skip
    return checks.result(
        prompt_lengths=[len(p) for p in unrelated],
        prompt_lengths_shared=[len(p) for p in families],
        new_tokens=NEW_TOKENS,
        rows=rows,
    )


def _judge(
    checks: Checks,
    name: str,
    passes: dict[str, Any],
    inference: dict[str, float],
    cache: dict[str, float],
) -> None:
    differing = sum(len(found["differing"]) for found in passes.values())
    requests = sum(found["requests"] for found in passes.values())
    worst = max(found["max_logprob_difference"] for found in passes.values())
    checks.add(f"{name}: requests that differ of {requests}", differing, "0", differing == 0)
    checks.add(
        f"{name}: largest logprob difference",
        worst,
        f"<= {exactness.LOGPROB_TOLERANCE}",
        worst <= exactness.LOGPROB_TOLERANCE,
    )
    cached = sum(found["cached_tokens"] for found in passes.values())
    checks.add(f"{name}: tokens from the radix cache", cached, "> 0", cached > 0)
    if "false" in name:
        rows = cache["fetched_rows_total"]
        checks.add(f"{name}: rows fetched", rows, "> 0", rows > 0)
    elif name == "exact":
        rows = inference["exact_rows_total"]
        checks.add(f"{name}: exact rows", rows, "> 0", rows > 0)
