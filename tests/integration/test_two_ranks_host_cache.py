# SPDX-License-Identifier: Apache-2.0
"""Both ranks' real code, the cache rank on a CPU and in bfloat16, as beside a model on a GPU.

What the inference rank exchanges is staged in host memory. Its own device is a CPU too where there
is no GPU. Against float64 dense attention over the same bfloat16 q, k and v.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from two_ranks import CPU, HEADS, World, check_residents, make_settings

BF16 = torch.bfloat16
ROUNDED = 0.04
"""Outputs are below 4, where neighbours in bfloat16 are 1/64 apart; and two parts are merged."""
POLICIES = ["exact", "lfps", "look_ahead", "async_spade", "sync_kv", "sfi", "quest"]

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=[CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)], ids=str)
def device(request: pytest.FixtureRequest) -> torch.device:
    found: torch.device = request.param
    return found


def make_world(device: torch.device, **selection: Any) -> World:
    return World(make_settings(**selection), device=device, cache_device=CPU, dtype=BF16)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dense_while_fits", [True, False])
def test_covering_budget_is_dense_attention(
    device: torch.device, policy: str, dense_while_fits: bool
) -> None:
    world = make_world(device, policy=policy, dense_while_fits=dense_while_fits)
    assert world.extend([1], [0], [20], last=False) < ROUNDED
    assert world.extend([1, 2], [20, 0], [40, 5], last=True) < ROUNDED
    for step in range(1, 20):
        error = world.decode([1, 2], [40 + step, 5 + step])
        assert error < ROUNDED, f"step {step}: {error}, {world.errors}"
    assert not world.errors
    assert world.cache_counters.stale_reads_total == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_small_budget_keeps_the_books_straight(device: torch.device, policy: str) -> None:
    world = make_world(device, policy=policy, budget_tokens=12, resident_factor=1.0, fetch_cap=4)
    assert world.extend([1, 2], [0, 0], [90, 10], last=True) < ROUNDED
    errors = [world.decode([1, 2], [90 + s, 10 + s]) for s in range(1, 20)]
    assert not world.errors
    counters = world.cache_counters
    if policy == "exact":
        assert max(errors) < ROUNDED
        assert counters.exact_rows_total > 0
    elif policy == "lfps":
        assert max(errors) > 0.1, "a sparse row cannot be dense"
        assert 0 < counters.selected_tokens_total <= 12 * HEADS * counters.selections_total
    else:
        assert max(errors) > 0.1, "a sparse row cannot be dense"
        assert counters.fetched_rows_total > 0
        check_residents(world, layer=3, row=1, length=109)
