# SPDX-License-Identifier: Apache-2.0
"""Link ``shared`` laid out for two GPUs and more, the CPU standing for all.

Resident sets, latest tokens and samples lie apart from the pool, as on the model's GPU; of three
cache ranks each has a part of the KV heads, and a part of the layers lies on its GPU. Exact layers
attend in the cache ranks' processes, and SGLang prepares a pass while one runs. What is attended to
must be right, also after a cache rank was killed in the middle of steps.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from exactness import check_with_hits
from nothing_lost import (
    cache_ranks,
    killed_while_decoding,
    killed_while_prompts_are_computed,
    make_prompts,
    pids,
    repeat,
    settings_of,
    undisturbed,
    values,
    wait_for,
    waiting_ranks,
)
from rank_servers import Server, ours

from tandemkv.cache_rank.protocol.memory.one_device import APART, ONE_DEVICE_VARIABLE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

_ENVIRON = {ONE_DEVICE_VARIABLE: APART}
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
_SLOW = {
    name: value
    for name, value in _COVERING.items()
    if name not in ("predictor_dtype", "late_layers")
} | {"policy": "sync_kv"}
"""In every fifth step requests attend where the K/V are, in all layers."""
_REQUESTS, _NEW_TOKENS = 6, 20


# Of the four KV heads three have one, one and two.
@pytest.mark.parametrize("count", [1, 3, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("on_random_model")
def test_tokens_equal_stock(
    count: int, prompts: list[list[int]], new_tokens: int, random_reference: list[Any]
) -> None:
    settings = {"selection": _COVERING, "cache_ranks": count}
    with ours(settings, environ=_ENVIRON) as server:
        check_with_hits(server, prompts, random_reference, new_tokens=new_tokens)
        inference, ranks = values(server), cache_ranks(server)
        _, status = server.get("/tandemkv/status")
    assert min(inference["sparse_rows_total"], inference["exact_layer_rows_total"]) > 0
    assert len({rank["info"]["pid"] for rank in ranks}) == count
    assert all(rank["values"]["fetched_rows_total"] > 0 for rank in ranks)
    info = status["inference_rank"]["info"]
    assert info["link"] == "shared"
    assert "on a GPU of its own" in info["placement"]


def test_tokens_of_slow_steps_equal_stock(
    prompts: list[list[int]], new_tokens: int, reference: list[Any]
) -> None:
    with ours({"selection": _SLOW, "cache_ranks": 1}, environ=_ENVIRON) as server:
        check_with_hits(server, prompts, reference, new_tokens=new_tokens)
        inference, (rank,) = values(server), cache_ranks(server)
    assert 0 < inference["slow_rows_total"] < inference["sparse_rows_total"] / 2
    assert rank["values"]["fetched_rows_total"] > 0


@pytest.mark.usefixtures("on_deep_model")
def test_one_of_three_killed_while_requests_decode() -> None:
    prompts = make_prompts(_REQUESTS)
    settings = settings_of(num_requests=_REQUESTS, standby=False, cache_ranks=3)
    with ours(settings, environ=_ENVIRON) as server:
        want, before = undisturbed(server, prompts, _NEW_TOKENS), pids(server)
        grown = killed_while_decoding(server, prompts, want, pid=before[1], begin_within_s=300.0)
        assert (grown["cache_rank_lost_total"], grown["restored_rows_total"]) == (1, _REQUESTS)
        assert grown["reseeded_rows_total"] == 0
        now = pids(server)
    assert [a == b for a, b in zip(now, before, strict=True)] == [True, False, True]


@pytest.fixture(scope="module")
def server(deep_model: Path) -> Iterator[Server]:
    del deep_model  # which it serves, as later ones would: it is needed last
    settings = settings_of(num_requests=_REQUESTS, standby=True)
    with ours(settings, environ=_ENVIRON) as found:
        assert found.run_dir is not None
        log = (found.run_dir / "sglang.log").read_text()
        assert "disable_overlap_schedule=False" in log  # else losses would meet one pass alone
        yield found


@pytest.fixture(scope="module")
def other_prompts() -> list[list[int]]:
    return make_prompts(_REQUESTS)


@pytest.fixture(scope="module")
def want(server: Server, other_prompts: list[list[int]]) -> list[list[int]]:
    return undisturbed(server, other_prompts, _NEW_TOKENS)


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 4))])
def test_killed_in_the_middle_of_a_step(
    server: Server, other_prompts: list[list[int]], want: list[list[int]], seed: int
) -> None:
    wait_for(lambda: waiting_ranks(server) > 0, "no cache rank waits")
    found = repeat(server, other_prompts, want, _NEW_TOKENS, random.Random(seed))
    assert found["in_flight"] == found["ended"] == found["same_tokens"] == _REQUESTS, found
    assert found["restored_rows"] == _REQUESTS, found
    assert found["reseeded_rows"] == found["rows_left"] == found["slots_left"] == 0, found


@pytest.mark.slow  # test_nothing_lost does so in CI, a pass at a time
def test_killed_while_prompts_are_computed(
    server: Server, other_prompts: list[list[int]], want: list[list[int]]
) -> None:
    killed_while_prompts_are_computed(server, other_prompts, want)
