# SPDX-License-Identifier: Apache-2.0
"""What every policy must keep to, whatever its method."""

from dataclasses import replace

import pytest
import torch

from tandemkv.cache_rank.engine.seeding import fill_set, make_seed_input
from tandemkv.cache_rank.policies.base import (
    Policy,
    PolicyCapabilities,
    PolicyContext,
    PolicyError,
    ScoringPolicy,
    Selection,
    StoredKV,
)
from tandemkv.cache_rank.policies.registry import (
    POLICIES,
    check_pooling,
    find_policy,
    resolve_selection,
)
from tandemkv.cache_rank.policies.windowed import WindowedPolicy
from tandemkv.cache_rank.protocol.messages import Timing
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings
from tandemkv.kernels.position_pooling import MAX_REACH


class OwnPolicy(ScoringPolicy):
    """A user's policy."""

    capabilities = PolicyCapabilities(timing=Timing.SAME_STEP_QUERY)


class OwnSelect(OwnPolicy):
    """Ranks by something of its own."""

    def select(self, request):
        raise NotImplementedError


class NoCapabilities(Policy):
    """Declares nothing."""

    def select(self, request):
        raise NotImplementedError


def test_neither_sink_nor_recent_nor_a_token_twice(make_bench, queries, case):
    name, changes = case
    bench = make_bench(name, **changes)
    chosen = bench.select(queries)
    for positions, length in zip(chosen, bench.lengths, strict=True):
        for head in positions.tolist():
            assert len(set(head)) == 24
            assert min(head) >= 4
            assert max(head) < length - 8


def test_a_budget_for_everything_selects_everything(make_bench, queries, case):
    name, changes = case
    bench = make_bench(name, budget_tokens=120, **changes)
    for positions, length in zip(bench.select(queries), bench.lengths, strict=True):
        for head in positions.tolist():
            num_candidates = length - 8 - 4
            assert sorted(head[:num_candidates]) == list(range(4, length - 8))
            assert set(head[num_candidates:]) == {-1}


def test_a_request_without_candidates_selects_nothing(make_bench, queries, case):
    name, changes = case
    bench = make_bench(name, lengths=(5, 60), **changes)
    chosen = bench.select(queries)
    assert (chosen[0] == -1).all()
    assert (chosen[1] >= 0).all()


def test_a_step_without_any_candidate(make_bench, queries, case):
    name, changes = case
    bench = make_bench(name, lengths=(5, 8), **changes)
    assert (bench.select(queries) == -1).all()


def test_deterministic_and_independent_of_the_batch(make_bench, queries, case):
    name, changes = case
    both = make_bench(name, **changes).select(queries)
    assert torch.equal(both, make_bench(name, **changes).select(queries))
    alone = make_bench(name, **changes)
    alone.lengths, alone.slots = alone.lengths[:1], alone.slots[:1]
    assert torch.equal(alone.select([query[:1] for query in queries]), both[:1])


def test_best_first(make_bench, queries, case):
    name, changes = case
    few = make_bench(name, budget_tokens=12, **changes).select(queries)
    many = make_bench(name, budget_tokens=30, **changes).select(queries)
    assert torch.equal(many[..., :12], few)


def test_release_forgets(make_bench, queries, case):
    name, changes = case
    bench = make_bench(name, **changes)
    fresh = make_bench(name, **changes).select(queries[-1:])
    bench.select(queries)
    for row in (1, 2):
        bench.policy.release((row, 1))
        bench.policy.release((row, 7))  # nobody's
    assert torch.equal(bench.select(queries[-1:]), fresh)


def test_agrees_with_the_oracle_when_the_query_does_not_change(make_bench, queries, case):
    name, changes = case
    refines = name in ("look_ahead", "quest", "sfi") or "pool_before" in changes
    options = changes.get("options", {})
    if refines or options.get("normalise") == "none":
        pytest.skip(
            "its query is scaled, or predicted outside; or it takes whole pages, or refines scores"
        )
    plain = {"unrotate": False} if issubclass(find_policy(name), WindowedPolicy) else {}
    bench = make_bench(name, **(changes | {"options": options | plain}))
    same = bench.select([queries[0]] * 20)
    oracle = make_bench("oracle").select([queries[0]])
    for ours, theirs in zip(same.flatten(0, 1), oracle.flatten(0, 1), strict=True):
        assert len(set(ours.tolist()) & set(theirs.tolist())) >= 23


