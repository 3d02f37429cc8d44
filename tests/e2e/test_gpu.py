# SPDX-License-Identifier: Apache-2.0
"""Link local on a GPU against stock SGLang with FlashInfer, in bfloat16.

Overlap scheduling and CUDA graphs are on. `stock_agreement` says what agreement is, and how the
same runs on a CPU.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from exactness import flush, run
from life_cycle import sglang_used_tokens
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

_IDLE_S = 30.0

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
if DEVICE == "cuda":
    pytestmark.append(pytest.mark.gpu)


@pytest.fixture(scope="module")
def exact() -> Iterator[Server]:
    with served({"policy": "exact"}) as server:
        yield server


@pytest.fixture(scope="module")
def covering() -> Iterator[Server]:
    """Selection runs in every step, and its budget holds every prompt."""
    with served({"policy": "look_ahead", **COVERING}) as server:
        yield server


@pytest.fixture(scope="module")
def prompts(token_ids: list[int]) -> list[list[int]]:
    return prompts_of(token_ids)


@pytest.fixture(scope="module")
def reference(prompts: list[list[int]]) -> dict[str, list[dict[str, Any]]]:
    """Stock SGLang's answers alone, again with radix hits and at once: what rounding alone does."""
    with stock() as server:
        alone = run(server, prompts, new_tokens=NEW_TOKENS, at_once=1)
        hits = run(server, prompts, new_tokens=NEW_TOKENS, at_once=8)
        flush(server)
        return {
            "alone": alone,
            "radix hits, eight at a time": hits,
            "eight at a time": run(server, prompts, new_tokens=NEW_TOKENS, at_once=8),
        }


def test_stock_agrees_with_itself(reference: dict[str, list[dict[str, Any]]]) -> None:
    """The measure's own floor: batches of another size round otherwise."""
    for name in ("radix hits, eight at a time", "eight at a time"):
        check(agreement(reference[name], reference["alone"]), f"stock, {name}")


@pytest.mark.parametrize("name", ["exact", "covering"])
def test_tokens_are_those_of_stock(
    name: str,
    request: pytest.FixtureRequest,
    prompts: list[list[int]],
    reference: dict[str, list[dict[str, Any]]],
) -> None:
    server: Server = request.getfixturevalue(name)
    want = reference["alone"]
    flush(server)
    alone = run(server, prompts, new_tokens=NEW_TOKENS, at_once=1)
    check(agreement(alone, want), f"{name}, alone")
    again = agreement(run(server, prompts, new_tokens=NEW_TOKENS, at_once=8), want)
    check(again, f"{name}, radix hits, eight at a time")
    assert again["cached_tokens"] > sum(map(len, prompts)) // 2, again
    flush(server)
    cold = run(server, prompts, new_tokens=NEW_TOKENS, at_once=8)
    check(agreement(cold, want), f"{name}, cold, eight at a time")


def test_tokens_of_a_captured_method_are_those_of_stock(
    prompts: list[list[int]], reference: dict[str, list[dict[str, Any]]]
) -> None:
    """Quest's own `select` runs in each step; others are done by fused kernels."""
    with served({"policy": "quest", **COVERING}) as server:
        for name, at_once in (("alone", 1), ("eight at a time", 8)):
            found = run(server, prompts, new_tokens=NEW_TOKENS, at_once=at_once)
            check(agreement(found, reference["alone"]), f"quest, {name}")
            flush(server)
        values = server.values()[0]
    assert values["selections_total"] > len(prompts) * NEW_TOKENS


def test_selection_ran_where_everything_is_covered(covering: Server, token_ids: list[int]) -> None:
    before, _ = covering.values()
    covering.generate(
        input_ids=token_ids[:1500] if DEVICE == "cuda" else token_ids[:600],
        sampling_params={"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
    )
    after, _ = covering.values()
    assert after["sparse_rows_total"] > before["sparse_rows_total"]


def test_forced_tokens_are_decoded(covering: Server, token_ids: list[int]) -> None:
    """Four requests at once, each with its own text, though the overlap scheduler runs ahead."""

    def one(start: int) -> tuple[list[int], list[int]]:
        forced = token_ids[start + 200 : start + 240]
        found = covering.generate(
            input_ids=token_ids[start : start + 200],
            return_logprob=True,
            sampling_params={
                "max_new_tokens": len(forced),
                "temperature": 0,
                "ignore_eos": True,
                "custom_params": {"forced_token_ids": forced},
            },
        )
        return [token for _, token, _ in found["meta_info"]["output_token_logprobs"]], forced

    with ThreadPoolExecutor(4) as pool:
        for found, forced in pool.map(one, (0, 300, 700, 1000)):
            assert found == forced


def test_nothing_is_left_after_lost_clients(covering: Server, token_ids: list[int]) -> None:
    """100 short requests, every other one's client gone after its first token."""
    flush(covering)
    prompt = token_ids[300:700]
    first = run(covering, [prompt], new_tokens=8, at_once=1)[0]["ids"]

    def one(i: int) -> None:
        body = {
            "input_ids": token_ids[17 * i : 17 * i + 40 + 7 * (i % 30)],
            "stream": True,
            "sampling_params": {"max_new_tokens": 48, "temperature": 0, "ignore_eos": True},
        }
        data = json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{covering.url}/generate", data, headers)
        with urllib.request.urlopen(request, timeout=120.0) as reply:
            if i % 2:
                reply.readline()  # and hang up
            else:
                reply.read()

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(one, range(100)))
    deadline = time.monotonic() + _IDLE_S
    while covering.post("/flush_cache", {})[0] != 200:  # refused while anything runs
        assert time.monotonic() < deadline, "requests of clients that hung up still run"
        time.sleep(0.5)
    flush(covering)
    # SGLang writes its gauges with a batch; after this one the only tokens are its own.
    assert run(covering, [prompt], new_tokens=8, at_once=1)[0]["ids"] == first
    flush(covering)
    while (used := sglang_used_tokens(covering)) > len(prompt) + 8 + 64:
        assert time.monotonic() < deadline + _IDLE_S, f"{used} tokens are still in use"
        time.sleep(1.0)
    assert covering.get("/health")[0] == 200
