# SPDX-License-Identifier: Apache-2.0
"""Every policy in the engine: what it overrides is called, and decides what is resident."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import own_policy
import pytest
import torch
from bounds_by_page import page_bounds
from engine_world import DIM, HEADS, LAYERS, MODEL, QUERY_HEADS, World
from safetensors.torch import save_file

from tandemkv.cache_rank.calibration.resolve import Resolved
from tandemkv.cache_rank.engine import factory
from tandemkv.cache_rank.engine.page_index import PageBoundsIndex
from tandemkv.cache_rank.engine.policy_calls import PolicyCalls
from tandemkv.cache_rank.policies.async_spade import AsyncSpadePolicy
from tandemkv.cache_rank.policies.base import (
    HeadClusters,
    PolicyContext,
    PolicyError,
    SelectionInput,
    StoredKV,
)
from tandemkv.cache_rank.policies.checkpoint import Checkpoint
from tandemkv.cache_rank.policies.composition import (
    Composition,
    check_device,
    check_placement,
    check_shards,
    is_captured,
)
from tandemkv.cache_rank.policies.registry import (
    POLICIES,
    find_policy,
    resolve_selection,
)
from tandemkv.cache_rank.protocol.settings.declared import DeclaredPolicy
from tandemkv.cache_rank.protocol.settings.placement import Placement
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings
from tandemkv.kernels.attention import attend_paged
from tandemkv.kernels.merge import merge_attention

SINK, RECENT = 4, 16
SPARSE = range(1, LAYERS)


def step(
    world: World, rows: list[int], lengths: list[int], slow: list[bool] | None = None
) -> dict[int, torch.Tensor]:
    """Run a step with true queries, as a link does; returns them by layer."""
    rank, queries = world.rank, {}
    rank.begin_step()
    marked = None if slow is None else torch.tensor(slow)
    rank.begin_decode(torch.tensor(rows), torch.tensor(lengths), world.table, slow=marked)
    for layer in SPARSE:
        shape = (len(rows), QUERY_HEADS, DIM)
        query = queries[layer] = torch.randn(shape, generator=world.generator)
        if rank.program.selects_for_next_step:
            rank.append(layer, len(rows))
        rank.choose(layer, query)
        rank.fetch(layer, len(rows))
        if not rank.program.selects_for_next_step:
            rank.append(layer, len(rows))
    rank.end_step()
    return queries


def request_of(world: World, layer: int, row: int, hi: int, query: torch.Tensor) -> SelectionInput:
    """What a policy is asked about one row, put together by hand."""
    slots, keys = world.table[row : row + 1, :hi], world.pools.k[layer]
    lo, ends = torch.tensor([SINK]), torch.tensor([hi])
    selection = world.settings.selection

    def score(asked: torch.Tensor) -> torch.Tensor:
        own = keys[slots[0, SINK:].long()][:, -asked.shape[1] // 2 :]
        logits = torch.einsum("hgd,nhd->hgn", asked[0].view(own.shape[1], -1, DIM), own)
        scores = torch.full((1, own.shape[1], hi), float("-inf"))
        scores[0, :, SINK:] = torch.softmax(logits * MODEL.scale, -1).mean(1)
        return scores

    return SelectionInput(
        layer=layer,
        owners=[(row, 1)],
        rows=torch.tensor([row]),
        query=query,
        positions=ends,
        use_positions=ends,
        score=score,
        budget=selection.budget_tokens,
        lo=lo,
        hi=ends,
        stored=StoredKV(keys, world.pools.v[layer], slots),
        pages=page_bounds(
            keys,
            slots,
            torch.tensor([row]),
            lo,
            ends,
            page_tokens=int(str(selection.options.get("page_tokens", 16))),
        ),
    )


@pytest.mark.parametrize(("page_size", "skip"), [(1, 0), (16, 0), (16, 5)])
def test_a_users_seeding_and_ranking_decide(page_size: int, skip: int) -> None:
    own_policy.CALLS.clear()
    world = World(
        policy="own_policy:NewestFirst", fetch_cap=32, page_size=page_size, options={"skip": skip}
    )
    world.prefill(1, 200)
    for layer in SPARSE:
        assert world.resident(layer, 1)[1].tolist() == [list(range(world.width))] * HEADS
    step(world, [0, 1, 2], [1, 201, 30])
    newest = set(range(201 - RECENT - 32 - skip, 201 - RECENT - skip))
    for layer in SPARSE:
        world.check_books(layer, 1, 201)
        for head in world.resident(layer, 1)[1].tolist():
            assert newest <= set(head)
    calls = own_policy.CALLS
    assert calls["seed_scores"] == calls["select"] == len(SPARSE)
    world.prefill(1, 120)
    assert calls["release (1, 1)"] == 1, "somebody else is in the row"


def test_pooling_of_ones_own_ranks_prompts_and_steps() -> None:
    own_policy.CALLS.clear()
    world = World(policy="own_policy:WorstFirst", fetch_cap=32, resident_factor=1.0)
    world.prefill(2, 180)
    assert own_policy.CALLS["pooled"] == len(SPARSE)
    queries = step(world, [2], [181])
    assert own_policy.CALLS["pooled"] == 2 * len(SPARSE)
    for layer in SPARSE:
        hi = 181 - RECENT
        ranked = world.best(layer, 2, hi, queries[layer], hi - SINK)
        for head, held in enumerate(world.resident(layer, 2)[1].tolist()):
            assert set(ranked[head, -32:].tolist()) <= set(held)


def indexer(folder: Path, layers: Iterable[int] = SPARSE) -> dict[str, torch.Tensor]:
    """A checkpoint of `own_policy.LearnedIndexer` with random weights, in two files."""
    generator = torch.Generator().manual_seed(3)
    tensors = {
        f"model.layers.{layer}.self_attn.indexer.weight": torch.randn(
            (QUERY_HEADS, DIM, DIM), generator=generator
        )
        for layer in layers
    }
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[::2]}, folder / "a.safetensors")
    save_file({name: tensors[name] for name in names[1::2]}, folder / "b.safetensors")
    return tensors


@pytest.mark.parametrize("in_option", [False, True])
def test_a_selector_that_the_model_brings_ranks(tmp_path: Path, in_option: bool) -> None:
    tensors = indexer(tmp_path)
    world = World(
        policy="own_policy:LearnedIndexer", fetch_cap=32, resident_factor=1.0,
        model_dir=None if in_option else tmp_path,
        options={"weights": str(tmp_path) if in_option else ""},
    )  # fmt: skip
    world.prefill(2, 180)
    hidden = world.decode([2], [181])
    for layer in SPARSE:
        world.check_books(layer, 2, 181)
        weight = tensors[f"model.layers.{layer}.self_attn.indexer.weight"].double()
        turned = torch.einsum("hij,hj->hi", weight, hidden.view(QUERY_HEADS, DIM).double())
        best = world.best(layer, 2, 181 - RECENT, turned, 32)
        plain = world.best(layer, 2, 181 - RECENT, hidden, 32)
        for head, held in enumerate(world.resident(layer, 2)[1].tolist()):
            assert set(best[head].tolist()) <= set(held)
            assert not set(plain[head].tolist()) <= set(held)


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    indexer(tmp_path, (1,))
    with pytest.raises(PolicyError, match=r"no safetensors file holds model\.layers\.2\."):
        World(policy="own_policy:LearnedIndexer", model_dir=tmp_path).make()
    found = Checkpoint(tmp_path)
    with pytest.raises(PolicyError, match=r"is \(4, 16, 16\), and .* need \(3,\)"):
        found.tensor("model.layers.1.self_attn.indexer.weight", shape=(3,))
    (tmp_path / "c.safetensors").write_bytes(b"no")
    with pytest.raises(PolicyError, match=r"c\.safetensors: cannot be read"):
        Checkpoint(tmp_path).tensor("x", shape=(1,))


def test_what_is_fused_is_found_by_what_is_overridden() -> None:
    class Slower(AsyncSpadePolicy):
        def predict(self, windows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            return super().predict(windows, counts)

    found = {name: find_policy(name) for name in POLICIES}
    own = {x for x, c in found.items() if c.capabilities.attends or Composition.of(c).selects}
    assert own == {"quest", "sfi", "sync_kv", "lfps"}
    assert not Composition.of(AsyncSpadePolicy).observes_prompt
    assert Composition.of(Slower).selects
    assert Composition.of(Slower).observes_prompt


def test_a_gpu_captures_what_is_the_same_in_each_step() -> None:
    class Captured(own_policy.NewestFirst):
        capabilities = replace(own_policy.NewestFirst.capabilities, graph_safe=True)

    for name in ("own_policy:NewestFirst", "sfi", "sync_kv"):
        check_device(find_policy(name), name, "cuda")
        assert not is_captured(find_policy(name))
    assert is_captured(Captured)
    for name in ("look_ahead", "kascade", "async_spade", "oracle", "quest", "streaming"):
        assert is_captured(find_policy(name))
    with pytest.raises(PolicyError, match="lfps does not run on cuda; use --device cpu"):
        check_device(find_policy("lfps"), "lfps", "cuda")
    check_device(find_policy("lfps"), "lfps", "cpu")


@pytest.mark.parametrize(
    ("placement", "is_refused"),
    [
        ({"link": "local"}, False),
        ({"link": "shared", "two_gpus": True}, False),
        ({"link": "shared"}, False),
        ({"link": "shared", "two_gpus": True, "tp_size": 2}, False),
        ({"link": "shared", "two_gpus": True, "head_shards": 2}, True),
        ({"link": "message", "two_gpus": True}, True),
    ],
    ids=str,
)
def test_on_gpus_what_is_not_captured_has_one_cache_rank_that_maps_memory(
    placement: dict[str, Any], is_refused: bool
) -> None:
    name, policy = "own_policy:NewestFirst", own_policy.NewestFirst
    check_placement(policy, name, Placement(model_device="cpu", **placement))
    check_placement(find_policy("oracle"), "oracle", Placement(model_device="cuda", **placement))
    on_gpus = Placement(model_device="cuda", **placement)
    if not is_refused:
        check_placement(policy, name, on_gpus)
        return
    with pytest.raises(PolicyError, match=r"not captured.* --transport shared, --cache-ranks 0, "):
        check_placement(policy, name, on_gpus)


@pytest.mark.parametrize("policy", ["quest", "sfi", "sync_kv", "own_policy:NewestFirst"])
def test_steps_make_tensors_where_the_engine_is(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is made on the default device is made on another one, as on a GPU."""
    monkeypatch.setattr(factory, "resolve_calibration", lambda *_: Resolved(clusters=CLUSTERS))
    slow = None if policy in {"quest", "own_policy:NewestFirst"} else [False, True, True]
    for more in ({}, {"options": {"union": True}} if policy == "sync_kv" else {}):
        world = World(policy=policy, fetch_cap=32, **more)
        rows, lengths = torch.tensor([1, 2, 0]), torch.tensor([201, 31, 1])
        marked = None if slow is None else torch.tensor(slow)
        queries = torch.randn((3, QUERY_HEADS, DIM), generator=world.generator)
        with torch.device("meta"):
            for row, length in ((1, 200), (2, 30)):
                table = world.table[row, :length]
                world.rank.begin_extend([row], [0], [length], [table])
                for layer in SPARSE:
                    world.rank.extend(layer, table.long())
                    world.rank.seed(layer, 0, row, queries)
            world.rank.begin_step()
            world.rank.begin_decode(rows, lengths, world.table, slow=marked)
            for layer in SPARSE:
                world.rank.choose(layer, queries)
                world.rank.fetch(layer, 3)
                world.rank.append(layer, 3)
            world.rank.end_step()
        for layer in SPARSE:
            world.check_books(layer, 1, 201)


