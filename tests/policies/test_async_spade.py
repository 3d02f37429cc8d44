# SPDX-License-Identifier: Apache-2.0
"""AsyncSpade's windows: what is regressed on, and where the prediction points."""

from dataclasses import replace

import in_float64
import pytest
import torch

from tandemkv.cache_rank.policies.async_spade import AsyncSpadePolicy
from tandemkv.kernels.query_window import ridge_predict


def test_unrotated_window_and_rotated_prediction(make_bench, queries):
    bench = make_bench("async_spade", options={"window": 4})
    inv_freq = bench.context.rotary.inv_freq
    lengths = torch.tensor(bench.lengths)
    plain = queries[:7]
    rotated = [
        in_float64.rotated(query, lengths - 7 + i, inv_freq, 1.0).float()
        for i, query in enumerate(plain)
    ]
    bench.select(rotated)
    got = bench.policy.query_for(bench.request(rotated[-1]))
    window = torch.stack(plain[-5:], dim=2)  # [S, Hq, W + 1, D]
    predicted = ridge_predict(window, torch.full((2, 6), 5), eps=1e-2, sign=1, normalise="softmax")
    want = in_float64.rotated(predicted, lengths, inv_freq, 1.0).float()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_prompt_queries_fill_the_window(make_bench, queries):
    seeded = make_bench("async_spade", options={"window": 4, "unrotate": False})
    stepped = make_bench("async_spade", options={"window": 4, "unrotate": False})
    for row in range(2):
        prompt = torch.stack([query[row] for query in queries[:8]])
        seeded.policy.observe_prompt(1, (row + 1, 1), prompt, torch.arange(8))
    assert torch.equal(seeded.select(queries[8:10]), stepped.select(queries[:10]))


def test_layers_and_requests_have_windows_of_their_own(make_bench, queries):
    bench = make_bench("async_spade")
    one = bench.select(queries[:5], layer=1)
    bench.select(queries[5:10], layer=2)
    request = bench.request(queries[4], layer=1)
    assert torch.equal(bench.policy.select(request).positions, one)
    assert len(bench.policy.windows) == 2
    bench.policy.release((1, 1))
    assert len(bench.policy.windows) == 1
    with pytest.raises(KeyError):
        bench.policy.select(request)


def test_an_own_prediction_is_made_where_the_queries_are(make_bench):
    """On a GPU what overrides `predict` is called there; meta tensors do not mix with others."""
    bench = make_bench("async_spade")
    meta = torch.device("meta")
    policy = AsyncSpadePolicy(replace(bench.context, device=meta))
    query, positions = torch.empty(2, 6, 8, device=meta), torch.empty(2, device=meta).long()
    request = replace(bench.request(query), use_positions=positions)
    policy.observe_prompt(1, request.owners[1], query, positions)
    policy.observe(1, request.owners, query, positions)
    assert policy.query_for(request).device == meta
