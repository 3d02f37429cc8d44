# SPDX-License-Identifier: Apache-2.0
"""Policies whose decode steps no CUDA graph holds, on a GPU: against stock SGLang, and at work.

`stock_agreement` says what agreement is, and how the same runs on a CPU.
"""

from __future__ import annotations

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

_SPARSE_LAYERS = 28
"""Of 30; the policies' own default has two exact ones."""
_SMALL = {"budget_tokens": 128, "resident_factor": 1.0, "num_recent_tokens": 64}
_POLICIES = ("sfi", "sync_kv")
_SLOW = ("sfi", "sync_kv")

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
if DEVICE == "cuda":
    pytestmark.append(pytest.mark.gpu)


@pytest.fixture(scope="module")
def prompts(token_ids: list[int]) -> list[list[int]]:
    return prompts_of(token_ids)


@pytest.fixture(scope="module")
def reference(prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Stock SGLang's answers."""
    with stock() as server:
        return run(server, prompts, new_tokens=NEW_TOKENS, at_once=1)


def counted(server: Server, prompts: list[list[int]]) -> dict[str, float]:
    """Counters, of the device as well, which are those of the start of a recent step."""
    run(server, prompts[:1], new_tokens=8, at_once=1)
    return server.values()[0]


@pytest.mark.parametrize("policy", _POLICIES)
def test_tokens_are_those_of_stock(
    policy: str, prompts: list[list[int]], reference: list[dict[str, Any]]
) -> None:
    """Where the budget holds every prompt; most steps of the slow ones attend to the sets."""
    with served({"policy": policy, **COVERING}) as server:
        answers = run(server, prompts, new_tokens=NEW_TOKENS, at_once=8)
        check(agreement(answers, reference), f"{policy}, eight at a time")
        flush(server)
        alone = run(server, prompts[-2:], new_tokens=NEW_TOKENS, at_once=1)
        found = agreement(alone, reference[-2:])
        print(f"{policy}, alone", found)
        assert found["tokens_compared"] >= NEW_TOKENS, found
        values = counted(server, prompts)
    assert values["sparse_rows_total"] >= len(prompts) * (NEW_TOKENS - 1)
    assert values["selections_total"] > 0
    if policy in _SLOW:
        assert 0 < values["slow_rows_total"] < values["sparse_rows_total"] / 2


@pytest.mark.parametrize("policy", _POLICIES)
def test_a_small_budget_selects(policy: str, prompts: list[list[int]]) -> None:
    """Of long prompts, eight at a time, and again from the radix tree."""
    asked = [prompt for prompt in prompts if len(prompt) > 300]
    with served({"policy": policy, **_SMALL}) as server:
        for _ in range(2):
            answers = run(server, asked, new_tokens=NEW_TOKENS, at_once=8)
            assert all(len(answer["ids"]) == NEW_TOKENS for answer in answers)
        values = counted(server, prompts)
    sparse, slow = values["sparse_rows_total"], values["slow_rows_total"]
    assert sparse >= 2 * len(asked) * (NEW_TOKENS - 1)
    selecting = slow if policy in _SLOW else sparse
    assert 0 < selecting <= sparse
    assert (slow > 0) == (policy in _SLOW)
    # The device is asked for less than what was counted here, by a step at most.
    assert selecting - 8 <= values["selections_total"] / _SPARSE_LAYERS <= selecting
    assert values["fetched_rows_total"] > 0
    assert values["attended_tokens_total"] < values["context_tokens_total"]