def test_who_asks_is_named_where_steps_are_not_captured() -> None:
    """On a GPU as on a CPU; nobody waits for the rows of a step that is captured."""
    world = World(policy="own_policy:NewestFirst")
    rank, captured = world.rank, copy(world.rank.program)
    captured.is_captured = True
    pools = replace(world.pools, k=[x.to("meta") for x in world.pools.k])
    for program, owners in ((rank.program, ((2, 1), (0, 0))), (captured, ())):
        calls = PolicyCalls(rank._policy, pools, program, index=rank._index, batch=rank.batch)
        calls.begin_extend([2])
        assert calls._owners(torch.tensor([2, 0])) == owners


def test_settings_are_those_of_the_class() -> None:
    assert DeclaredPolicy() == resolve_selection({}).declared
    assert SelectionSettings() == resolve_selection({})
    for name in ("oracle", "sfi", "own_policy:NewestFirst"):
        declared = resolve_selection({"policy": name}).declared
        assert declared.is_captured is is_captured(find_policy(name))
    world = World(policy="streaming")
    selection = world.settings.selection.model_copy(update={"declared": DeclaredPolicy()})
    world.settings = world.settings.model_copy(update={"selection": selection})
    with pytest.raises(PolicyError, match="make them with resolve_selection"):
        world.make()


