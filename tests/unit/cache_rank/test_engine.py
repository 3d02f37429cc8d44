# SPDX-License-Identifier: Apache-2.0
"""The engine: what its books say is what lies in the resident sets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_world import CONTEXT, DIM, HEADS, LAYERS, MODEL, QUERY_HEADS, World

from tandemkv.cache_rank.calibration.resolve import Resolved
from tandemkv.cache_rank.engine import cache_engine, factory
from tandemkv.cache_rank.policies.base import (
    LayerShare,
)
from tandemkv.cache_rank.protocol.errors import ContractError, SettingsError
from tandemkv.kernels.samples import sample_weights


@pytest.mark.parametrize("page_size", [1, 16])
def test_attends_to_all_tokens_of_each_request(page_size: int) -> None:
    world = World(page_size=page_size)
    for row, length in ((1, 200), (3, 17)):
        world.prefill(row, length)
    world.decode([3, 1], [18, 201])
    query = torch.randn((2, QUERY_HEADS, DIM), generator=world.generator)
    got = world.rank.attend(2, query)
    for i, (row, length) in enumerate(((3, 18), (1, 201))):
        want = attended(world, 2, row, length, query[i])
        torch.testing.assert_close(got[i].double(), want, atol=1e-5, rtol=1e-5)
    assert world.rank.attend(2, query.bfloat16()).dtype == torch.bfloat16


def attended(world: World, layer: int, row: int, length: int, query: torch.Tensor) -> torch.Tensor:
    """Return attention to all tokens of a row, ``[Hq, D]`` float64."""
    slots = world.table[row, :length].long()
    k, v = (x[layer][slots].double() for x in (world.pools.k, world.pools.v))
    grouped = query.double().view(HEADS, -1, DIM)
    weights = torch.softmax(torch.einsum("hgd,nhd->hgn", grouped, k) * MODEL.scale, -1)
    return torch.einsum("hgn,nhd->hgd", weights, v).reshape(QUERY_HEADS, DIM)


def test_of_a_sparse_layer_slow_requests_alone_attend_to_all() -> None:
    world, lengths = World(policy="sfi"), {1: 201, 3: 141}
    for row, length in lengths.items():
        world.prefill(row, length - 1)
    rows, slow = torch.tensor([*lengths]), torch.tensor([False, True])
    world.rank.begin_step()
    world.rank.begin_decode(rows, torch.tensor([*lengths.values()]), world.table, slow=slow)
    query = torch.randn((2, QUERY_HEADS, DIM), generator=world.generator)
    for layer in (0, 2):  # the first is exact
        got = world.rank.attend(layer, query).double()
        asked = zip(lengths.items(), query, strict=True)
        want = torch.stack([attended(world, layer, *request, q) for request, q in asked])
        if layer:
            want[~slow] = 0.0
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_a_step_is_loaded_on_the_engines_device() -> None:
    world, other = World(), torch.device("meta")
    rows, lengths = torch.tensor([1, 2], device=other), torch.tensor([90, 70], device=other)
    with pytest.raises(ContractError, match="requests on meta, the engine on cpu"):
        world.rank.begin_decode(rows, lengths, world.table.to(other))


@pytest.mark.parametrize("is_far", [False, True])
@pytest.mark.parametrize("policy", ["look_ahead", "kascade"])
def test_samples_are_weighed_with_every_selection(policy: str, is_far: bool) -> None:
    """By what is resident after it; a row that is filled anew has weights of nothing."""
    more = SHARING if policy == "kascade" else {}
    world = World(policy=policy, sample_tokens=8, **more)
    world.pools = replace(world.pools, is_far=is_far)
    world.rank = world.make()
    weights = world.pools.log_weight
    assert weights is not None
    world.prefill(2, 200)
    world.prefill(1, 120)
    sparse = [x for x in range(LAYERS) if world.rank.program.is_sparse_layer(x)]
    assert bool(weights[sparse][:, 1:3].isneginf().all())
    for step in range(1, 6):
        share(world, [2, 1], [200 + step, 120 + step])
        for layer in sparse:
            for row, length in ((2, 200 + step), (1, 120 + step)):
                _, positions = world.resident(layer, row)
                hi = torch.tensor([length - 16])
                want = sample_weights(positions[None], hi, 4, 8)[0]
                torch.testing.assert_close(weights[layer, row], want)
                assert bool(want.isfinite().any())
    assert bool(weights[:, 3].isnan().all()), "of others nothing is written"
    world.rank.seed_identity(torch.tensor([1]), world.table[1:2, : world.width])
    share(world, [2, 1], [206, world.lengths.num_cold])  # of the second, nothing is selected
    assert bool(weights[sparse][:, 1].isneginf().all())
    assert bool(weights[sparse][:, 2].isfinite().any())


SHARING = {"anchors": (0, 1, 3), "exact_layers": (0,), "budget_tokens": 24, "fetch_cap": 24}


def share(world: World, rows: list[int], lengths: list[int]) -> dict[int, torch.Tensor]:
    """Run one step as the inference rank does; returns the queries of the sources."""
    rank, queries = world.rank, {}
    rank.begin_step()
    rank.begin_decode(torch.tensor(rows), torch.tensor(lengths), world.table)
    for layer in range(LAYERS):
        named = rank.program.targets_of(layer) if rank.program.needs_hidden else (layer,)
        for source in filter(rank.program.is_source, named):
            hidden = torch.randn((len(rows), QUERY_HEADS * DIM), generator=world.generator)
            queries[source] = hidden
            if rank.program.needs_hidden:
                rank.choose_ahead(source, hidden)
            else:
                rank.choose(source, hidden.view(-1, QUERY_HEADS, DIM))
            if rank.program.is_sparse_layer(source):
                rank.fetch(source, len(rows))
            if not rank.program.selects_for_next_step:
                for follower in rank.program.followers_of(source):
                    rank.fetch(follower, len(rows))
        is_follower = rank.program.is_sparse_layer(layer) and not rank.program.is_source(layer)
        if rank.program.selects_for_next_step and is_follower:
            rank.fetch(layer, len(rows))
        rank.append(layer, len(rows))
    rank.end_step()
    return queries


@pytest.mark.parametrize("policy", ["kascade", "look_ahead", "async_spade"])
def test_layers_take_the_positions_of_their_anchor(policy: str) -> None:
    """Only anchors are indexed and scanned; a follower's heads take those they are mapped to."""
    # Others than kascade need anchors that are not exact; nobody follows its layer 0 here.
    more: dict[str, object] = {} if policy == "kascade" else {"anchors": (1, 3)}
    if policy == "async_spade":
        more["options"] = {"unrotate": False}
    world = World(policy=policy, share_layers=policy != "kascade", **SHARING | more)
    rank = world.rank
    assert tuple(x for x in range(LAYERS) if rank.program.is_source(x)) == (1, 3)
    assert [rank.program.followers_of(x) for x in range(LAYERS)] == [(), (2,), (), (4, 5), (), ()]
    assert rank.lane_of(2) == rank.lane_of(1) != rank.lane_of(3) == rank.lane_of(5)
    world.prefill(2, 200)
    queries = share(world, [2], [201])
    for layer, source in ((1, 1), (2, 1), (3, 3), (4, 3), (5, 3)):
        world.check_books(layer, 2, 201)
        if policy == "async_spade":
            continue  # scores with what it predicts
        best = world.best(source, 2, 201 - 16, queries[source], 24)
        _, positions = world.resident(layer, 2)
        for head in range(HEADS):
            assert set(best[head].tolist()) <= set(positions[head].tolist())


