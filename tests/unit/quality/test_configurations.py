# SPDX-License-Identifier: Apache-2.0
"""Policies times budgets: equal attended tokens, and refusals that say what to do."""

from __future__ import annotations

from typing import Any

import pytest

from tandemkv.cache_rank.policies import look_ahead
from tandemkv.cache_rank.policies.base import PolicyCapabilities
from tandemkv.cache_rank.policies.registry import check_read, find_policy, resolve_selection
from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.evaluation.quality.configurations import Configuration, parse_budgets, plan


def make(policies: list[str], budgets: list[str], **options: Any) -> list[Configuration]:
    given: dict[str, Any] = {"num_layers": 30, "device": "cpu", "base": {}}
    return plan(policies, parse_budgets(budgets, [4096]), **(given | options))


def test_dense_comes_first_then_every_policy_at_every_budget() -> None:
    found = make(["look_ahead", "streaming"], ["512", "25%"])
    assert [c.slug for c in found] == [
        "sglang-dense-all",
        "tandemkv-look-ahead-512",
        "tandemkv-look-ahead-25pc",
        "tandemkv-streaming-512",
        "tandemkv-streaming-25pc",
    ]
    assert [c.is_dense for c in found] == [True, False, False, False, False]
    assert make(["dense"], []) == found[:1]


@pytest.mark.parametrize(
    ("policy", "samples"),
    [("look_ahead", 512), ("oracle", 512), ("async_spade", 0), ("last_query", 0)],
)
def test_attended_tokens_are_the_budget_and_what_the_settings_say(
    policy: str, samples: int
) -> None:
    _, one = make([policy], ["1092"])
    settings = resolve_selection(one.selection)
    assert (settings.policy, settings.num_samples) == (policy, samples)
    assert settings.budget_tokens == 1024 - samples
    assert settings.row_tokens == one.attended_tokens == 1092
    assert one.exact_layers == ([] if samples else [0, 1])


@pytest.mark.parametrize(
    ("budget", "base", "selected", "samples"),
    [
        ("196", {}, 128, 0),  # with 128 samples nothing would be left for K
        ("324", {}, 128, 128),
        ("579", {}, 383, 128),  # 256 would leave K less
        ("580", {}, 256, 256),
        ("1092", {"sample_tokens": 64}, 960, 64),
        ("1092", {"sample_tokens": 0}, 1024, 0),
        ("512", {"resident_factor": 2.0}, 158, 128),
    ],
)
def test_samples_are_in_the_budget(
    budget: str, base: dict[str, object], selected: int, samples: int
) -> None:
    _, one = make(["look_ahead"], [budget], base=base)
    assert (one.selection["budget_tokens"], one.selection["sample_tokens"]) == (selected, samples)
    assert resolve_selection(one.selection).num_samples == samples
    assert one.attended_tokens == int(budget)


def test_streaming_gets_the_whole_budget_as_its_ring() -> None:
    _, one = make(["streaming"], ["512"])
    assert one.selection["num_recent_tokens"] == 508
    assert one.attended_tokens == 512


def test_what_is_attended_to_on_the_cache_rank_is_in_the_budget() -> None:
    _, one = make(["lfps"], ["512"])
    assert (one.selection["budget_tokens"], one.remote_tokens) == (444, 444)
    assert one.attended_tokens == 512


def test_exact_has_no_budget_and_comes_once() -> None:
    _, one = make(["exact"], ["512", "1024"])
    assert (one.budget, one.attended_tokens) == ("all", None)


def test_the_user_s_settings_count() -> None:
    base = {"num_recent_tokens": 16, "resident_factor": 1.0, "exact_layers": [0, 29, 40]}
    _, one = make(["look_ahead"], ["128"], base=base)
    assert one.selection["budget_tokens"] == 108
    assert one.exact_layers == [0, 29]
    assert one.attended_share(0.25) == pytest.approx((2 + 28 * 0.25) / 30)


