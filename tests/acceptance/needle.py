# SPDX-License-Identifier: Apache-2.0
"""Item *needle*: a fact at a random depth of 3-6K tokens, budget 1024."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rank_servers import ours
from workbench import (
    ATTENDED_1024,
    DENSE,
    EXACT_LAYERS,
    SPARSE_1024,
    STREAMING_1024,
    Bench,
    Checks,
    quality,
    tokenizer,
)

SELECTIONS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "look_ahead": SPARSE_1024 | {"policy": "look_ahead"},
    "streaming": STREAMING_1024,
    "async_spade": SPARSE_1024 | {"policy": "async_spade"},
    "last_query": SPARSE_1024 | {"policy": "last_query"},
}


def run(bench: Bench) -> dict[str, Any]:
    """20 prompts made by a script; the answer is four digits."""
    corpus, tok = quality.texts(), tokenizer()

    def task(selection: dict[str, Any]) -> Callable[[], Any]:
        def collect() -> Any:
            with ours({"selection": selection, "max_running_requests": 4}) as server:
                return quality.needle(server.url, tok, corpus)

        return collect

    return summarise(bench.run("needle", {n: task(s) for n, s in SELECTIONS.items()}))


def summarise(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Right answers by policy."""
    right = {name: sum(r["is_right"] for r in rows) for name, rows in found.items()}
    checks = Checks()
    checks.add("dense: right of 20", right["dense"], ">= 15", right["dense"] >= 15)
    checks.add(
        "look_ahead: right of 20",
        right["look_ahead"],
        f">= dense - 1 = {right['dense'] - 1}",
        right["look_ahead"] >= right["dense"] - 1,
    )
    checks.add(
        "streaming: right of 20",
        right["streaming"],
        f"clearly fewer, <= look_ahead - 4 = {right['look_ahead'] - 4}",
        right["streaming"] <= right["look_ahead"] - 4,
    )
    return checks.result(
        attended_tokens=ATTENDED_1024, exact_layers=EXACT_LAYERS, right_of_20=right, rows=found
    )
