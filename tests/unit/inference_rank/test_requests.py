# SPDX-License-Identifier: Apache-2.0
"""Backend and cache rank of one process together: requests join, leave, and take over rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from request_world import CONTEXT, MOST, RECENT, ROWS1, WARM_UP, Request, World


@pytest.mark.parametrize("own", [False, True], ids=["pool", "own"])
@pytest.mark.parametrize(
    "selection",
    [
        {"late_layers": 1, "sample_tokens": 8},
        {"late_layers": 1, "sample_tokens": 8, "refresh_every": 3, "index_dtype": "int8"},
        {"policy": "last_query", "share_layers": True, "anchors": (1, 2), "exact_layers": (0,)},
        {"policy": "streaming", "dense_while_fits": False},
        {"sample_tokens": 8, "dense_batch_tokens": 150},
        {"policy": "last_query", "dense_batch_tokens": 150, "exact_layers": (0,)},
        {
            "late_layers": 1, "sample_tokens": 8, "refresh_every": 3, "index_dtype": "int8",
            "dense_batch_tokens": 150,
        },
    ],
    ids=[
        "late", "refresh", "shared, next step", "streaming", "small batches",
        "small batches, next step", "small batches, refresh",
    ],
)  # fmt: skip
def test_requests_attend_to_their_own(
    own: bool, selection: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if own and "dense_batch_tokens" in selection:
        pytest.skip("another GPU's K/V are not at hand")
    monkeypatch.setattr("tandemkv.inference_rank.attention.dense_steps.WARM_UP_STEPS", WARM_UP)
    torch.manual_seed(0)
    world = World(own=own, seed=5, **selection)
    for _ in range(110):
        if world.rows and (not world.running or world.random.random() < 0.1):
            world.admit()
        else:
            world.decode()
    counters = world.runtime.counters
    assert counters.sparse_rows_total + counters.dense_rows_total == world.num_decoded
    assert min(counters.sparse_rows_total, counters.dense_rows_total) > 0
    assert world.num_checked > 0
    assert world.num_made > len(world.running) + ROWS1
    assert bool(world.num_small) == ("dense_batch_tokens" in selection)


@pytest.mark.parametrize(
    ("selection", "joined_at", "num_steps"),
    [
        ({"dense_tokens": 150}, 0, 64),
        ({"dense_tokens": 100}, 0, 0),
        ({"dense_batch_tokens": 150}, 140, 20),
    ],
    ids=["long", "short", "small batches"],
)
def test_sets_are_selected_for_before_they_are_attended_to(
    selection: dict[str, int], joined_at: int, num_steps: int
) -> None:
    """However seldom they are refreshed after that; also once a small batch has grown."""
    world = World(own=False, seed=5, sample_tokens=8, refresh_every=100, **selection)
    world.random.random = lambda: 0.5  # type: ignore[method-assign]
    world.waiting.append(Request(MOST + torch.arange(CONTEXT), 50, CONTEXT))
    world.admit()
    world.backend._num_steps = num_steps  # so that no refresh falls into the warm-up
    row, samples = world.running[0].row, world.home.samples
    assert samples is not None
    in_set: set[int] = set()
    num_counted: list[int] = []

    def look(layer: int, place: int, request: Request) -> None:
        count = int(world.home.table.attended[place])
        if request.row == row and count < request.length:
            slots = world.home.table.slots[place, :count].long()
            held = (world.pool.k[layer][slots][..., 0].long() % MOST).flatten()
            in_set.update(held[held < request.length - RECENT].tolist())
            num_counted.append(int(samples.log_weight[layer, row].isfinite().sum()))

    world.check = look  # type: ignore[method-assign]
    while not num_counted:
        if world.running[0].length == joined_at:
            world.waiting.append(Request(2 * MOST + torch.arange(CONTEXT), 100, CONTEXT))
            world.admit()
        world.decode()
    assert min(num_counted) > 0
    assert max(in_set) >= world.num_resident, "the first tokens alone"
