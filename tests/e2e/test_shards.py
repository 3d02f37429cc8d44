# SPDX-License-Identifier: Apache-2.0
"""Three cache ranks with a KV head each: tokens and rows of one, also when one is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from nothing_lost import (
    SELECTION,
    cache_ranks,
    fetched_rows,
    killed_while_decoding,
    make_prompts,
    pids,
    settings_of,
    undisturbed,
    values,
    wait_for,
)
from rank_servers import Server, ours

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.usefixtures("deep_model")]

SHARDS, REQUESTS, NEW_TOKENS = 3, 6, 20  # as many as in test_nothing_lost


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts(REQUESTS)


def settings(count: int, policy: str = "look_ahead") -> dict[str, Any]:
    selection = SELECTION | {"policy": policy}
    return settings_of(num_requests=REQUESTS, standby=False, cache_ranks=count, selection=selection)


@pytest.fixture(scope="module")
def of_one(prompts: list[list[int]], once: Any) -> tuple[list[list[int]], float]:
    """Tokens and fetched rows with one cache rank: the server of test_nothing_lost, if it ran."""

    def ask() -> list[Any]:
        with ours(settings(1)) as server:
            return [undisturbed(server, prompts, NEW_TOKENS), fetched_rows(server)]

    tokens, rows = once("one cache rank", ask)
    return tokens, rows


@pytest.fixture(scope="module")
def server(of_one: tuple[list[list[int]], float]) -> Iterator[Server]:
    del of_one  # that server has ended: never two at a time
    with ours(settings(SHARDS)) as found:
        yield found


def test_tokens_and_fetched_rows_are_those_of_one_cache_rank(
    server: Server, prompts: list[list[int]], of_one: tuple[list[list[int]], float]
) -> None:
    tokens, rows = of_one
    assert undisturbed(server, prompts, NEW_TOKENS) == tokens
    assert fetched_rows(server) == rows > 0
    ranks = cache_ranks(server)
    assert len({rank["info"]["pid"] for rank in ranks}) == SHARDS
    for rank in ranks:
        assert rank["ready"] is True
        assert rank["values"]["fetched_rows_total"] > 0
    assert values(server)["sparse_rows_total"] == REQUESTS * (NEW_TOKENS - 1)


def test_metrics_have_each_cache_rank(server: Server) -> None:
    names = [f'tandemkv_cache_fetched_rows_total{{cache_rank="{n}"' for n in range(SHARDS)]

    def is_published() -> bool:
        text = server.get("/metrics")[1]
        return all(name in text for name in names)

    wait_for(is_published, "metrics lack a cache rank", 20.0)


@pytest.mark.parametrize("killed", [2, 0])
def test_one_of_three_killed_while_requests_decode(
    server: Server, prompts: list[list[int]], of_one: tuple[list[list[int]], float], killed: int
) -> None:
    found = pids(server)
    grown = killed_while_decoding(
        server, prompts, of_one[0], pid=found[killed], begin_within_s=300.0
    )
    names = ("pauses_total", "cache_rank_lost_total", "restored_rows_total", "reseeded_rows_total")
    assert [grown[name] for name in names] == [1, 1, REQUESTS, 0]
    now = pids(server)
    assert [a == b for a, b in zip(now, found, strict=True)] == [n != killed for n in range(SHARDS)]


def test_nothing_is_left(server: Server) -> None:
    """The last one with this server: it ends it."""
    processes, run_dir = server.processes(), server.run_dir
    os.kill(server.pid, signal.SIGINT)
    for process in processes:
        process.wait(60)
    assert run_dir is not None
    logs = {"cache_rank.log", "cache_rank1.log", "cache_rank2.log", "sglang.log"}
    assert {path.name for path in run_dir.iterdir()} == logs


@pytest.mark.slow  # seven processes; test_message_link.py has two cache ranks
def test_each_on_a_host_of_its_own(
    prompts: list[list[int]], of_one: tuple[list[list[int]], float]
) -> None:
    """By messages each has the K/V of its head alone; the engine of one is killed."""
    with ours(settings(SHARDS) | {"transport": "message"}) as server:
        assert undisturbed(server, prompts, NEW_TOKENS) == of_one[0]
        assert values(server)["sparse_rows_total"] == REQUESTS * (NEW_TOKENS - 1)
        assert [rank["role"] for rank in cache_ranks(server)] == ["pump"] * SHARDS
        found = pids(server)
        grown = killed_while_decoding(
            server, prompts, of_one[0], pid=found[1], begin_within_s=300.0
        )
        assert grown["cache_rank_lost_total"] == 1
        assert grown["recomputed_requests_total"] == 0
        assert [a == b for a, b in zip(pids(server), found, strict=True)] == [True, False, True]


@pytest.mark.slow  # two servers each
@pytest.mark.parametrize("policy", ["async_spade", "quest", "lfps"])
def test_policies_give_the_tokens_of_one_cache_rank(policy: str, prompts: list[list[int]]) -> None:
    found = []
    for count in (1, SHARDS):
        with ours(settings(count, policy)) as server:
            found.append((undisturbed(server, prompts, NEW_TOKENS), fetched_rows(server)))
            assert values(server)["sparse_rows_total"] == REQUESTS * (NEW_TOKENS - 1)
    assert found[0] == found[1]
    assert (found[0][1] > 0) is (policy != "lfps")  # which attends where the K/V lie