def test_the_best_token_brings_its_neighbours(make_bench, queries):
    for name, more in (
        ("async_spade", {}),
        ("oracle", {}),
        ("sync_kv", {"options": {"static": 0.0}}),
    ):
        own = make_bench(name, **more).select(queries)
        pooled = make_bench(name, pool_before=1, pool_after=2, **more).select(queries)
        for best, found, length in zip(own[..., 0], pooled, (70, 100), strict=True):
            for middle, positions in zip(best.tolist(), found, strict=True):
                around = range(max(4, middle - 2), min(length - 8, middle + 2))
                assert set(around) <= set(positions.tolist())


def test_only_what_ranks_tokens_pools_them():
    for name in ("quest", "lfps", "streaming", "exact", f"{__name__}:OwnSelect"):
        check_pooling(find_policy(name), resolve_selection({"policy": name}))
        selection = resolve_selection({"policy": name, "pool_before": 7})
        with pytest.raises(PolicyError, match="pool_before=7, pool_after=0: policy=" + name):
            check_pooling(find_policy(name), selection)
    own = f"{__name__}:OwnPolicy"
    for name in ("async_spade", "look_ahead", "kascade", "sfi", "sync_kv", own):
        check_pooling(find_policy(name), resolve_selection({"policy": name, "pool_after": 7}))
    assert SelectionSettings(pool_before=1, pool_after=2).pooled_positions == (1, 2)
    for name in ("pool_before", "pool_after"):
        with pytest.raises(ValueError, match=name):
            SelectionSettings(**{name: MAX_REACH + 1})


def test_a_prompt_is_seeded_with_neighbours(make_bench):
    keys, queries = torch.zeros(60, 2, 8), torch.zeros(4, 6, 8)
    keys[30], queries[..., 0] = 0.0, 1.0
    keys[30, :, 0] = 40.0
    for before in (0, 3):
        selection = SelectionSettings(
            budget_tokens=12, num_recent_tokens=8, num_sink_tokens=4, pool_before=before
        )
        context = replace(make_bench("oracle").context, selection=selection)
        policy, slots = find_policy("oracle")(context), torch.arange(60, dtype=torch.int32)
        prompt = make_seed_input(
            policy, 0, (1, 1), queries, (keys, None), StoredKV(keys, keys, slots[None]),
            page_size=1,
        )  # fmt: skip
        for head in fill_set(policy, prompt, 8).tolist():
            assert head[:5] == [0, 1, 2, 3, 30]
            assert ({31, 32, 33} <= set(head)) == (before > 0)


def test_unselective_policies_do_not_select(make_bench, queries, unselective):
    bench = make_bench(unselective)
    assert bench.policy.capabilities.timing is Timing.NONE
    assert not bench.policy.capabilities.selects
    assert bench.policy.capabilities.all_exact == (unselective == "exact")
    with pytest.raises(PolicyError, match="selects nothing"):
        bench.policy.select(bench.request(queries[0]))


@pytest.mark.parametrize("name", POLICIES)
def test_registry_key_is_the_module(name):
    found = find_policy(name)
    assert found.__module__ == f"tandemkv.cache_rank.policies.{name}"
    assert isinstance(found.capabilities, PolicyCapabilities)


class NoSelect(Policy):
    capabilities = PolicyCapabilities(timing=Timing.SAME_STEP_QUERY)


def test_a_policy_that_selects_with_no_method_for_it_is_refused():
    with pytest.raises(PolicyError, match="has a timing to select at, and no `select`"):
        find_policy(f"{__name__}:NoSelect")


def test_registry_takes_your_own_and_lists_names_on_a_miss(make_bench):
    context = make_bench("oracle").context
    assert isinstance(find_policy(f"{__name__}:OwnPolicy")(context), OwnPolicy)
    with pytest.raises(
        PolicyError, match="async_spade, exact, kascade, last_query, lfps, look_ahead"
    ):
        find_policy("look-ahead")
    for path in ("no_such_module:X", f"{__name__}:Missing", "json:JSONDecoder"):
        with pytest.raises(PolicyError, match=path):
            find_policy(path)
    with pytest.raises(PolicyError, match="capabilities"):
        find_policy(f"{__name__}:NoCapabilities")


def test_what_a_policy_answers_is_checked():
    with pytest.raises(PolicyError, match="int64"):
        Selection(torch.zeros(1, 2, 3, dtype=torch.int64)).check((1, 2, 3))
    with pytest.raises(PolicyError, match="budget"):
        Selection(torch.zeros(1, 2, 4, dtype=torch.int32)).check((1, 2, 3))


def test_unrotation_needs_the_rotary_embedding(make_bench):
    context = make_bench("oracle").context
    bare = PolicyContext(model=context.model, selection=context.selection)
    with pytest.raises(PolicyError, match="rotary"):
        find_policy("async_spade")(bare)
