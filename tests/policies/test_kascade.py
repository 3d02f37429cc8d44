# SPDX-License-Identifier: Apache-2.0
"""Kascade by hand: post-softmax pooling, the budget by context, who follows whom."""

import math
from dataclasses import replace

import pytest
import torch

from tandemkv.cache_rank.calibration.resolve import share_of
from tandemkv.cache_rank.policies.base import PolicyError
from tandemkv.cache_rank.policies.kascade import KascadePolicy


def make(make_bench, **changes):
    bench = make_bench("kascade", anchors=(0, 1), **changes)
    share = share_of((0, 1), ((0, 1),) * 3)
    bench.policy = KascadePolicy(replace(bench.context, share=share))
    return bench


def test_pooled_after_the_softmax(make_bench):
    """Three candidates; logits ln (8, 1, 1) in two query heads, ln (1, 100, 1) in the third.

    Softmaxes (.8, .1, .1) twice and (1, 100, 1) / 102: the first candidate has most of their mean.
    Pooled before the softmax the second would win, with ln 100 against 2 ln 8.
    """
    bench = make(make_bench, lengths=(15,), budget_tokens=12)
    bench.k = torch.zeros(256, 2, 8)
    for position, (first, second) in zip((4, 5, 6), ((8, 1), (1, 100), (1, 1)), strict=True):
        slot = int(bench.slots[0, position])
        bench.k[slot, 0, 0], bench.k[slot, 0, 1] = math.log(first), math.log(second)
    query = torch.zeros(1, 6, 8)
    query[0, 0, 0] = query[0, 1, 1] = query[0, 2, 0] = math.sqrt(8)  # scale is 1 / sqrt(8)
    scores = bench.request(query).score(query)[0, 0, 4:7]
    want = torch.tensor([1.6 + 1 / 102, 0.2 + 100 / 102, 0.2 + 1 / 102]) / 3
    torch.testing.assert_close(scores, want)
    assert bench.select([query])[0, 0, :3].tolist() == [4, 5, 6]
    before = make(make_bench, lengths=(15,), budget_tokens=12, pooling="mean_logit")
    before.k = bench.k
    assert before.select([query])[0, 0, :3].tolist() == [5, 4, 6]


def test_the_anchors_selection_is_the_oracles(make_bench, queries):
    ours, oracle = make(make_bench), make_bench("oracle")
    assert torch.equal(ours.select(queries), oracle.select(queries))


@pytest.mark.parametrize(
    ("length", "fraction", "want"),
    [(250, 0.1, 128), (250, 0.6, 150), (250, 0.0, 160), (100, 0.1, 88), (250, 1.0, 160)],
)
def test_budget_by_context(make_bench, queries, length, fraction, want):
    """K = min(max(fraction L, 128), L), at most the budget of 160; 88 candidates at 100."""
    bench = make(make_bench, lengths=(length,), budget_tokens=160, options={"fraction": fraction})
    chosen = bench.select([query[:1] for query in queries])
    assert (chosen >= 0).sum(-1).tolist() == [[want, want]]
    assert (chosen[..., :want] >= 0).all(), "padding comes last"
    full = make(make_bench, lengths=(length,), budget_tokens=160)
    assert torch.equal(
        full.select([query[:1] for query in queries])[..., :want], chosen[..., :want]
    )


def test_layers_follow_the_last_anchor_before_them():
    assert share_of((0, 2, 5), ((0,),) * 7).sources == (0, 0, 2, 2, 2, 5, 5)
    assert share_of((2,), ((0,),) * 4).sources == (0, 1, 2, 2)


def test_without_anchors_it_says_what_to_do(make_bench):
    with pytest.raises(PolicyError, match="tandemkv calibrate MODEL --policy kascade"):
        make_bench("kascade")


def test_traits_name_the_sources(make_bench):
    assert make(make_bench).policy.traits.layer_sources == (0, 1, 1)
    assert make_bench("oracle").policy.traits.layer_sources == ()
