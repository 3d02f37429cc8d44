# SPDX-License-Identifier: Apache-2.0
"""A model on a GPU, its cache rank in a process of its own, against stock SGLang.

The cache rank is on the CPU, or over NCCL on another GPU. `stock_agreement` says what agreement is,
and how the former runs without a GPU.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from exactness import flush, run
from rank_servers import Server
from stock_agreement import (
    COVERING,
    DEVICE,
    NEW_TOKENS,
    agreement,
    check,
    prompts_of,
    served,
    stock,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
if DEVICE == "cuda":
    pytestmark.append(pytest.mark.gpu)


@pytest.fixture(scope="module")
def prompts(token_ids: list[int]) -> list[list[int]]:
    return prompts_of(token_ids)


@pytest.fixture(scope="module")
def reference(prompts: list[list[int]]) -> list[dict[str, Any]]:
    with stock() as server:
        return run(server, prompts, new_tokens=NEW_TOKENS, at_once=1)


_PAIRS = [
    *(
        pytest.param((policy, "cpu"), id=f"{policy}-on-cpu")
        for policy in ("exact", "lfps", "look_ahead")
    ),
    *(
        pytest.param((policy, "cuda"), marks=pytest.mark.multi_gpu(2), id=f"{policy}-over-nccl")
        for policy in ("exact", "look_ahead", "sfi")
    ),
]


@pytest.fixture(scope="module", params=_PAIRS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """What it attends to is everything, and comes through the exchange."""
    policy, cache_device = request.param
    selection = {"policy": policy, **COVERING}
    with served(selection, cache_device=cache_device, cache_ranks=1) as found:
        yield found


def test_tokens_are_those_of_stock(
    server: Server, prompts: list[list[int]], reference: list[dict[str, Any]]
) -> None:
    before = server.values()[0]
    alone = run(server, prompts, new_tokens=NEW_TOKENS, at_once=1)
    check(agreement(alone, reference), "alone")
    again = agreement(run(server, prompts, new_tokens=NEW_TOKENS, at_once=8), reference)
    check(again, "radix hits, eight at a time")
    assert again["cached_tokens"] > sum(map(len, prompts)) // 2, again
    after = server.values()[0]
    sparse_or_exact = ("sparse_rows_total", "exact_rows_total")
    assert sum(after[name] - before[name] for name in sparse_or_exact) > NEW_TOKENS


def test_a_killed_cache_rank_is_told_and_comes_back(server: Server, token_ids: list[int]) -> None:
    flush(server)
    prompt = token_ids[:300]
    before = run(server, [prompt], new_tokens=8, at_once=1)[0]["ids"]
    found = kill(server, token_ids[:400], is_decoding=True)
    assert set(found["codes"]) == {503}, found
    assert found["says_why"], found
    assert found["unready"], found
    assert run(server, [prompt], new_tokens=8, at_once=1)[0]["ids"] == before


def kill(server: Server, prompt: list[int], *, is_decoding: bool) -> dict[str, Any]:
    """Kill the cache rank under eight requests, of which six can run; wait until it is back."""
    body = {"sampling_params": {"max_new_tokens": 1500, "temperature": 0, "ignore_eos": True}}
    ends: list[float] = []

    def note(_: Future[Any]) -> None:
        ends.append(time.monotonic())

    with ThreadPoolExecutor(8) as pool:
        pending = []
        for i in range(8):  # unlike first tokens: no radix hits among them
            own = body | {"input_ids": [100 + i, *prompt]}
            pending.append(pool.submit(server.post, "/generate", own))
            pending[-1].add_done_callback(note)
        steps = server.values()[0]["decode_steps_total"]
        if is_decoding:
            while server.values()[0]["decode_steps_total"] < steps + 10:
                time.sleep(0.05)
        else:
            time.sleep(3.0)
        os.kill(server.cache_rank_pid(), signal.SIGKILL)
        start = time.monotonic()
        unready = False
        while time.monotonic() < start + 180.0:
            code, _ = server.get("/tandemkv/ready")
            if code == 200 and unready:
                break
            unready |= code == 503
            time.sleep(0.05)
        back_s = time.monotonic() - start
        answers = [p.result() for p in pending]
    return {
        "codes": [code for code, _ in answers],
        "says_why": all("cache rank" in str(text) for _, text in answers),
        "example": str(answers[0][1])[:300],
        "seconds_to_last_error": max(ends) - start,
        "unready": unready,
        "seconds_to_ready_again": back_s,
    }
