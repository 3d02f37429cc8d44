# SPDX-License-Identifier: Apache-2.0
"""SyncKV by hand: representatives choose, clusters follow, the static part stays."""

from dataclasses import replace

import msgspec
import pytest
import torch

from tandemkv.cache_rank.policies.base import (
    HeadClusters,
    PolicyError,
    SeedInput,
    SelectionInput,
    StoredKV,
)
from tandemkv.cache_rank.policies.sync_kv import SyncKVPolicy
from tandemkv.cache_rank.protocol.messages import RefreshRule

# Three KV heads in one layer: 0 and 2 are a cluster led by 2, head 1 is alone.
CLUSTERS = HeadClusters(((0, 1, 0),), ((2, 1),))
NINF = float("-inf")


@pytest.fixture
def make(make_bench):
    def make_policy(clusters=CLUSTERS, **changes):
        context = make_bench("sync_kv", num_sink_tokens=0, **changes).context
        model = msgspec.structs.replace(context.model, num_kv_heads=3, num_layers=1)
        policy = SyncKVPolicy(replace(context, model=model, clusters=clusters))
        policy.make_rows(lambda _, shape, dtype: torch.zeros(shape, dtype=dtype), 9)
        return policy

    return make_policy


def ask(policy, scores, *, budget=4, owner=(1, 1), hi=6):
    """Select with the scores of heads 1 and 2, in this order, over six positions."""
    table = torch.tensor([scores], dtype=torch.float32)
    request = SelectionInput(
        layer=0,
        owners=[owner],
        rows=torch.tensor([owner[0]]),
        query=torch.zeros(1, 6, 8),
        positions=torch.tensor([9]),
        use_positions=torch.tensor([10]),
        score=lambda query: table,
        budget=budget,
        lo=torch.tensor([0]),
        hi=torch.tensor([hi]),
        stored=StoredKV(torch.empty(0), torch.empty(0), torch.empty(1, 6)),
    )
    selection = policy.select(request)
    selection.check((1, 3, budget))
    return selection.positions[0].tolist()


FIRST = [[6, 5, 4, 3, 2, 1], [1, 2, 3, 4, 5, 6]]
LATER = [[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]]


def test_followers_take_the_set_of_their_representative(make):
    policy = make()
    assert policy.traits.slow_heads == ((1, 2),)
    assert policy.options.declare(policy.capabilities).refresh is RefreshRule.PERIOD
    # Half of K = 4 static, then the dynamic best of the rest; head 0 follows head 2.
    assert ask(policy, FIRST) == [[5, 4, 3, 2], [0, 1, 2, 3], [5, 4, 3, 2]]


def test_the_static_half_stays_and_the_dynamic_half_moves(make):
    policy = make()
    ask(policy, FIRST)
    assert ask(policy, LATER) == [[5, 4, 0, 1], [0, 1, 5, 4], [5, 4, 0, 1]]
    assert ask(policy, LATER, owner=(2, 1)) == [[0, 1, 2, 3], [5, 4, 3, 2], [0, 1, 2, 3]]
    policy.release((1, 1))
    assert ask(policy, LATER)[0] == [0, 1, 2, 3], "another tenant has a static set of its own"


@pytest.mark.parametrize(("static", "want"), [(0.0, [0, 1, 2, 3]), (1.0, [5, 4, 3, 2])])
def test_all_dynamic_or_all_static(make, static, want):
    policy = make(options={"static": static})
    ask(policy, FIRST)
    assert ask(policy, LATER)[0] == want


def test_the_dynamic_part_is_rounded_down(make):
    """k_dyn = floor((1 - rho) k) = floor(.5 * 5) = 2: three stay."""
    policy = make()
    ask(policy, FIRST, budget=5)
    assert ask(policy, LATER, budget=5)[0] == [5, 4, 3, 0, 1]


def test_the_dynamic_part_is_that_of_the_decimal(make):
    """k_dyn = floor((1 - 0.8) 5) = 1, which is 0.9999999999999998 in floats."""
    policy = make(options={"static": 0.8})
    ask(policy, FIRST, budget=5)
    assert ask(policy, LATER, budget=5)[0] == [5, 4, 3, 2, 0]


def test_the_union_gives_every_head_all_sets(make):
    """K = 4 and two clusters: two positions each, one static; static first, in turn."""
    policy = make(options={"union": True})
    assert ask(policy, FIRST) == [[0, 5, 1, 4]] * 3
    assert ask(policy, LATER) == [[0, 5, -1, -1]] * 3, "their dynamics are the other's static"


def test_few_candidates_leave_padding(make):
    policy = make()
    few = [[3, 2, NINF, NINF, NINF, NINF], [2, 3, NINF, NINF, NINF, NINF]]
    assert ask(policy, few) == [[1, 0, -1, -1], [0, 1, -1, -1], [1, 0, -1, -1]]


def test_a_static_part_that_few_candidates_leave_short_is_chosen_anew(make):
    policy = make()
    few = [[3, 2, NINF, NINF, NINF, NINF], [2, 3, NINF, NINF, NINF, NINF]]
    assert ask(policy, few, budget=6, hi=2)[0] == [1, 0, -1, -1, -1, -1]
    assert ask(policy, FIRST, budget=6)[0] == [5, 4, 3, 2, 1, 0]
    assert ask(policy, LATER, budget=6)[0] == [5, 4, 3, 0, 1, 2], "this one stays"


def test_the_prompt_sets_the_static_half_by_its_last_query(make):
    policy = make()
    asked = []

    def score(queries, positions):
        asked.append((queries.shape[0], positions.tolist()))
        return torch.tensor([[0.0] * 6, *FIRST])

    request = SeedInput(
        layer=0,
        owner=(1, 1),
        queries=torch.zeros(5, 9, 8),
        positions=torch.arange(5),
        score=score,
        lo=0,
        hi=6,
        stored=StoredKV(torch.empty(0), torch.empty(0), torch.empty(1, 6)),
        budget=4,
    )
    seeds = policy.seed_scores(request)
    assert asked == [(1, [4])]
    assert seeds.tolist() == [FIRST[1], FIRST[0], FIRST[1]]
    assert ask(policy, LATER)[0] == [5, 4, 0, 1]
    pooled = make(pool_before=1).seed_scores(request)
    assert pooled.tolist() == [FIRST[1], [6, 6, 5, 4, 3, 2], FIRST[1]]


def test_without_clusters_it_says_what_to_do(make_bench):
    context = make_bench("oracle").context
    with pytest.raises(PolicyError, match="tandemkv calibrate MODEL --policy sync_kv"):
        SyncKVPolicy(replace(context, clusters=None))


def test_static_sets_outlive_the_engine(make):
    """The next engine finds them by row; a new tenant of the row begins without."""
    memory = {}

    def allocate(name, shape, dtype):
        return memory.setdefault(name, torch.zeros(shape, dtype=dtype))

    first = make()
    first.make_rows(allocate, 4)
    ask(first, FIRST)
    ask(first, LATER, owner=(2, 1))
    second = make()
    second.make_rows(allocate, 4)
    assert ask(second, LATER) == [[5, 4, 0, 1], [0, 1, 5, 4], [5, 4, 0, 1]]
    assert ask(second, FIRST, owner=(2, 9))[0][:2] == [0, 1], "chosen with the first scores"
    second.release((1, 0))
    assert ask(second, LATER)[0] == [0, 1, 2, 3]
