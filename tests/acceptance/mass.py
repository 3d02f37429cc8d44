# SPDX-License-Identifier: Apache-2.0
"""Item *mass*: the sparse path really runs, and how much attention mass it recovers."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rank_servers import Server, ours
from workbench import (
    ATTENDED_512,
    EXACT_LAYERS,
    SPARSE_512,
    STREAMING_512,
    Bench,
    Checks,
    quality,
    tokenizer,
)

PREFIX_TOKENS = (3000, 4000, 5000, 5900)
FORCED_TOKENS = 96
SELECTIONS: dict[str, dict[str, Any]] = {
    "look_ahead": SPARSE_512 | {"policy": "look_ahead"},
    "async_spade": SPARSE_512 | {"policy": "async_spade"},
    "streaming": STREAMING_512,
}
PROOF = ("selections_total", "fetched_rows_total", "resident_misses_total")


def run(bench: Bench) -> dict[str, Any]:
    """Four texts, prompts of 3000-5900 tokens, the same forced tokens for every policy."""
    corpus, tok = quality.texts(), tokenizer()

    def force(server: Server) -> None:
        def one(item: tuple[tuple[str, str], int]) -> None:
            (name, text), length = item
            quality.perplexity(server.url, tok, {name: text}, length, FORCED_TOKENS)

        with ThreadPoolExecutor(len(corpus)) as pool:
            list(pool.map(one, zip(corpus.items(), PREFIX_TOKENS, strict=True)))

    def task(selection: dict[str, Any]) -> Callable[[], dict[str, Any]]:
        def collect() -> dict[str, Any]:
            with tempfile.TemporaryDirectory() as folder:
                probe = Path(folder) / "probe.jsonl"
                tree = {"selection": selection, "evaluation": True, "max_running_requests": 4}
                with ours(tree, environ={"TANDEMKV_PROBE_FILE": str(probe)}) as server:
                    force(server)
                    counters = server.values()[1]
                lines = [json.loads(line) for line in probe.read_text().splitlines()]
                return {"probes": lines, "counters": counters}

        return collect

    return summarise(bench.run("mass", {n: task(s) for n, s in SELECTIONS.items()}))


def summarise(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Mean recovered mass by policy, and the oracle's at as many tokens."""
    rows: dict[str, Any] = {}
    for name, result in found.items():
        probes = result["probes"]
        rows[name] = {
            "mass": _mean(probes, "mass"),
            "oracle_mass": _mean(probes, "oracle_mass"),
            "mass_by_layer": {
                str(layer): _mean([p for p in probes if p["layer"] == layer], "mass")
                for layer in sorted({p["layer"] for p in probes})
            },
            "probes": len(probes),
            "lengths": [min(p["length"] for p in probes), max(p["length"] for p in probes)],
            "attended_tokens": sorted({p["attended"] for p in probes}),
            "counters": {key: result["counters"][key] for key in PROOF},
        }
    checks = Checks()
    for key in PROOF:
        value = rows["look_ahead"]["counters"][key]
        checks.add(f"look_ahead: {key}", value, "> 0", value > 0)
    attended = sorted({n for row in rows.values() for n in row["attended_tokens"]})
    checks.add("attended tokens", attended, f"{ATTENDED_512} for all", attended == [ATTENDED_512])
    order = {"oracle": rows["look_ahead"]["oracle_mass"]}
    order |= {name: rows[name]["mass"] for name in ("look_ahead", "async_spade", "streaming")}
    values = list(order.values())
    checks.add(
        "mean recovered mass",
        order,
        "oracle >= look_ahead >= async_spade >= streaming",
        values == sorted(values, reverse=True),
    )
    return checks.result(
        order=list(order), mass=values, exact_layers_left_out=EXACT_LAYERS, rows=rows
    )


def _mean(probes: list[dict[str, Any]], key: str) -> float:
    return statistics.fmean(value for probe in probes for value in probe[key])