@pytest.mark.parametrize("page_size", [1, 16])
def test_quest_ranks_by_bounds_that_steps_keep(page_size: int) -> None:
    """The index that grew step by step is the one made at once, and selects the same."""
    world = World(policy="quest", fetch_cap=32, page_size=page_size, options={"page_tokens": 7})
    world.prefill(1, 150)
    world.prefill(2, 60)
    for grown in range(1, 20):
        queries = step(world, [2, 0, 1], [60 + grown, 1, 150 + grown])
        for layer in (1, 4):
            hi = 150 + grown - RECENT
            want = request_of(world, layer, 1, hi, queries[layer][2:])
            at_once = request_of(world, layer, 1, hi + 1, want.query).pages  # as of the next step
            index, first = world.rank._index, SINK // 7
            assert isinstance(index, PageBoundsIndex)
            assert at_once is not None
            found = index.bounds(layer, hi + 1)
            assert found.num_pages == at_once.num_pages
            pages = slice(first, found.num_pages)
            assert torch.equal(found.bounds[:, 1, pages], at_once.bounds[:, 1, pages])
            context = PolicyContext(model=MODEL, selection=world.settings.selection)
            chosen = find_policy("quest")(context).select(want).positions[0]
            world.check_books(layer, 1, 150 + grown)
            for head, held in enumerate(world.resident(layer, 1)[1].tolist()):
                assert set(chosen[head].tolist()) <= set(held)


