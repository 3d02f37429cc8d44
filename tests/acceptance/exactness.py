# SPDX-License-Identifier: Apache-2.0
"""Tokens and logprobs against stock SGLang, request by request."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rank_servers import Server

LOGPROB_TOLERANCE = 1e-3

COVERING = {"budget_tokens": 2048, "resident_factor": 2.0, "seed_window": 64}
VARIANTS: dict[str, dict[str, Any]] = {
    "exact": {"policy": "exact"},
    "look_ahead, as it is": COVERING | {"policy": "look_ahead"},
    "look_ahead, dense_while_fits = false": COVERING
    | {"policy": "look_ahead", "dense_while_fits": False},
    "async_spade, as it is": COVERING | {"policy": "async_spade"},
    "async_spade, dense_while_fits = false": COVERING
    | {"policy": "async_spade", "dense_while_fits": False},
}


def make_prompts(
    ids: list[int], *, count: int, shortest: int, longest: int, seed: int = 7
) -> list[list[int]]:
    """Slices of a tokenized text, geometrically spaced lengths; every fourth shares a prefix.

    Parameters
    ----------
    ids : list of int
        The text.
    count : int
        Number of prompts.
    shortest, longest : int
        Lengths in tokens.
    seed : int
        Of the start positions.
    """
    rng = random.Random(seed)
    ratio = (longest / shortest) ** (1 / max(1, count - 1))
    prompts = []
    for i in range(count):
        length = round(shortest * ratio**i)
        start = rng.randrange(len(ids) - length)
        prompt = ids[start : start + length]
        if i % 4 == 3:  # shares half of the prompt before it
            shared = prompts[-1][: len(prompts[-1]) // 2]
            prompt = shared + prompt[len(shared) :]
        prompts.append(prompt)
    return prompts


def run(server: Server, prompts: list[list[int]], *, new_tokens: int, at_once: int) -> list[Any]:
    """Greedy continuations with their logprobs: ``[(ids, logprobs)]``."""

    def one(prompt: list[int]) -> tuple[list[int], list[float]]:
        found = server.generate(
            input_ids=prompt,
            return_logprob=True,
            sampling_params={"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True},
        )
        pairs = found["meta_info"]["output_token_logprobs"]
        return [token for _, token, _ in pairs], [logprob for logprob, _, _ in pairs]

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, prompts))


def flush(server: Server) -> None:
    """Empty the radix cache."""
    code, text = server.post("/flush_cache", {})
    assert code == 200, text


def compare(ours: list[Any], theirs: list[Any]) -> dict[str, Any]:
    """Requests whose tokens differ, and the largest difference of a logprob."""
    differing, worst = [], 0.0
    for i, ((ids, logprobs), (want_ids, want_logprobs)) in enumerate(
        zip(ours, theirs, strict=True)
    ):
        if ids != want_ids:
            differing.append(i)
            continue
        worst = max(worst, *(abs(a - b) for a, b in zip(logprobs, want_logprobs, strict=True)))
    return {
        "requests": len(ours),
        "differing": differing,
        "max_logprob_difference": worst,
        "pass": not differing and worst <= LOGPROB_TOLERANCE,
    }