@pytest.mark.parametrize("policy", ["quest", "sfi", "oracle"])
def test_what_scans_work_in_is_for_those_whose_kernels_rank(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    monkeypatch.setattr(cache_engine, "make_select_scratch", lambda *_: made.append(1))
    World(policy=policy)
    assert bool(made) is (policy == "oracle")


def test_heads_of_a_follower_are_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = ((0, 1),) * 4 + ((1, 0), (1, 1))
    shared = Resolved(share=LayerShare((0, 1, 1, 3, 3, 3), maps))
    monkeypatch.setattr(factory, "resolve_calibration", lambda *_: shared)
    world = World(policy="kascade", **SHARING)
    world.prefill(1, 180)
    queries = share(world, [1], [181])
    best = world.best(3, 1, 181 - 16, queries[3], 24)
    for layer, heads in ((3, (0, 1)), (4, (1, 0)), (5, (1, 1))):
        _, positions = world.resident(layer, 1)
        for head, source in enumerate(heads):
            assert set(best[source].tolist()) <= set(positions[head].tolist())


def test_an_exact_anchor_selects_for_others_only() -> None:
    world = World(policy="kascade", **SHARING | {"anchors": (0, 3)})
    assert world.rank.program.followers_of(0) == (1, 2)
    assert not world.rank.program.is_sparse_layer(0)
    world.prefill(3, 150)
    queries = share(world, [3], [151])
    best = world.best(0, 3, 151 - 16, queries[0], 24)
    for layer in (1, 2):
        _, positions = world.resident(layer, 3)
        for head in range(HEADS):
            assert set(best[head].tolist()) <= set(positions[head].tolist())


def test_the_index_holds_sources_only() -> None:
    options = {"index_dtype": "int4", "page_size": 16}
    own = World(policy="look_ahead", exact_layers=(0,), **options).rank.counters()
    shared = World(policy="kascade", **SHARING, **options).rank.counters()
    assert shared["index_bytes"] * 5 == own["index_bytes"] * 2


@pytest.mark.parametrize(
    ("index_dtype", "page_size"), [("native", 1), ("int8", 1), ("int8", 16), ("int4", 16)]
)
def test_books_are_what_is_resident(index_dtype: str, page_size: int) -> None:
    world = World(index_dtype=index_dtype, page_size=page_size)
    world.prefill(1, 130)
    world.prefill(3, 97)
    for step in range(1, 40):
        world.decode([1, 0, 3], [130 + step, 1, 97 + step])
        for layer in (1, 2, 4, 5):
            world.check_books(layer, 1, 130 + step)
            world.check_books(layer, 3, 97 + step)


def test_counters_follow_the_selections() -> None:
    world = World(index_dtype="int8", page_size=16)
    world.prefill(1, 200)
    before = world.rank._mirror.positions.clone()
    world.decode([1, 0, 2], [201, 1, 30])  # the second is padding, the third fits as a whole
    totals = world.rank.counters()
    changed = int((world.rank._mirror.positions != before).sum())
    assert totals["selections_total"] == LAYERS - 1
    assert totals["fetched_rows_total"] == changed > 0
    selected = totals["resident_hits_total"] + totals["resident_misses_total"]
    assert selected == (LAYERS - 1) * HEADS * 32
    assert totals["resident_misses_total"] >= totals["fetched_rows_total"]
    last = world.rank.last_counters()  # on a GPU as of the step before
    assert last == {name: totals[name] for name in last}


def test_selects_what_a_float64_scan_would() -> None:
    """With a fetch cap of K the set holds the K best, by softmax mean over the group."""
    world = World(index_dtype="native", fetch_cap=32)
    world.prefill(2, 200)
    hidden = world.decode([2], [201])
    best = world.best(1, 2, 201 - 16, hidden, 32)
    _, positions = world.resident(1, 2)
    for head in range(HEADS):
        assert set(best[head].tolist()) <= set(positions[head].tolist())


def test_identity_seed_of_a_request_that_grew() -> None:
    world = World(index_dtype="int8", page_size=16)
    length = world.lengths.num_cold + 1
    rows = torch.tensor([2])
    table = world.table[2, :length]
    world.rank.begin_extend([2], [0], [length], [table])
    for layer in (1, 2):
        world.rank.extend(layer, table.long())
    world.rank.seed_identity(rows, world.table[rows, : world.width])
    keys, positions = world.resident(2, 2)
    assert positions.tolist() == [list(range(world.width))] * HEADS
    torch.testing.assert_close(keys, world.pools.k[2][table[: world.width].long()])
    world.decode([2], [length])
    world.check_books(2, 2, length)


def test_dense_and_padding_rows_are_left_alone() -> None:
    world = World()
    world.prefill(1, 200)
    before = world.rank._mirror.positions.clone()
    world.decode([0, 1], [1, world.lengths.num_cold])
    assert torch.equal(world.rank._mirror.positions, before)


def test_streaming_keeps_the_sink() -> None:
    world = World(policy="streaming", page_size=16)
    world.prefill(1, 150)
    for layer in (1, 2):
        torch.testing.assert_close(
            world.pools.resident[layer][0][1, :4], world.pools.k[layer][world.table[1, :4].long()]
        )
    assert not world.rank.program.selects


def test_pages_too_short_for_int4() -> None:
    with pytest.raises(SettingsError, match="page_size=1 is too short"):
        World(index_dtype="int4", page_size=1)


@pytest.mark.parametrize("is_predicted", [True, False], ids=["predicted", "own"])
def test_stress_moves_all_it_may(is_predicted: bool) -> None:
    """Of queries that stay the same; what is predicted depends on where it is predicted for."""
    world = World(policy="look_ahead" if is_predicted else "last_query", index_dtype="native")
    world.settings = world.settings.model_copy(update={"stress_selection": True})
    world.rank = world.make()
    turned = torch.randn((CONTEXT, QUERY_HEADS, DIM), generator=world.generator)
    world.rank._predict = lambda _layer, _hidden, positions: turned[positions]
    world.prefill(1, 220)
    changed, asked = [], set()
    for step in range(1, 6):
        before = world.rank._mirror.positions.clone()
        world.rank.begin_step()
        world.rank.begin_decode(torch.tensor([1]), torch.tensor([220 + step]), world.table)
        if is_predicted:
            world.rank.choose_ahead(1, torch.ones((1, QUERY_HEADS * DIM)))
            asked.add(int(world.rank._stress.positions(1)))
            assert 0 <= min(asked) <= max(asked) < 220 + step
        else:
            world.rank.choose(1, torch.ones((1, QUERY_HEADS, DIM)))
        world.rank.fetch(1, 1)
        changed.append(int((world.rank._mirror.positions != before).sum()))
    assert min(changed) == HEADS * 8
    assert not is_predicted or len(asked) == 5


def test_only_every_nth_step_selects() -> None:
    """Between two refreshes books and counters stay; the settings may be overruled at start."""
    world = World(refresh_every=3)
    world.prefill(1, 130)
    rank, selected = world.rank, 0
    for step in range(1, 13):
        if step == 7:
            rank.program.refresh_every = 2
        rows, lengths = torch.tensor([1]), torch.tensor([130 + step])
        rank.begin_step()
        selects = step % rank.program.refresh_every == 0
        rank.begin_decode(rows, lengths, world.table, selects=selects)
        if selects:
            selected += 1
            for layer in (1, 2):
                rank.choose(layer, torch.randn(1, QUERY_HEADS, DIM, generator=world.generator))
                rank.fetch(layer, 1)
        for layer in (1, 2):
            rank.append(layer, 1)
            world.check_books(layer, 1, 130 + step)
    assert rank.counters()["selections_total"] == (LAYERS - 1) * selected
