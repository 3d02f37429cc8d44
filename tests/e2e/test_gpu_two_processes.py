# SPDX-License-Identifier: Apache-2.0
"""A model on a GPU, its cache rank in a process of its own, against stock SGLang.

The cache rank is on the CPU, or over NCCL on another GPU. `stock_agreement` says what agreement is,
and how the former runs without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from exactness import run
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
