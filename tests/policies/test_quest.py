# SPDX-License-Identifier: Apache-2.0
"""Quest: bounds by hand and against float64."""

from dataclasses import replace

import in_float64
import pytest
import torch

from tandemkv.cache_rank.policies import quest
from tandemkv.cache_rank.policies.base import SelectionInput


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


def best_of(request, i, head, context):
    """Positions of the pages with the highest bounds, page by page in float64."""
    pages, size, group = request.pages, request.pages.page_tokens, context.model.gqa_group_size
    lo, hi = int(request.lo[i]), int(request.hi[i])
    if lo >= hi:
        return []
    query = request.query[i, head * group : (head + 1) * group]
    numbers = range(lo // size, (hi - 1) // size + 1)
    bounds = pages.bounds[:, request.rows[i], list(numbers), head : head + 1]
    pooling, scale = context.selection.pooling, context.model.scale
    (scores,) = in_float64.page_scores(query, bounds, pooling, scale)
    ranked = [numbers[j] for j in scores.argsort(descending=True).tolist()]
    positions = [p * size + j for p in ranked for j in range(size)]
    return [position for position in positions if lo <= position < hi][: request.budget]


@pytest.mark.parametrize("pooling", ["softmax_mean", "max_logit", "mean_logit"])
@pytest.mark.parametrize(("size", "budget"), [(1, 24), (7, 24), (16, 33), (16, 300), (64, 13)])
def test_the_choice_is_that_of_a_loop_over_pages(make_bench, size, budget, pooling):
    """Requests without candidates, with one, and with pages that begin or end within a page."""
    bench = make_bench(
        "quest",
        lengths=(70, 8, 100, 12, 13, 28, 29, 250),
        options={"page_tokens": size},
        budget_tokens=budget,
        pooling=pooling,
    )
    generator = torch.Generator().manual_seed(size)
    request = bench.request(torch.randn(8, 6, 8, generator=generator))
    request.pages.bounds[:, 0] = float("nan")  # of nobody's row
    chosen = bench.policy.select(request).positions
    assert chosen.shape == (8, 2, budget)
    for i in range(8):
        for head in range(2):
            want = best_of(request, i, head, bench.context)
            assert chosen[i, head].tolist() == want + [-1] * (budget - len(want))


def test_nothing_is_chosen_by_what_is_no_number(make_bench, queries):
    bench = make_bench("quest")
    query = queries[0].clone()
    query[0, 4] = float("nan")  # in the group of the second head
    chosen = bench.policy.select(bench.request(query)).positions
    assert (chosen[0, 1] == -1).all()
    want = bench.policy.select(bench.request(queries[0])).positions
    assert torch.equal(chosen[0, 0], want[0, 0])
    assert torch.equal(chosen[1], want[1])


def moved(request: SelectionInput, device: str) -> SelectionInput:
    """The same request on another device, without what Quest does not read."""
    names = ("rows", "query", "lo", "hi")
    tensors = {name: getattr(request, name).to(device) for name in names}
    pages = replace(request.pages, bounds=request.pages.bounds.to(device))
    return replace(request, **tensors, pages=pages)


def test_a_choice_has_no_value_on_the_host(make_bench, queries, monkeypatch):
    """As in a step that is captured: tensors of ``meta`` have none. Kernels are left out."""

    def scores(q, bounds, *_, num_pages, **__):
        return q.new_empty((len(q), bounds.shape[3], num_pages))

    def best(scores, k):
        return scores.new_empty((*scores.shape[:2], k), dtype=torch.int32)

    monkeypatch.setattr(quest, "score_pages", scores)
    monkeypatch.setattr(quest, "topk_positions", best)
    bench = make_bench("quest")
    selection = bench.policy.select(moved(bench.request(queries[0]), "meta"))
    selection.check((2, 2, 24))
    assert selection.positions.is_meta


@pytest.mark.gpu
@pytest.mark.parametrize("pooling", ["softmax_mean", "max_logit", "mean_logit"])
def test_a_replayed_graph_follows_rows_and_lengths(make_bench, queries, pooling):
    pytest.importorskip("triton")
    bench = make_bench("quest", options={"page_tokens": 7}, pooling=pooling)
    here = bench.request(queries[0])
    there = moved(here, "cuda")
    there.hi.zero_()  # padding, as when SGLang captures
    bench.policy.select(there)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = bench.policy.select(there).positions
    for query, rows, lo, hi in (
        (queries[0], [1, 2], [4, 4], [62, 92]),
        (queries[1], [2, 0], [5, 4], [90, 0]),
        (queries[2], [0, 1], [0, 4], [0, 5]),
    ):
        ranges = dict(zip(("rows", "lo", "hi"), map(torch.tensor, (rows, lo, hi)), strict=True))
        for name, value in ({"query": query} | ranges).items():
            getattr(there, name).copy_(value)
        graph.replay()
        want = bench.policy.select(replace(here, query=query, **ranges)).positions
        assert torch.equal(got.cpu(), want)
