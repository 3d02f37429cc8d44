# SPDX-License-Identifier: Apache-2.0
"""Quest: bounds by hand, the index against float64, and what it must not read again."""

import pytest
import torch

from tandemkv.cache_rank.policies.base import StoredKV


def pages_of(bench, row=1, layer=1):
    return bench.policy._pages[(row, 1)][layer]


def test_bounds_and_choice_by_hand(make_bench):
    """Two-token pages, one component each way; worked on paper."""
    bench = make_bench(
        "quest",
        lengths=(16,),
        quest_page_tokens=2,
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
    scores = bench.policy._bounds(query[0], pages_of(bench), 0, 8)
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
    bench = make_bench("quest", quest_page_tokens=size, pooling="max_logit")
    request = bench.request(queries[0])
    bench.policy.select(request)
    model = bench.context.model
    for row, hi in enumerate(request.hi.tolist()):
        bounds = bench.policy._bounds(queries[0][row], pages_of(bench, row + 1), 4, hi).double()
        keys = bench.k[bench.slots[row, :hi].long()].double()
        grouped = queries[0][row].double().view(2, 3, 8)
        logits = torch.einsum("hgd,nhd->hgn", grouped, keys).amax(1) * model.scale
        for position in range(4, hi):
            bound = bounds[:, position // size - 4 // size]
            assert (bound >= logits[:, position] - 1e-6).all()
            if size == 1:
                torch.testing.assert_close(bound, logits[:, position], rtol=1e-5, atol=1e-5)


def test_a_grown_index_is_the_one_built_at_once(make_bench, queries):
    grown = make_bench("quest", lengths=(40, 30), quest_page_tokens=7)
    whole = make_bench("quest", lengths=(73, 63), quest_page_tokens=7)
    grown.k, grown.slots = whole.k, whole.slots
    for _ in range(12):
        grown.policy.select(grown.request(queries[0]))
        grown.lengths = tuple(n + 3 for n in grown.lengths)
    grown.lengths = (73, 63)
    first = grown.policy.select(grown.request(queries[1])).positions
    assert torch.equal(first, whole.policy.select(whole.request(queries[1])).positions)
    for row in (1, 2):
        ours, theirs = pages_of(grown, row), pages_of(whole, row)
        pages = -(-theirs.end // 7)
        assert ours.end == theirs.end
        assert torch.equal(ours.low[:, :pages], theirs.low[:, :pages])
        assert torch.equal(ours.high[:, :pages], theirs.high[:, :pages])


def test_slots_may_move_and_old_ones_are_not_read_again(make_bench, queries):
    bench, still = make_bench("quest"), make_bench("quest")
    for each in (bench, still):
        each.policy.select(each.request(queries[0]))
    moved = torch.randperm(256, generator=torch.Generator().manual_seed(9))
    pool = torch.empty_like(bench.k)
    pool[moved] = bench.k
    # What is indexed already is poisoned: only the new positions may be read.
    for row, length in enumerate(bench.lengths):
        pool[moved[bench.slots[row, : length - 8].long()]] = float("nan")
    slots = moved[bench.slots.long()].to(torch.int32)
    bench.lengths = still.lengths = (70, 100)
    request = bench.request(queries[1])
    object.__setattr__(request, "stored", StoredKV(pool, pool, slots))
    got = bench.policy.select(request).positions
    assert torch.equal(got, still.policy.select(still.request(queries[1])).positions)


def test_a_row_with_another_tenant_starts_afresh(make_bench, queries):
    bench = make_bench("quest")
    bench.policy.select(bench.request(queries[0]))
    old = bench.k.clone()
    bench.k.neg_()
    request = bench.request(queries[1])
    object.__setattr__(request, "owners", [(1, 2), (2, 2)])
    got = bench.policy.select(request).positions
    fresh = make_bench("quest")
    fresh.k = bench.k
    assert torch.equal(got, fresh.policy.select(fresh.request(queries[1])).positions)
    assert not torch.equal(old, bench.k)
