# SPDX-License-Identifier: Apache-2.0
"""Quest: bounds by hand and against float64."""

import pytest
import torch


def test_bounds_and_choice_by_hand(make_bench):
    """Two-token pages, one component each way; worked on paper."""
    bench = make_bench(
        "quest",
        lengths=(16,),
        options={"page_tokens": 2},
        budget_tokens=12,
        num_sink_tokens=0,
        pooling="max_logit",
    )
    bench.k.zero_()
    bench.slots = torch.arange(16, dtype=torch.int32)[None]
    # Head 0, component 0: pages (0,1): -1..2, (2,3): 3..3, (4,5): 0..0, (6,7): -5..0.
    for position, value in {0: -1.0, 1: 2.0, 2: 3.0, 3: 3.0, 6: -5.0}.items():
        bench.k[position, 0, 0] = value
    query = torch.zeros(1, 6, 8)
    query[0, 0, 0] = 2.0  # bounds 4, 6, 0, 0 (times the scale)
    query[0, 1, 0] = -1.0  # bounds 1, -3, 0, 5
    request = bench.request(query)
    chosen = bench.policy.select(request).positions[0]
    scores = bench.policy._bounds(query[0], request.pages, 0, 0, 8)
    torch.testing.assert_close(
        scores[0] / bench.context.model.scale, torch.tensor([4.0, 6.0, 0.0, 5.0])
    )
    assert chosen[0].tolist() == [2, 3, 6, 7, 0, 1, 4, 5, -1, -1, -1, -1]


def test_the_last_page_is_cut_at_the_budget(make_bench):
    bench = make_bench("quest", lengths=(100,), num_sink_tokens=3, budget_tokens=21)
    bench.k.zero_()
    bench.slots = torch.arange(100, dtype=torch.int32)[None]
    bench.k[40, :, 0] = 9.0  # page 2 = 32..47
    bench.k[4, :, 0] = 5.0  # page 0 = 3..15: the sink is not in it
    query = torch.zeros(1, 6, 8)
    query[..., 0] = 1.0
    chosen = bench.policy.select(bench.request(query)).positions[0, 0].tolist()
    assert chosen == [*range(32, 48), *range(3, 8)]


@pytest.mark.parametrize("size", [1, 3, 16])
def test_every_bound_is_one_and_is_reached_in_pages_of_one(make_bench, queries, size):
    bench = make_bench("quest", options={"page_tokens": size}, pooling="max_logit")
    request = bench.request(queries[0])
    model = bench.context.model
    for row, hi in enumerate(request.hi.tolist()):
        bounds = bench.policy._bounds(queries[0][row], request.pages, row, 4, hi).double()
        keys = bench.k[bench.slots[row, :hi].long()].double()
        grouped = queries[0][row].double().view(2, 3, 8)
        logits = torch.einsum("hgd,nhd->hgn", grouped, keys).amax(1) * model.scale
        for position in range(4, hi):
            bound = bounds[:, position // size - 4 // size]
            assert (bound >= logits[:, position] - 1e-6).all()
            if size == 1:
                torch.testing.assert_close(bound, logits[:, position], rtol=1e-5, atol=1e-5)
