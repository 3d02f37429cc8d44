# SPDX-License-Identifier: Apache-2.0
"""Resident sets of prompts whose scores choose fewer tokens than there is room for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from engine_world import MODEL, World

from tandemkv.cache_rank.engine.seeding import fill_set
from tandemkv.cache_rank.policies.base import Policy, SeedInput

LAYER, ROW, BAD = 1, 1, 40


def prefilled(length: int, value: float, **selection: object) -> World:
    """Prefill a request in the row of another one; a key of head 1 at `BAD` has `value`."""
    world = World(sample_tokens=0, **selection)
    world.prefill(ROW, length + 30)  # a request that is gone
    world.table[ROW] = world.table[2]
    world.pools.k[LAYER][world.table[ROW, BAD], 1, 3] = value
    world.prefill(ROW, length)
    return world


@pytest.mark.parametrize("policy", ["look_ahead", "last_query", "quest", "sfi", "oracle"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("length", [50, 64, 65, 66, 90, 200])
def test_all_that_is_attended_to_is_of_the_request(policy: str, value: float, length: int) -> None:
    world = prefilled(length, value, policy=policy)
    keys, positions = world.resident(LAYER, ROW)
    hi = length + 1 - world.settings.selection.num_recent_tokens
    filled = min(world.width, hi)
    for head in range(MODEL.num_kv_heads):
        held = positions[head, :filled].long()
        assert held.unique().numel() == filled
        assert ((held >= 0) & (held < hi)).all()
        expected = world.pools.k[LAYER][world.table[ROW, held].long(), head]
        torch.testing.assert_close(keys[:filled, head], expected, equal_nan=True)


def test_a_prompt_that_scores_as_it_should_is_seeded_as_before() -> None:
    """Head 0 has no such key: its set is the one that scores choose."""
    bad, good = (prefilled(200, value) for value in (float("inf"), 0.5))
    assert torch.equal(bad.resident(LAYER, ROW)[1][0], good.resident(LAYER, ROW)[1][0])
    latest = list(range(184, 184 - (bad.width - 4), -1))
    assert bad.resident(LAYER, ROW)[1][1].tolist() == [0, 1, 2, 3, *latest]


@pytest.mark.parametrize("num_scored", [0, 1, 5, 6])
@pytest.mark.parametrize("hi", [10, 11, 30])
def test_fillers_are_the_highest_that_were_not_chosen(num_scored: int, hi: int) -> None:
    scores = torch.full((2, hi), -torch.inf)
    scores[0, 4 : 4 + num_scored] = -torch.arange(num_scored).float()
    scores[1, hi - num_scored : hi] = torch.arange(num_scored).float()
    policy = SimpleNamespace(context=SimpleNamespace(model=MODEL), seed_scores=lambda _: scores)
    prompt = SimpleNamespace(lo=4, hi=hi, queries=torch.zeros(1))
    low, high = fill_set(cast(Policy, policy), cast(SeedInput, prompt), 12).tolist()
    target = min(12, hi)
    chosen = list(range(4, 4 + num_scored))
    others = [x for x in range(hi - 1, 3, -1) if x not in chosen]
    assert low == [0, 1, 2, 3, *(chosen + others)[: target - 4]] + [-1] * (12 - target)
    assert high == [0, 1, 2, 3, *range(hi - 1, hi - 1 - (target - 4), -1)] + [-1] * (12 - target)
