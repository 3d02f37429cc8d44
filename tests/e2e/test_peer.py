# SPDX-License-Identifier: Apache-2.0
"""``--cache-ranks 1 --transport peer`` on the serving path, the CPU standing for both GPUs.

Here nothing runs beside anything else. What shows is that all is sent, raised and waited for in an
order that works, and that what is attended to is right (decision record 6). That small resident
sets are, `test_engine.py` shows.
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
_PEER = {"cache_ranks": 1, "transport": "peer"}
_COVERING = {
    "policy": "look_ahead",
    "budget_tokens": 600,
    "resident_factor": 2.0,
    "num_recent_tokens": 32,
    "dense_while_fits": False,
    "index_dtype": "int8",
    "predictor_dtype": "int8",
    "exact_layers": [1],
    "late_layers": 1,
}
"""Selects in every step; a late layer, W_q in int8 and samples as served, and an exact layer."""
_IDLE_S = 30.0


@pytest.fixture(scope="module")
def covering() -> Iterator[Server]:
    with ours({**_PEER, "selection": _COVERING}, environ=_ENVIRON) as server:
        yield server


def test_tokens_equal_stock(
    covering: Server, prompts: list[list[int]], new_tokens: int, reference: list[Any]
) -> None:
    texts, want = prompts[1::2], reference[1::2]
    together = compare(run(covering, texts, new_tokens=new_tokens, at_once=3), want)
    assert together["pass"], f"three at a time: {together}"
    alone = compare(run(covering, texts[-1:], new_tokens=new_tokens, at_once=1), want[-1:])
    assert alone["pass"], f"with radix hits, alone: {alone}"
    inference, cache = covering.values()
    assert cache == {}
    assert min(inference["sparse_rows_total"], inference["seeded_rows_total"]) > 0
    _, status = covering.get("/tandemkv/status")
    info = status["inference_rank"]["info"]
    assert (info["link"], info["plan_placement"]) == ("peer", "CPU")
    assert covering.run_dir is not None
    logs = [path.read_text() for path in covering.run_dir.rglob("*.log")]
    assert any("30 of 30 layers in one operation, W_q in int8" in log for log in logs)


def test_nothing_is_left_of_a_lost_client(covering: Server, token_ids: list[int]) -> None:
    flush(covering)
    prompt = token_ids[300:700]
    first = run(covering, [prompt], new_tokens=8, at_once=1)[0]["ids"]
    body = {
        "input_ids": token_ids[900:1300],
        "stream": True,
        "sampling_params": {"max_new_tokens": 4000, "temperature": 0, "ignore_eos": True},
    }
    request = urllib.request.Request(
        f"{covering.url}/generate",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120.0) as reply:
        reply.readline()  # and hang up
    deadline = time.monotonic() + _IDLE_S
    while covering.post("/flush_cache", {})[0] != 200:  # refused while anything runs
        assert time.monotonic() < deadline, "the request of a client that hung up still runs"
        time.sleep(0.5)
    # SGLang writes its gauges with a batch; after this one the only tokens are its own.
    assert run(covering, [prompt], new_tokens=8, at_once=1)[0]["ids"] == first
    flush(covering)
    while (used := sglang_used_tokens(covering)) > len(prompt) + 8:
        assert time.monotonic() < deadline + _IDLE_S, f"{used} tokens are still in use"
        time.sleep(1.0)