@pytest.mark.parametrize(
    ("policies", "budgets", "message"),
    [
        (["look_ahed"], ["512"], "look_ahed.*is unknown"),
        (["look_ahead"], ["lots"], "budget=lots: a number of tokens"),
        (["look_ahead"], ["5000"], "less than all"),
        (["look_ahead"], ["0"], "more than none"),
        (["look_ahead"], ["100"], "not possible for policy=look_ahead.*num_recent_tokens=16"),
        (["look_ahead"], [], "policy=look_ahead needs a budget"),
        (["look_ahead", "look_ahead"], ["512"], "given twice: tandemkv-look-ahead-512"),
    ],
)
def test_refusals(policies: list[str], budgets: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make(policies, budgets)


def test_a_policy_is_not_asked_for_what_it_declares_it_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timing = look_ahead.LookAheadPolicy.capabilities.timing
    cuda_only = PolicyCapabilities(timing=timing, devices=("cuda",))
    cpu_only = PolicyCapabilities(timing=timing, devices=("cpu",))
    monkeypatch.setattr(look_ahead.LookAheadPolicy, "capabilities", cpu_only)
    with pytest.raises(SettingsError, match="policy=look_ahead declares devices cpu, not cuda"):
        make(["look_ahead"], ["512"], device="cuda")
    monkeypatch.setattr(look_ahead.LookAheadPolicy, "capabilities", cuda_only)
    with pytest.raises(SettingsError, match="policy=look_ahead declares devices cuda, not cpu"):
        make(["look_ahead"], ["512"])
    assert len(make(["look_ahead"], ["512"], device="cuda")) == 2


def test_settings_of_one_policy_follow_it() -> None:
    found = make(["look_ahead", "look_ahead+resident_factor=1+fetch_cap=111"], ["12.5%"])
    plain, own = found[1:]
    assert plain.slug == "tandemkv-look-ahead-12.5pc"
    assert own.slug == "tandemkv-look-ahead-resident-factor-1-fetch-cap-111-12.5pc"
    assert own.variant == "resident_factor=1, fetch_cap=111"
    assert (own.policy, own.selection["budget_tokens"]) == ("look_ahead", 316)
    assert own.selection["fetch_cap"] == 111
    assert plain.attended_tokens == own.attended_tokens == 512


def test_settings_of_all_are_for_those_that_read_them() -> None:
    """A server that is told what its policy never reads does not start."""
    base = {"fetch_cap": 111, "index_dtype": "int8", "refresh_every": 2, "anchors": (0, 9)}
    policies = ["look_ahead", "quest", "kascade", "streaming", "exact", "streaming+fetch_cap=9"]
    found = make(policies, ["12.5%"], base=base, with_dense=False)
    given = [item.selection.keys() & base.keys() for item in found]
    assert given == [
        {"fetch_cap", "index_dtype", "refresh_every"}, {"fetch_cap", "refresh_every"},
        base.keys(), set(), set(), {"fetch_cap"},
    ]  # fmt: skip
    sharing = {"share_layers": True, "anchors": (0, 9), "exact_layers": (0,)}
    policies = ["oracle", "streaming", "exact", "lfps"]
    found += make(policies, ["12.5%"], base=sharing, with_dense=False)
    given = [item.selection.keys() & sharing.keys() for item in found[-4:]]
    assert given == [sharing.keys(), *[{"exact_layers"}] * 3]
    for item in (*found[:5], *found[6:]):
        check_read(find_policy(item.policy), resolve_selection(item.selection))


@pytest.mark.parametrize("text", ["look_ahead+fetch_cap", "look_ahead+budget_tokens=3"])
def test_what_cannot_follow_a_policy_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="after a plus sign"):
        make([text], ["512"])
    with pytest.raises(SettingsError, match="no_such"):
        make(["look_ahead+no_such=1"], ["512"])
