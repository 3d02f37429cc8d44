# SPDX-License-Identifier: Apache-2.0
"""Item *policies*: each policy over HTTP, the engine in SGLang's process and in one of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rank_servers import Server, ours
from workbench import Bench, Checks, long_ids

from tandemkv.cache_rank.policies.registry import POLICIES

PROMPT_TOKENS, NEW_TOKENS = 800, 24
SMALL = {"budget_tokens": 96, "resident_factor": 1.0, "num_recent_tokens": 16}
"""At most 116 tokens of a prompt are attended to."""
LINKS = {"local": 0, "shared": 1}
_MORE: dict[str, dict[str, Any]] = {
    "kascade": {"anchors": [0, 10, 20]},
    "streaming": {"sample_tokens": 0},
}
_OPTIONS = {"kascade": {"fraction": 0.1}}
_ROWS = ("sparse", "exact", "slow", "seeded", "fetched")
_TOTALS = ("attended_tokens", "context_tokens", "selections")
_KEPT = [f"{name}_rows_total" for name in _ROWS] + [f"{name}_total" for name in _TOTALS]
FETCHES_NOTHING = ("exact", "streaming", "lfps")


def generate(server: Server, ids: list[int]) -> dict[str, Any]:
    """Decode behind a prompt; returns ``ids`` and ``logprobs``."""
    found = server.generate(
        input_ids=ids[:PROMPT_TOKENS],
        return_logprob=True,
        sampling_params={"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True},
    )
    pairs = found["meta_info"]["output_token_logprobs"]
    assert len(pairs) == NEW_TOKENS
    return {"ids": [x for _, x, _ in pairs], "logprobs": [x for x, _, _ in pairs]}


def on_both_links(policy: str, ids: list[int]) -> dict[str, Any]:
    """Serve the same prompt on both links, by name; with counters."""
    found = {}
    for link, cache_ranks in LINKS.items():
        selection = {"policy": policy, **SMALL, **_MORE.get(policy, {})}
        tree = {"cache_ranks": cache_ranks, "selection": selection, "policy_options": _OPTIONS}
        with ours(tree) as server:
            answer = generate(server, ids)
            inference, cache = server.values()
        values = cache | inference
        found[link] = answer | {key: values[key] for key in _KEPT if key in values}
    return found


def difference(found: dict[str, Any]) -> tuple[int, float]:
    """Tokens that differ between the links, and the largest difference of a logprob."""
    local, shared = found["local"], found["shared"]
    tokens = sum(a != b for a, b in zip(local["ids"], shared["ids"], strict=True))
    pairs = zip(local["logprobs"], shared["logprobs"], strict=True)
    return tokens, max(abs(a - b) for a, b in pairs)


def run(bench: Bench) -> dict[str, Any]:
    """All policies on both links, 24 tokens behind 800 each."""
    ids, checks = long_ids(), Checks()

    def task(policy: str) -> Callable[[], Any]:
        return lambda: on_both_links(policy, ids)

    found = bench.run("policies", {policy: task(policy) for policy in POLICIES})
    for policy, both in found.items():
        tokens, worst = difference(both)
        checks.add(f"{policy}: tokens that differ of {NEW_TOKENS}", tokens, "0", tokens == 0)
        checks.add(f"{policy}: largest logprob difference", worst, "<= 1e-5", worst <= 1e-5)
        wanted = 0 if policy == "exact" else NEW_TOKENS - 1
        steps = [both[link]["sparse_rows_total"] for link in LINKS]
        checks.add(f"{policy}: sparse steps", steps, f"{wanted}, {wanted}", steps == [wanted] * 2)
        if policy not in FETCHES_NOTHING:
            rows = [both[link]["fetched_rows_total"] for link in LINKS]
            checks.add(f"{policy}: fetched rows", rows, "equal, > 0", rows[0] == rows[1] > 0)
    return checks.result(prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS, rows=found)
