# SPDX-License-Identifier: Apache-2.0
"""``--cache-ranks 1 --transport peer`` on the serving path, the CPU standing for both GPUs.

Here nothing runs beside anything else. What shows is that all is sent, raised and waited for in an
order that works, and that what is attended to is right (decision record 6).
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from exactness import compare, flush, run
from life_cycle import sglang_used_tokens
from rank_servers import Server, ours

from tandemkv.cache_rank.protocol.one_device import ONE_DEVICE_VARIABLE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
_ENVIRON = {ONE_DEVICE_VARIABLE: "1"}
_PEER = {"cache_ranks": 1, "exchange": {"transport": "peer"}}
_COVERING = {
    "policy": "look_ahead",
    "budget_tokens": 600,
    "num_recent_tokens": 32,
    "dense_while_fits": False,
    "index_dtype": "int8",
    "predictor_dtype": "int8",
    "exact_layers": [1],
    "late_layers": 1,
}
"""Selects in every step; a late layer, W_q in int8 and samples as served, and an exact layer."""
_SMALL = {
    "policy": "look_ahead",
    "budget_tokens": 96,
    "resident_factor": 1.0,
    "num_recent_tokens": 16,
    "fetch_cap": 8,
    "exact_layers": [],
    "scan_ahead": True,
    "late_layers": 1,
    "sample_tokens": 16,
}
"""A resident set, and a shortlist, much smaller than the prompts."""
_IDLE_S = 30.0


@pytest.fixture(scope="module")
def texts(prompts: list[list[int]], token_ids: list[int]) -> list[list[int]]:
    """One outgrows dense attention while it is decoded, one stays dense, two are seeded."""
    return [token_ids[60:168], prompts[0], *prompts[-2:]]


@pytest.fixture(scope="module")
def copied(texts: list[list[int]], new_tokens: int) -> tuple[list[Any], dict[str, float]]:
    """What the small server answers with rows that are copied on one device, and its counters."""
    with ours({"cache_ranks": 0, "selection": _SMALL}) as server:
        return run(server, texts, new_tokens=new_tokens, at_once=1), server.values()[0]


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """The same with rows that are sent; queries are predicted as beside the model's weights."""
    selection = {**_SMALL, "predictor_dtype": "native"}
    with ours({**_PEER, "selection": selection}, environ=_ENVIRON) as server:
        yield server


def test_tokens_equal_stock(
    prompts: list[list[int]], new_tokens: int, reference: list[Any]
) -> None:
    with ours({**_PEER, "selection": _COVERING}, environ=_ENVIRON) as server:
        texts, want = prompts[1::2], reference[1::2]
        together = compare(run(server, texts, new_tokens=new_tokens, at_once=3), want)
        assert together["pass"], f"three at a time: {together}"
        alone = compare(run(server, texts[-1:], new_tokens=new_tokens, at_once=1), want[-1:])
        assert alone["pass"], f"with radix hits, alone: {alone}"
        inference, cache = server.values()
        assert cache == {}
        assert min(inference["sparse_rows_total"], inference["seeded_rows_total"]) > 0
        _, status = server.get("/tandemkv/status")
        info = status["inference_rank"]["info"]
        assert (info["transport"], info["plan_placement"]) == ("peer", "CPU")
        assert server.run_dir is not None
        logs = [path.read_text() for path in server.run_dir.rglob("*.log")]
        assert any("30 of 30 layers in one operation, W_q in int8" in log for log in logs)


def test_rows_that_are_sent_give_the_answers_of_rows_that_are_copied(
    copied: tuple[list[Any], dict[str, float]],
    small: Server,
    texts: list[list[int]],
    new_tokens: int,
) -> None:
    want, before = copied
    found = run(small, texts, new_tokens=new_tokens, at_once=1)
    for mine, other in zip(found, want, strict=True):
        assert mine["ids"] == other["ids"]
        assert mine["logprobs"] == other["logprobs"]
    values, _ = small.values()
    for name in ("fetched_rows_total", "sparse_rows_total", "dense_rows_total"):
        assert values[name] == before[name] > 0, name


def test_nothing_is_left_of_a_lost_client(small: Server, token_ids: list[int]) -> None:
    flush(small)
    prompt = token_ids[300:700]
    first = run(small, [prompt], new_tokens=8, at_once=1)[0]["ids"]
    body = {
        "input_ids": token_ids[900:1300],
        "stream": True,
        "sampling_params": {"max_new_tokens": 4000, "temperature": 0, "ignore_eos": True},
    }
    request = urllib.request.Request(
        f"{small.url}/generate",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120.0) as reply:
        reply.readline()  # and hang up
    deadline = time.monotonic() + _IDLE_S
    while small.post("/flush_cache", {})[0] != 200:  # refused while anything runs
        assert time.monotonic() < deadline, "the request of a client that hung up still runs"
        time.sleep(0.5)
    # SGLang writes its gauges with a batch; after this one the only tokens are its own.
    assert run(small, [prompt], new_tokens=8, at_once=1)[0]["ids"] == first
    flush(small)
    while (used := sglang_used_tokens(small)) > len(prompt) + 8:
        assert time.monotonic() < deadline + _IDLE_S, f"{used} tokens are still in use"
        time.sleep(1.0)
