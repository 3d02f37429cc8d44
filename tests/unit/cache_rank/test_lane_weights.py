# SPDX-License-Identifier: Apache-2.0
"""Where the weights of samples are written, on one GPU and between two."""

from __future__ import annotations

import torch

from tandemkv.cache_rank.engine.lanes import LaneWeights
from tandemkv.cache_rank.protocol.engine import EnginePools


def pools_of(*, is_far: bool, has_samples: bool = True) -> EnginePools:
    """Make pools of three layers and four rows, of two heads with six samples."""
    token, sets = torch.zeros(8, 2, 4), torch.zeros(4, 5, 2, 4)
    return EnginePools(
        k=[token] * 3, v=[token] * 3, resident=[(sets, sets)] * 3, page_size=1, is_far=is_far,
        log_weight=torch.zeros(3, 4, 2, 6) if has_samples else None,
    )  # fmt: skip


def test_on_one_gpu_they_are_written_where_they_belong() -> None:
    pools = pools_of(is_far=False)
    weights, active = LaneWeights(pools, 2), torch.ones(1, dtype=torch.bool)
    written = weights.written(2, 0)
    assert pools.log_weight is not None
    assert written is not None
    assert written.data_ptr() == pools.log_weight[2].data_ptr()
    assert weights.carried(2, 0, active) is None
    assert weights.nbytes == 0


def test_between_two_the_copy_carries_them() -> None:
    pools = pools_of(is_far=True)
    weights, active = LaneWeights(pools, 2), torch.tensor([True, False])
    assert pools.log_weight is not None
    assert weights.nbytes == 2 * 4 * 2 * 6 * 4
    for layer, lane in ((0, 0), (1, 1), (2, 0)):
        written, carried = weights.written(layer, lane), weights.carried(layer, lane, active)
        assert written is not None
        assert carried is not None
        written.fill_(layer + 1.0)
        assert torch.equal(carried.source, written)
        assert carried.target.data_ptr() == pools.log_weight[layer].data_ptr()
        assert carried.active is active
    assert not pools.log_weight.any()
    other, own = weights.written(0, 0), weights.written(0, 1)
    assert other is not None
    assert own is not None
    assert (float(other.mean()), float(own.mean())) == (3.0, 2.0), "a lane's memory is its own"


def test_without_samples_there_are_none() -> None:
    weights = LaneWeights(pools_of(is_far=True, has_samples=False), 2)
    assert weights.written(0, 0) is None
    assert weights.carried(0, 0, torch.ones(1, dtype=torch.bool)) is None
    assert weights.nbytes == 0
