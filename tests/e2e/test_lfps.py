# SPDX-License-Identifier: Apache-2.0
"""LFPS on a real server: all candidates give exact's tokens, few are attended to with few."""

from __future__ import annotations

import pytest
from rank_servers import ours

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]
RING = {"num_recent_tokens": 16}


def test_covering_budget_and_small_budget(token_ids: list[int]) -> None:
    body = {
        "input_ids": token_ids[:700],
        "sampling_params": {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True},
    }
    tokens, counters = {}, {}
    for name, selection in {
        "exact": {"policy": "exact"},
        "all": {"policy": "lfps", "budget_tokens": 1000},
        "few": {"policy": "lfps", "budget_tokens": 32},
    }.items():
        with ours({"selection": selection | RING}) as server:
            tokens[name] = server.generate(**body)["text"]
            counters[name] = server.values()
    assert tokens["all"] == tokens["exact"]
    inference, cache = counters["few"]
    # 23 decode steps, 28 layers that are not exact, 3 KV heads.
    assert cache["selections_total"] == 23 * 28
    assert 0 < cache["attended_by_policy_total"] <= 23 * 28 * 3 * 32
    assert cache["fetched_rows_total"] == 0
    assert inference["exact_layer_rows_total"] == 23 * 2
