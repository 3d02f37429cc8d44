# SPDX-License-Identifier: Apache-2.0
"""LFPS beside a GPU: the model there, its K/V and the cache rank on the host.

With ``TANDEMKV_TEST_DEVICE=cpu`` and ``TANDEMKV_ONE_DEVICE=host`` the same runs on a CPU. The long
request has 16K tokens if the model of ``TANDEMKV_TEST_MODEL`` has as many positions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from exactness import flush, run
from rank_servers import Server, model_dir
from stock_agreement import (
    COUNT,
    COVERING,
    DEVICE,
    NEW_TOKENS,
    agreement,
    check,
    killed_while,
    prompts_of,
    served,
    stock,
)

from tandemkv.cache_rank.protocol.models.model_spec import read_model_spec

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
if DEVICE == "cuda":
    pytestmark.append(pytest.mark.gpu)

_COVERING = {"policy": "lfps", "budget_tokens": COVERING["budget_tokens"], "num_recent_tokens": 16}
_SMALL = _COVERING | {"budget_tokens": 64}
_PLACED = {"cache_ranks": 1, "transport": "shared"}
_LONG_ANSWER = 128 if DEVICE == "cuda" else 32
"""Tokens of an answer in the middle of which a process is killed."""
_CHUNK, _LONG = (2048, 16384) if DEVICE == "cuda" else (256, 1000)


@pytest.fixture(scope="module")
def prompts(token_ids: list[int]) -> list[list[int]]:
    return prompts_of(token_ids)


@pytest.fixture(scope="module")
def reference(prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Stock SGLang's answers, one request at a time."""
    with stock() as server:
        return run(server, prompts, new_tokens=NEW_TOKENS, at_once=1)


@pytest.fixture(scope="module")
def covering() -> Iterator[Server]:
    with served(_COVERING, **_PLACED) as server:
        yield server


def test_tokens_are_those_of_stock_where_the_budget_covers_all(
    covering: Server, prompts: list[list[int]], reference: list[dict[str, Any]]
) -> None:
    """Two layers are exact: SGLang's backend reads the pool in host memory."""
    alone = run(covering, prompts, new_tokens=NEW_TOKENS, at_once=1)
    check(agreement(alone, reference), "lfps beside a GPU, alone")
    hits = run(covering, prompts, new_tokens=NEW_TOKENS, at_once=8)
    check(agreement(hits, reference), "radix hits, eight at a time")
    flush(covering)
    together = run(covering, prompts, new_tokens=NEW_TOKENS, at_once=8)
    check(agreement(together, reference), "eight at a time")
    inference, cache = covering.values()
    info = covering.get("/tandemkv/status")[1]["inference_rank"]["info"]
    assert "on the host's CPU" in info["placement"]
    assert min(inference["sparse_rows_total"], inference["exact_layer_rows_total"]) > 0
    assert cache["attended_by_policy_total"] > COUNT * NEW_TOKENS
    assert inference["cache_rank_lost_total"] == inference["far_prefix_passes_total"] == 0


def test_requests_go_on_where_the_cache_rank_was_killed(
    covering: Server, prompts: list[list[int]]
) -> None:
    """Its tables are lost, and with a covering budget nothing depends on them."""
    longest = sorted(prompts, key=len)[-1:]
    want = run(covering, longest, new_tokens=_LONG_ANSWER, at_once=1)
    flush(covering)
    before = covering.values()[0]
    pid = _serving(covering)
    found = killed_while(covering, longest, pid, new_tokens=_LONG_ANSWER)
    if DEVICE == "cpu":
        assert [answer["ids"] for answer in found] == [answer["ids"] for answer in want]
    # In bfloat16 another order of the tokens rounds otherwise.
    check(agreement(found, want), "lfps, its cache rank killed", tokens=_LONG_ANSWER // 8)
    after = covering.values()[0]
    names = ("cache_rank_lost_total", "pauses_total", "reseeded_rows_total")
    assert [after[name] - before[name] for name in names] == [1, 1, 1]
    assert after["requests_failed_total"] == 0
    assert _serving(covering) != pid


def test_a_small_budget_serves_and_a_long_prompt_comes_in_chunks(
    prompts: list[list[int]], token_ids: list[int]
) -> None:
    """Prefixes of later chunks are copied from host memory ahead of their attention."""
    spec = read_model_spec(Path(model_dir()), dtype="bfloat16")
    length = min(_LONG, spec.max_context - NEW_TOKENS - 1)
    long = (token_ids * (1 + length // len(token_ids)))[:length]
    with served(_SMALL, **_PLACED, chunked_prefill_size=_CHUNK) as server:
        began = time.monotonic()
        (answer,) = run(server, [long], new_tokens=NEW_TOKENS, at_once=1)
        print(f"1 x {length}: {time.monotonic() - began:.1f} s for {NEW_TOKENS} tokens")
        answers = run(server, prompts, new_tokens=NEW_TOKENS, at_once=4)
        inference, cache = server.values()
    assert all(len(found["ids"]) == NEW_TOKENS for found in (answer, *answers))
    heads, budget = spec.num_kv_heads, _SMALL["budget_tokens"]
    assert 0 < cache["attended_by_policy_total"] <= cache["selections_total"] * heads * budget
    assert inference["cache_rank_lost_total"] == inference["far_prefix_passes_total"] == 0
    if DEVICE == "cuda":
        assert inference["copied_prefix_tokens_total"] >= length - _CHUNK


def _serving(server: Server) -> int:
    """Process id of the cache rank."""
    (rank,) = server.get("/tandemkv/status")[1]["cache_ranks"]
    return int(rank["info"]["pid"])
