# SPDX-License-Identifier: Apache-2.0
"""An engine in a process of its own on a GPU gives the tokens of one in the same process.

On one GPU: start CUDA MPS, and set ``TANDEMKV_PEER_ON_ONE_DEVICE=1``.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from exactness import flush, run
from stock_agreement import COUNT, NEW_TOKENS, agreement, check, prompts_of, served, stock

from tandemkv.cache_rank.protocol.one_device import is_peer_on_one_device

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not is_peer_on_one_device(), reason="link shared is for one GPU"),
]

_SPARSE = {"budget_tokens": 256, "dense_tokens": 0, "exact_layers": [], "late_layers": 0}
_PLACEMENTS: dict[str, dict[str, Any]] = {
    "local": {"cache_ranks": 0},
    "shared": {"cache_ranks": 1, "cache_device": "cuda", "transport": "shared"},
}


@pytest.fixture(scope="module")
def prompts(token_ids: list[int]) -> list[list[int]]:
    return prompts_of(token_ids)


@pytest.mark.parametrize(
    ("policy", "index_dtype"),
    [
        ("look_ahead", "native"),
        ("look_ahead", "int8"),
        ("look_ahead", "int4"),
        ("last_query", "int8"),
        ("async_spade", "native"),
        ("kascade", "native"),
        ("streaming", "native"),
    ],
)
def test_two_processes_give_the_tokens_of_one(
    policy: str, index_dtype: str, prompts: list[list[int]]
) -> None:
    selection = {"policy": policy, **_SPARSE, "index_dtype": index_dtype}
    if policy == "streaming":
        selection["budget_tokens"] = 0
    alone, together, fetched = {}, {}, {}
    for name, placement in _PLACEMENTS.items():
        with served(selection, **placement) as server:
            alone[name] = run(server, prompts, new_tokens=NEW_TOKENS, at_once=1)
            engine = server.values()[1 if name == "shared" else 0]
            fetched[name] = engine["fetched_rows_total"]
            flush(server)
            together[name] = run(server, prompts, new_tokens=NEW_TOKENS, at_once=8)
    found = agreement(alone["shared"], alone["local"])
    check(found, f"{policy}, {index_dtype}: two processes and one")
    assert not found["margins_where_first_different"]
    assert found["largest_logprob_difference"] == 0.0
    # Batches form as requests come; what is near a tie may be chosen otherwise in another batch.
    check(agreement(together["shared"], together["local"]), f"{policy}, eight at a time")
    if policy != "streaming":
        assert fetched["local"] > COUNT * NEW_TOKENS
    assert fetched["shared"] == pytest.approx(fetched["local"], rel=0.05)


def test_exact_gives_stock_tokens(prompts: list[list[int]]) -> None:
    with stock() as server:
        want = run(server, prompts, new_tokens=NEW_TOKENS, at_once=1)
    with served({"policy": "exact"}, **_PLACEMENTS["shared"]) as server:
        check(agreement(run(server, prompts, new_tokens=NEW_TOKENS, at_once=1), want), "exact")


def test_a_killed_engine_ends_no_server(prompts: list[list[int]]) -> None:
    """Waits of captured graphs end; the same process serves on once the engine is back."""
    selection = {"policy": "look_ahead", **_SPARSE, "index_dtype": "int8"}
    with served(selection, **_PLACEMENTS["shared"]) as server:
        before = run(server, prompts[:4], new_tokens=NEW_TOKENS, at_once=1)
        os.kill(server.cache_rank_pid(), signal.SIGKILL)
        flush(server)
        after = run(server, prompts[:4], new_tokens=NEW_TOKENS, at_once=1)
    assert [answer["ids"] for answer in after] == [answer["ids"] for answer in before]