@pytest.mark.parametrize("page_size", [1, 16])
def test_quest_chooses_in_captured_steps_as_in_others(page_size: int) -> None:
    """Asked about all of the batch: padding and requests that are dense are in it."""
    worlds = [
        World(policy="quest", fetch_cap=32, page_size=page_size, options={"page_tokens": 7})
        for _ in range(2)
    ]
    worlds[1].rank._calls._is_eager = False
    for world in worlds:
        world.prefill(1, 150)
        world.prefill(2, 60)
        world.prefill(3, 18)
    before = worlds[0].rank.counters()["fetched_rows_total"]
    for grown in range(1, 6):
        for world in worlds:
            step(world, [2, 0, 3, 1], [60 + grown, 1, 18 + grown, 150 + grown])
        for layer in SPARSE:
            for row in (1, 2, 3):
                for one, other in zip(*(w.resident(layer, row) for w in worlds), strict=True):
                    assert torch.equal(one, other)
    assert worlds[0].rank.counters() == worlds[1].rank.counters()
    assert worlds[0].rank.counters()["fetched_rows_total"] > before


def test_page_bounds_grow_without_a_value_on_the_host() -> None:
    """As in a step that is captured: tensors of ``meta`` have none."""
    world = World(policy="quest")
    pools = replace(world.pools, k=[x.to("meta") for x in world.pools.k])
    index = PageBoundsIndex(
        pools, SPARSE, world.settings.selection, page_tokens=16, max_context=MODEL.max_context
    )
    lengths, pages, rows = (
        torch.zeros(shape, dtype=dtype, device="meta")
        for shape, dtype in ((3, torch.int32), ((3, 256), torch.int32), (3, torch.int64))
    )
    index.append(1, lengths, pages, rows)
    assert index.bounds(1, 40).bounds.is_meta


CLUSTERS = HeadClusters(((0, 1),) * LAYERS, ((0, 1),) * LAYERS)


@pytest.mark.parametrize("policy", ["sfi", "sync_kv"])
def test_slow_rows_alone_are_selected_for(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "resolve_calibration", lambda *_: Resolved(clusters=CLUSTERS))
    world = World(policy=policy, fetch_cap=32)
    world.prefill(1, 200)
    world.prefill(3, 140)
    for grown in range(1, 10):
        slow = [grown % 3 == 0, False, grown == 5]
        before = {x: world.resident(x, 1)[1].clone() for x in SPARSE}, world.rank.counters()
        queries = step(world, [1, 0, 3], [200 + grown, 1, 140 + grown], slow)
        counted = world.rank.counters()["selections_total"] - before[1]["selections_total"]
        assert counted == sum(slow) * len(SPARSE)
        for layer in SPARSE:
            positions = world.resident(layer, 1)[1]
            if not slow[0]:
                assert torch.equal(positions, before[0][layer])
                continue
            asked = request_of(world, layer, 1, 200 + grown + 1 - RECENT, queries[layer][:1])
            if policy == "sfi":
                context = PolicyContext(model=MODEL, selection=world.settings.selection)
                chosen = find_policy("sfi")(context).select(asked).positions[0]
            else:  # half of it by scores, the other half as the prompt said
                chosen = world.best(layer, 1, 201 + grown - RECENT, queries[layer][:1], 16)
            for head, held in enumerate(positions.tolist()):
                assert set(chosen[head].tolist()) <= set(held)
                assert -1 not in held


