# SPDX-License-Identifier: Apache-2.0
"""Item *policies*: each policy over HTTP, by each link to the engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rank_servers import Server, ours
from workbench import Bench, Checks, long_ids

from tandemkv.cache_rank.policies.registry import POLICIES
from tandemkv.cache_rank.protocol.heartbeat import request_status
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.server.launch.message_launch import FAR_FOLDER

PROMPT_TOKENS, NEW_TOKENS = 800, 24
SMALL = {"budget_tokens": 96, "resident_factor": 1.0, "num_recent_tokens": 16}
"""At most 116 tokens of a prompt are attended to."""
LINKS: dict[str, dict[str, Any]] = {
    "local": {"cache_ranks": 0},
    "shared": {"cache_ranks": 1},
    "message": {"transport": "message"},
}
LARGEST_DIFFERENCE = {"shared": 1e-5, "message": 1e-4}
"""Of a logprob. By messages the latest tokens lie in a ring, and sums are in another order."""
ROWS_BY_ROUNDING = 0.001
"""What a query that was rounded otherwise may choose otherwise, of two tokens alike."""
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


def on_link(policy: str, link: str, ids: list[int]) -> dict[str, Any]:
    """Serve a prompt on a link; with counters."""
    selection = {"policy": policy, **SMALL, **_MORE.get(policy, {})}
    tree = LINKS[link] | {"selection": selection, "policy_options": _OPTIONS}
    with ours(tree) as server:
        answer = generate(server, ids)
        inference, cache = server.values()
        if link == "message":  # the run directory's own cache rank is a pump
            assert server.run_dir is not None
            far = RunDir.open(server.run_dir / FAR_FOLDER)
            cache = request_status(far.heartbeat_socket, 10.0).values
    values = cache | inference
    return answer | {key: values[key] for key in _KEPT if key in values}


def difference(local: dict[str, Any], other: dict[str, Any]) -> tuple[int, float]:
    """Tokens that differ between two links, and the largest difference of a logprob."""
    tokens = sum(a != b for a, b in zip(local["ids"], other["ids"], strict=True))
    pairs = zip(local["logprobs"], other["logprobs"], strict=True)
    return tokens, max(abs(a - b) for a, b in pairs)


def judge(checks: Checks, policy: str, found: dict[str, Any]) -> None:
    """Compare a policy's answers, by link, with those of link ``local``."""
    for link in LARGEST_DIFFERENCE:
        name = f"{policy}, {link}"
        tokens, worst = difference(found["local"], found[link])
        checks.add(f"{name}: tokens that differ of {NEW_TOKENS}", tokens, "0", tokens == 0)
        limit = LARGEST_DIFFERENCE[link]
        checks.add(f"{name}: largest logprob difference", worst, f"<= {limit:g}", worst <= limit)
    wanted = [0 if policy == "exact" else NEW_TOKENS - 1] * len(LINKS)
    steps = [found[link]["sparse_rows_total"] for link in LINKS]
    checks.add(f"{policy}: sparse steps", steps, str(wanted), steps == wanted)
    if policy not in FETCHES_NOTHING:
        rows = [found[link]["fetched_rows_total"] for link in LINKS]
        is_same = rows[0] == rows[1] and abs(rows[2] - rows[0]) <= ROWS_BY_ROUNDING * rows[0]
        required = f"> 0; {ROWS_BY_ROUNDING:.1%} more or less by messages"
        checks.add(f"{policy}: fetched rows", rows, required, is_same and rows[0] > 0)


def tasks(ids: list[int]) -> dict[str, Callable[[], Any]]:
    """Each policy on each link, by name: 24 tokens behind 800."""
    pairs = [(policy, link) for policy in POLICIES for link in LINKS]
    return {f"{policy} {link}": partial(on_link, policy, link, ids) for policy, link in pairs}


def run(bench: Bench) -> dict[str, Any]:
    """All policies on all links."""
    found, checks = bench.run("policies", tasks(long_ids())), Checks()
    rows = {policy: {link: found[f"{policy} {link}"] for link in LINKS} for policy in POLICIES}
    for policy, by_link in rows.items():
        judge(checks, policy, by_link)
    return checks.result(prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS, rows=rows)
