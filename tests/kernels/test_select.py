# SPDX-License-Identifier: Apache-2.0
"""`score_topk` is a choice among float64 scores; its errors."""

import pytest
import torch
from score_inputs import among_others, expected, make_keys

from tandemkv.kernels.score import POOLINGS
from tandemkv.kernels.select import make_select_scratch, score_topk


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("kind", ["float32", "int8", "int4"])
def test_chooses_the_best(kind: str, pooling: str) -> None:
    torch.manual_seed(3)
    keys = make_keys(
        kind, num_reqs=3, heads=2, group=2, dim=16, page_size=16, num_pages=30
    )  # fmt: skip
    lo, hi = [4, 0, 7], [150, 9, 160]
    scratch = make_select_scratch(3, 4, 2, 160, 20, keys.q.device)
    positions, scores = score_topk(
        keys.q, keys.k_pool, keys.table, torch.tensor(lo), torch.tensor(hi), 20, width=160,
        scale=0.25, pooling=pooling, k_scale=keys.k_scale, page_size=16,
        active=torch.tensor([True, True, False]), scratch=scratch,
    )  # fmt: skip
    for req in range(2):
        want = expected(keys, req, lo[req], hi[req], pooling, 0.25)
        count = min(20, hi[req] - lo[req])
        for head in range(2):
            best = want[head].topk(count)
            chosen = positions[req, head, :count].sort().values
            assert torch.equal(chosen, (best.indices + lo[req]).sort().values.int())
            torch.testing.assert_close(
                scores[req, head, :count].sort(descending=True).values.double(), best.values,
                rtol=1e-4, atol=1e-4,
            )  # fmt: skip
        assert bool((positions[req, :, count:] == -1).all())
    assert bool((positions[2] == -1).all())
    assert bool((scores[2] == -torch.inf).all())


@pytest.mark.parametrize("kind", ["float32", "int8", "int4"])
def test_keys_of_some_channels_of_queries(kind: str) -> None:
    torch.manual_seed(5)
    keys = make_keys(kind, num_reqs=2, heads=3, group=2, dim=16, page_size=16, num_pages=20)
    wide, channels = among_others(keys.q, 3)
    ends = (torch.tensor([4, 0]), torch.tensor([150, 90]))
    options = {"width": 160, "scale": 0.25, "k_scale": keys.k_scale, "page_size": 16}
    want = score_topk(keys.q, keys.k_pool, keys.table, *ends, 20, **options)
    found = score_topk(wide, keys.k_pool, keys.table, *ends, 20, channels=channels, **options)
    assert torch.equal(found[0], want[0])
    assert torch.equal(found[1], want[1])
    for wrong in (channels[:2], channels[:, :8], channels.int(), channels.T.contiguous().T):
        with pytest.raises(ValueError, match="channels"):
            score_topk(wide, keys.k_pool, keys.table, *ends, 20, channels=wrong, **options)
    with pytest.raises(ValueError, match="head_dim"):
        score_topk(wide, keys.k_pool, keys.table, *ends, 20, **options)


def test_pools_over_positions() -> None:
    torch.manual_seed(4)
    keys = make_keys("float32", num_reqs=1, heads=2, group=2, dim=16, page_size=16, num_pages=10)
    positions, scores = score_topk(
        keys.q, keys.k_pool, keys.table, torch.tensor([4]), torch.tensor([150]), 15, width=160,
        scale=0.25, page_size=16, pooled_positions=(3, 1),
    )  # fmt: skip
    want = expected(keys, 0, 4, 150, "softmax_mean", 0.25)
    for head in range(2):
        best = int(want[head].argmax())
        near = range(max(4, best + 3), min(150, best + 8))  # `want` begins at position 4
        assert set(near) <= set(positions[0, head].tolist())
        assert float(scores[0, head].max()) == pytest.approx(float(want[head].max()), rel=1e-4)
    with pytest.raises(ValueError, match="after=32"):
        score_topk(
            keys.q, keys.k_pool, keys.table, torch.tensor([4]), torch.tensor([150]), 15, width=160,
            scale=0.25, page_size=16, pooled_positions=(0, 32),
        )  # fmt: skip


def test_errors_name_the_argument() -> None:
    k_pool, q = torch.zeros(8, 2, 4), torch.zeros(1, 4, 4)
    slots, lo, hi = torch.arange(6)[None], torch.tensor([0]), torch.tensor([6])
    with pytest.raises(ValueError, match="width=7"):
        score_topk(q, k_pool, slots, lo, hi, 2, width=7, scale=1.0)
    with pytest.raises(ValueError, match="k=-1"):
        score_topk(q, k_pool, slots, lo, hi, -1, width=6, scale=1.0)
    with pytest.raises(ValueError, match="pooling='mean'"):
        score_topk(q, k_pool, slots, lo, hi, 2, width=6, scale=1.0, pooling="mean")
    with pytest.raises(ValueError, match="active"):
        score_topk(q, k_pool, slots, lo, hi, 2, width=6, scale=1.0, active=torch.zeros(2))
    scratch = make_select_scratch(1, 4, 2, 6, 2, q.device)
    with pytest.raises(ValueError, match="make_select_scratch"):
        score_topk(q[[0, 0]], k_pool, slots[[0, 0]], lo[[0, 0]], hi[[0, 0]], 2, width=6,
                   scale=1.0, scratch=scratch)  # fmt: skip
