# SPDX-License-Identifier: Apache-2.0
"""Both ranks' real code with everything on one GPU, over an in-memory transport.

The same checks as in `test_two_ranks`: what is covered equals float64 dense attention.
"""

from __future__ import annotations

import time

import pytest
import torch
from two_ranks import HEADS, World, check_residents, make_settings

POLICIES = ["look_ahead", "oracle", "quest", "async_spade", "last_query", "exact"]
CUDA = torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dense_while_fits", [True, False])
def test_covering_budget_is_dense_attention(policy: str, dense_while_fits: bool) -> None:
    world = World(make_settings(policy=policy, dense_while_fits=dense_while_fits), device=CUDA)
    assert world.extend([1], [0], [20], last=False) < 1e-4
    assert world.extend([1, 2], [20, 0], [40, 5], last=True) < 1e-4
    for step in range(1, 25):
        error = world.decode([1, 2], [40 + step, 5 + step])
        assert error < 1e-4, f"step {step}: {error}, {world.errors}"
    assert not world.errors


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.parametrize("policy", [*POLICIES, "streaming"])
@pytest.mark.parametrize("index_dtype", ["native", "int8"])
def test_small_budget_keeps_the_books_straight(policy: str, index_dtype: str) -> None:
    settings = make_settings(
        policy=policy,
        budget_tokens=12,
        resident_factor=1.0,
        fetch_cap=4,
        index_dtype=index_dtype,
    )
    world = World(settings, device=CUDA)
    assert world.extend([1, 2], [0, 0], [90, 10], last=True) < 1e-4
    errors = [world.decode([1, 2], [90 + s, 10 + s]) for s in range(1, 20)]
    assert not world.errors
    if policy == "exact":
        assert max(errors) < 1e-4
    elif policy != "streaming":
        assert max(errors) > 1e-3, "a sparse row cannot be dense"
        check_residents(world, layer=3, row=1, length=109)
        # Counters are one step behind the GPU.
        deadline = time.monotonic() + 5
        while not world.cache_counters.fetched_rows_total and time.monotonic() < deadline:
            torch.cuda.synchronize()
            world.session._epoch.tally.flush()
        assert world.cache_counters.fetched_rows_total > 0
        assert world.cache_counters.selected_tokens_total > 12 * HEADS
