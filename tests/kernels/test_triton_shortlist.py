# SPDX-License-Identifier: Apache-2.0
"""Shortlists: the reference against float64, and the Triton kernels, interpreted without a GPU."""

from pathlib import Path

import pytest
import torch
from own_process import run_cases

from tandemkv.kernels.shortlist import choose_listed, make_shortlist_scratch


def test_triton_kernels_equal_the_references(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    run_cases("triton_shortlist_cases.py", tmp_path)


@pytest.mark.parametrize("pooling", ["softmax_mean", "max_logit", "mean_logit"])
def test_the_best_of_a_list_by_hand(pooling: str) -> None:
    """One KV head with two query heads; pages of 4 in reverse order."""
    torch.manual_seed(0)
    q, pool = torch.randn(1, 2, 8), torch.randn(40, 1, 8)
    slots = torch.arange(9, -1, -1, dtype=torch.int32)[None]
    listed = torch.tensor([[[9, 33, 4, 12, 7, -1, -1]]], dtype=torch.int32)
    chosen, scores = choose_listed(
        q, pool, slots, listed, 3, scale=0.5, pooling=pooling, page_size=4
    )
    positions = [9, 33, 4, 12, 7]
    keys = torch.stack([pool[(9 - p // 4) * 4 + p % 4, 0] for p in positions]).double()
    logits = q[0].double() @ keys.T * 0.5
    want = {
        "softmax_mean": logits.softmax(-1).mean(0),
        "max_logit": logits.amax(0),
        "mean_logit": logits.mean(0),
    }[pooling]
    order = want.argsort(descending=True)[:3]
    assert sorted(chosen[0, 0].tolist()) == sorted(positions[i] for i in order)
    assert sorted(scores[0, 0].tolist()) == pytest.approx(sorted(want[order].tolist()), rel=1e-5)


def test_errors_say_what_is_required() -> None:
    q, pool, slots = torch.randn(1, 2, 8), torch.randn(40, 1, 8), torch.zeros(1, 10).int()
    listed = torch.zeros((1, 1, 200), dtype=torch.int32)
    with pytest.raises(ValueError, match=r"k=-1: must be >= 0"):
        choose_listed(q, pool, slots, listed, -1, scale=1.0)
    small = make_shortlist_scratch(1, 2, 1, 64, torch.device("cpu"))
    with pytest.raises(ValueError, match="make_shortlist_scratch"):
        choose_listed(q, pool, slots, listed, 1, scale=1.0, scratch=small)