def test_a_representative_head_chooses_for_its_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    one = HeadClusters(((0, 0),) * LAYERS, ((1,),) * LAYERS)
    monkeypatch.setattr(factory, "resolve_calibration", lambda *_: Resolved(clusters=one))
    world = World(policy="sync_kv", fetch_cap=32, resident_factor=1.0, options={"static": 0.0})
    world.prefill(1, 200)
    queries = step(world, [1], [201], [True])
    for layer in SPARSE:
        best = world.best(layer, 1, 202 - RECENT, queries[layer], 32)[1]
        for held in world.resident(layer, 1)[1].tolist():
            assert set(best.tolist()) <= set(held)


def test_empty_slots_are_filled_in_fast_steps_too() -> None:
    world = World(policy="sfi", dense_while_fits=False, fetch_cap=8)
    world.prefill(1, 40)  # fewer candidates than slots
    for grown in range(1, 30):
        step(world, [1], [40 + grown], [grown % 4 == 0])
        hi = 41 + grown - RECENT
        for layer in SPARSE:
            held = world.resident(layer, 1)[1]
            assert bool(((held >= 0).sum(-1) == min(hi, world.width)).all())


@pytest.mark.parametrize("page_size", [1, 16])
def test_lfps_attends_beside_sink_and_recent_tokens(page_size: int) -> None:
    """With a budget for all of them, both parts make dense attention."""
    pytest.importorskip("numba")
    world = World(policy="lfps", budget_tokens=250, page_size=page_size)
    world.prefill(1, 120)
    world.prefill(2, 160)
    rank, lengths = world.rank, torch.tensor([161, 1, 121, 18])
    assert rank.program.attends
    assert not rank.program.selects
    rank.begin_step()
    rows = torch.tensor([2, 0, 1, 3])
    rank.set_num_cold(SINK + RECENT)
    rank.begin_decode(rows, lengths, world.table)
    query = torch.randn((4, QUERY_HEADS, DIM), generator=world.generator)
    found = rank.attend_selected(2, query)
    assert found[[1, 3], :, -1].isneginf().all(), "padding, and a request that is dense"
    pools: tuple[Any, ...] = world.pools.k[2], world.pools.v[2]
    for i in (0, 2):
        length, table = int(lengths[i]), world.table[rows[i]]
        own = torch.cat([table[:SINK], table[length - RECENT : length]])[None]
        one = query[i : i + 1]
        here = attend_paged(one, *pools, own, torch.tensor([own.shape[1]]), scale=MODEL.scale)
        both, _ = merge_attention(*here, found[i : i + 1, :, :-1], found[i : i + 1, :, -1])
        whole = torch.tensor([length])
        want, _ = attend_paged(one, *pools, table[None, :length], whole, scale=MODEL.scale)
        torch.testing.assert_close(both, want, atol=1e-4, rtol=1e-4)


class Mixing(AsyncSpadePolicy):
    """Inherits a promise about methods that are not its own."""

    def pooled(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.amax(-2, keepdim=True).expand_as(scores)


class MixingByName(Mixing):
    """Gives it itself."""

    capabilities = AsyncSpadePolicy.capabilities


def test_a_part_of_the_heads_is_enough_for_policies_that_say_so() -> None:
    needing_all = {"sfi", "sync_kv"}
    for name in POLICIES:
        check_shards(find_policy(name), name, 1)
        if name not in needing_all:
            check_shards(find_policy(name), name, 3)
            continue
        with pytest.raises(PolicyError, match=f"policy={name} does not declare.*--cache-ranks 1"):
            check_shards(find_policy(name), name, 3)
    with pytest.raises(PolicyError, match="3 cache ranks have a part"):
        check_shards(Mixing, "mine", 3)
    check_shards(MixingByName, "mine", 3)
