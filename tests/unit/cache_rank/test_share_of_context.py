# SPDX-License-Identifier: Apache-2.0
"""kascade takes a share of the context, where it is told to."""

from __future__ import annotations

import torch
from engine_world import DIM, HEADS, QUERY_HEADS, World


def test_a_share_of_the_context_is_taken() -> None:
    sharing = {"anchors": (0, 1, 3), "exact_layers": (0,)}
    world = World(policy="kascade", options={"fraction": 0.7}, budget_tokens=160, fetch_cap=160,
                  resident_factor=1.0, **sharing)  # fmt: skip
    world.prefill(1, 200)
    before = world.rank.counters()
    step_rank, wanted = world.rank, 141  # ceil(0.7 * 201), of at least 128
    step_rank.begin_step()
    step_rank.begin_decode(torch.tensor([1]), torch.tensor([201]), world.table)
    step_rank.choose(1, torch.randn((1, QUERY_HEADS, DIM), generator=world.generator))
    step_rank.fetch(1, 1)
    after = world.rank.counters()
    names = "resident_hits_total", "resident_misses_total"
    assert sum(after[n] - before[n] for n in names) == HEADS * wanted


def test_of_equal_scores_a_share_has_the_lowest_positions_in_whatever_order_they_come() -> None:
    """On a GPU that order is one of atomics."""
    world = World(policy="kascade", options={"fraction": 0.5}, budget_tokens=160, fetch_cap=160,
                  resident_factor=1.0, anchors=(0, 1, 3), exact_layers=(0,))  # fmt: skip
    world.prefill(1, 20)
    world.rank.begin_decode(torch.tensor([1]), torch.tensor([300]), world.table)
    positions = torch.arange(4, 164, dtype=torch.int32).expand(1, HEADS, -1)
    scores = torch.ones(positions.shape)
    scores[..., -1] = 2.0
    for seed in range(3):
        order = torch.randperm(160, generator=torch.Generator().manual_seed(seed))
        kept, _ = world.rank._kept(positions[..., order], scores[..., order])
        assert kept[0, 0, :150].tolist() == [163, *range(4, 153)]  # ceil(0.5 * 300)
        assert bool((kept[..., 150:] == -1).all())
