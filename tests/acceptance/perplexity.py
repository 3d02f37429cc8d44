# SPDX-License-Identifier: Apache-2.0
"""Item *perplexity*: real texts forced through decode, against dense."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from typing import Any

from rank_servers import ours
from workbench import (
    ATTENDED_512,
    DENSE,
    EXACT_LAYERS,
    SPARSE_512,
    STREAMING_512,
    Bench,
    Checks,
    quality,
    tokenizer,
)

SELECTIONS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "look_ahead": SPARSE_512 | {"policy": "look_ahead"},
    "exact": {"policy": "exact"},
    "oracle": SPARSE_512 | {"policy": "oracle"},
    "last_query": SPARSE_512 | {"policy": "last_query"},
    "async_spade": SPARSE_512 | {"policy": "async_spade"},
    "streaming": STREAMING_512,
}
BLOCK_TOKENS = 16
DRAWS = 4000


def run(bench: Bench) -> dict[str, Any]:
    """Four texts, 6500 tokens of prefix, 320 forced tokens each, K = 512, c = 2."""
    corpus, tok = quality.texts(), tokenizer()

    def task(selection: dict[str, Any]) -> Callable[[], dict[str, Any]]:
        def collect() -> dict[str, Any]:
            tree = {"selection": selection, "evaluation": True, "max_running_requests": 4}
            with ours(tree) as server:
                rows = quality.perplexity(
                    server.url, tok, corpus, quality.PREFIX_TOKENS, quality.FORCED_TOKENS
                )
                nll = {row["text"]: row["nll"] for row in rows}
                return {"nll": nll, "counters": server.values()}

        return collect

    found = bench.run("perplexity", {n: task(s) for n, s in SELECTIONS.items()})
    return summarise(found)


def summarise(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Change of perplexity against dense; the mean is over texts."""
    dense, rows = found["dense"]["nll"], {}
    for name, result in found.items():
        texts = result["nll"]
        gaps = {t: [a - b for a, b in zip(v, dense[t], strict=True)] for t, v in texts.items()}
        low, high = interval(list(gaps.values()))
        inference, cache = result["counters"]
        nll = statistics.fmean(statistics.fmean(v) for v in texts.values())
        rows[name] = {
            "nll": nll,
            "perplexity": math.exp(nll),
            "change_percent": _percent(statistics.fmean(map(statistics.fmean, gaps.values()))),
            "interval_95_percent": [_percent(low), _percent(high)],
            "change_percent_by_text": {t: _percent(statistics.fmean(g)) for t, g in gaps.items()},
            "attended_of_context": inference["attended_tokens_total"]
            / max(1.0, inference["context_tokens_total"]),
            "fetched_rows": cache["fetched_rows_total"],
            "forced_tokens": inference["forced_tokens_total"],
        }
    checks = Checks()
    change = rows["look_ahead"]["change_percent"]
    checks.add("look_ahead: change of perplexity, %", change, "within 1", abs(change) <= 1.0)
    forced = min(len(v) for v in dense.values())
    checks.add("tokens of each text through decode", forced, ">= 300", forced >= 300)
    return checks.result(
        texts=list(dense),
        prefix_tokens=quality.PREFIX_TOKENS,
        forced_tokens_through_decode=forced,
        attended_tokens=ATTENDED_512,
        exact_layers=EXACT_LAYERS,
        interval=f"bootstrap of blocks of {BLOCK_TOKENS} tokens within each text, {DRAWS} draws",
        rows=rows,
    )


def interval(gaps: list[list[float]], seed: int = 0) -> tuple[float, float]:
    """95 % interval of the mean over texts of mean gaps; neighbouring tokens stay together."""
    rng = random.Random(seed)
    blocks = [
        [statistics.fmean(g[i : i + BLOCK_TOKENS]) for i in range(0, len(g), BLOCK_TOKENS)]
        for g in gaps
    ]
    draws = sorted(
        statistics.fmean(statistics.fmean(rng.choices(b, k=len(b))) for b in blocks)
        for _ in range(DRAWS)
    )
    return draws[round(0.025 * DRAWS)], draws[round(0.975 * DRAWS) - 1]


def _percent(gap: float) -> float:
    return 100 * math.expm1(gap)
