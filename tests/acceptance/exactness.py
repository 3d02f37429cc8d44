# SPDX-License-Identifier: Apache-2.0
"""Tokens and logprobs against stock SGLang, request by request."""

from __future__ import annotations

import random
import time
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
    """Unrelated slices of a tokenized text, of geometrically spaced lengths.

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
    lengths = [round(shortest * ratio**i) for i in range(count)]
    starts = [rng.randrange(len(ids) - length) for length in lengths]
    return [ids[start : start + n] for start, n in zip(starts, lengths, strict=True)]


def make_families(
    ids: list[int], *, families: int, shortest: int, longest: int, seed: int = 8
) -> list[list[int]]:
    """Families of four prompts with one prefix and unlike ends of up to a quarter of it.

    The last of each family is the first with one token more, so that a whole prompt is a
    prefix of another one.
    """
    rng = random.Random(seed)
    prompts = []
    for prefix in make_prompts(
        ids, count=families, shortest=shortest, longest=longest, seed=seed + 1
    ):
        members = []
        for _ in range(3):
            end = rng.randint(10, max(20, min(300, len(prefix) // 4)))
            start = rng.randrange(len(ids) - end)
            members.append(prefix + ids[start : start + end])
        prompts += [*members, [*members[0], ids[rng.randrange(len(ids))]]]
    return prompts


def run(
    server: Server, prompts: list[list[int]], *, new_tokens: int, at_once: int
) -> list[dict[str, Any]]:
    """Greedy continuations: ``ids``, their ``logprobs``, and ``margins`` to the second best."""

    def one(prompt: list[int]) -> dict[str, Any]:
        found = server.generate(
            input_ids=prompt,
            return_logprob=True,
            top_logprobs_num=2,
            sampling_params={"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True},
        )
        pairs = found["meta_info"]["output_token_logprobs"]
        best = found["meta_info"]["output_top_logprobs"]
        return {
            "ids": [token for _, token, _ in pairs],
            "logprobs": [logprob for logprob, _, _ in pairs],
            "margins": [top[0][0] - top[1][0] for top in best],
            "cached": found["meta_info"]["cached_tokens"],
        }

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, prompts))


def flush(server: Server, within_s: float = 30.0) -> None:
    """Empty the radix cache, once nothing runs.

    SGLang refuses while it counts a request as running, and it drops one that ended only in the
    turn of its loop after the one that sent the last token.
    """
    deadline = time.monotonic() + within_s
    while True:
        code, text = server.post("/flush_cache", {})
        if code == 200:
            return
        assert time.monotonic() < deadline, text
        time.sleep(0.1)


def check_with_hits(
    server: Server, prompts: list[list[int]], reference: list[dict[str, Any]], *, new_tokens: int
) -> None:
    """Fail unless answers are `reference`: alone, and with radix hits."""
    alone = compare(run(server, prompts, new_tokens=new_tokens, at_once=1), reference)
    assert alone["pass"], alone
    warm = compare(run(server, prompts, new_tokens=new_tokens, at_once=4), reference)
    assert warm["pass"], f"with radix hits, four at a time: {warm}"
    assert warm["cached_tokens"] > 0


def check_everywhere(
    server: Server, prompts: list[list[int]], reference: list[dict[str, Any]], *, new_tokens: int
) -> None:
    """Fail unless answers are `reference`: alone, with radix hits, and after a flush."""
    check_with_hits(server, prompts, reference, new_tokens=new_tokens)
    flush(server)
    cold = compare(run(server, prompts, new_tokens=new_tokens, at_once=4), reference)
    assert cold["pass"], f"after a flush, four at a time: {cold}"


def compare(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, Any]:
    """Requests whose tokens differ, and the largest difference of a logprob.

    Of a request that differs, the place is stated and by how much stock SGLang preferred its
    token there: a margin of some 1e-5 is a tie in float32. Logprobs are compared up to there.
    """
    differing, worst = [], 0.0
    for i, (mine, want) in enumerate(zip(ours, theirs, strict=True)):
        same = [a == b for a, b in zip(mine["ids"], want["ids"], strict=True)]
        end = same.index(False) if False in same else len(same)
        if end < len(same):
            differing.append({"request": i, "token": end, "margin": want["margins"][end]})
        pairs = zip(mine["logprobs"][:end], want["logprobs"][:end], strict=True)
        worst = max([worst, *(abs(a - b) for a, b in pairs)])
    return {
        "requests": len(ours),
        "cached_tokens": sum(r["cached"] for r in ours),
        "differing": differing,
        "max_logprob_difference": worst,
        "pass": not differing and worst <= LOGPROB_TOLERANCE,
    }
