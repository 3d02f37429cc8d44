# SPDX-License-Identifier: Apache-2.0
"""First layers that are selected for at the end of a step, for the next one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_world import DIM, HEADS, LAYERS, QUERY_HEADS, World

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.kernels.samples import sample_weights

NUM_RECENT = 16


@pytest.mark.parametrize("index_dtype", ["native", "int8", "int4"])
@pytest.mark.parametrize("late_layers", [1, 2])
def test_books_are_those_of_the_next_step(index_dtype: str, late_layers: int) -> None:
    """What leaves the ring in the next step is there; with int4 its page has just been finished."""
    world = World(index_dtype=index_dtype, exact_layers=(), late_layers=late_layers)
    assert world.rank.program.late_layers == tuple(range(late_layers))
    world.prefill(1, 130)
    world.prefill(3, 97)
    for step in range(1, 40):
        world.decode([1, 0, 3], [130 + step, 1, 97 + step])
        for layer in range(LAYERS):
            world.check_books(layer, 1, 130 + step)
            world.check_books(layer, 3, 97 + step)


def test_a_set_that_is_not_full_has_what_leaves_the_ring_next() -> None:
    """Nothing is skipped while all fits: after each step all but the next ring is resident."""
    world = World(exact_layers=(), late_layers=1, dense_while_fits=False)
    world.prefill(2, 30)
    for length in range(31, 60):
        world.decode([2], [length])
        for layer in range(LAYERS):
            _, positions = world.resident(layer, 2)
            end = length - NUM_RECENT + (layer == 0)
            for head in range(HEADS):
                held = positions[head][positions[head] >= 0].tolist()
                assert sorted(held) == list(range(end)), (length, layer)


def test_targets_leave_late_layers_out() -> None:
    rank = World(exact_layers=(), late_layers=1).rank
    assert [rank.program.targets_of(x) for x in range(LAYERS)] == [(1,), (2,), (3,), (4,), (5,), ()]
    rank = World(exact_layers=(), late_layers=2).rank
    assert [rank.program.targets_of(x) for x in range(LAYERS)] == [(), (2,), (3,), (4,), (5,), ()]
    assert World(exact_layers=()).rank.program.late_layers == ()


def test_selects_what_a_float64_scan_of_the_next_step_would() -> None:
    """That leaves the ring next is asked for most, and becomes a candidate with the next step."""
    world = World(exact_layers=(), late_layers=1, index_dtype="native", fetch_cap=32)
    world.prefill(2, 200)
    asked = torch.ones((1, QUERY_HEADS * DIM))
    last = 201 - NUM_RECENT
    world.pools.k[0][world.table[2, last].long()] = 9.0
    hidden = world.decode([2], [201], hidden=asked)
    _, positions = world.resident(0, 2)
    best = world.best(0, 2, last + 1, hidden, 32)
    assert (best[:, 0] == last).all()
    for head in range(HEADS):
        assert set(best[head].tolist()) <= set(positions[head].tolist())


def test_samples_are_weighed_for_the_next_step() -> None:
    world = World(exact_layers=(), late_layers=2, sample_tokens=8)
    weights = world.pools.log_weight
    assert weights is not None
    world.prefill(2, 150)
    for length in range(151, 156):
        world.decode([2], [length])
        for layer in range(LAYERS):
            _, positions = world.resident(layer, 2)
            hi = torch.tensor([length + (layer < 2) - NUM_RECENT])
            want = sample_weights(positions[None], hi, 4, 8)[0]
            torch.testing.assert_close(weights[layer, 2], want)


def test_counts_as_many_selections() -> None:
    world = World(exact_layers=(), late_layers=2)
    world.prefill(1, 150)
    world.decode([1], [151])
    totals = world.rank.counters()
    assert totals["selections_total"] == LAYERS
    assert totals["resident_hits_total"] + totals["resident_misses_total"] == LAYERS * HEADS * 32


def test_what_is_refused_says_what_to_do() -> None:
    with pytest.raises(SettingsError, match="late_layers=5: too many for 6 layers; use at most 4"):
        World(exact_layers=(), late_layers=5)
    with pytest.raises(SettingsError, match="use at most 0"):
        World(exact_layers=(2, 3, 4, 5), late_layers=1)
    with pytest.raises(ValueError, match="not policy=last_query; use --policy look_ahead"):
        World(policy="last_query", late_layers=1)
    with pytest.raises(ValueError, match="use --exact-layers none, or drop --late-layers"):
        World(exact_layers=(0,), late_layers=1)
    with pytest.raises(ValueError, match="late_layers does not go with share_layers"):
        World(exact_layers=(), late_layers=1, share_layers=True)
    assert World(exact_layers=(3,), late_layers=2).rank.program.late_layers == (0, 1)


@pytest.mark.parametrize(
    "selection",
    [{"exact_layers": (0,)}, {"exact_layers": (), "late_layers": 2}],
    ids=["none late", "two late"],
)
def test_between_two_gpus_sets_and_weights_are_those_of_one(selection: dict[str, Any]) -> None:
    """Requests join and leave; what is carried is what is written where it belongs."""
    worlds = [World(sample_tokens=8, **selection) for _ in range(2)]
    worlds[1].pools = replace(worlds[1].pools, is_far=True)
    worlds[1].rank = worlds[1].make()
    for world in worlds:
        world.prefill(1, 130)
        for step in range(1, 4):
            world.decode([1], [130 + step])
        world.prefill(3, 97)
        for step in range(4, 9):
            world.decode([3, 0, 1], [93 + step + 1, 1, 130 + step])
        for step in range(6, 9):
            world.decode([3], [93 + step + 1])
    one, two = (world.pools for world in worlds)
    assert one.log_weight is not None
    assert two.log_weight is not None
    assert bool(one.log_weight[1:, 1].isfinite().any())
    torch.testing.assert_close(one.log_weight, two.log_weight, rtol=0, atol=0, equal_nan=True)
    for (k, v), (far_k, far_v) in zip(one.resident, two.resident, strict=True):
        assert torch.equal(k, far_k)
        assert torch.equal(v, far_v)
