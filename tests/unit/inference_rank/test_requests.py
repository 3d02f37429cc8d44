# SPDX-License-Identifier: Apache-2.0
"""Backend and cache rank of one process together: requests join, leave, and take over rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from request_world import ROWS1, WARM_UP, World


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
