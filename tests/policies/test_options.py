# SPDX-License-Identifier: Apache-2.0
"""Models of options: what may be declared, and that settings made otherwise are refused."""

from dataclasses import replace

import pytest
from pydantic import Field, ValidationError

from tandemkv.cache_rank.policies.base import PolicyCapabilities, PolicyError, PolicyOptions
from tandemkv.cache_rank.policies.options import (
    check_options_model,
    describe_options,
    parse_option,
    read_options,
)
from tandemkv.cache_rank.policies.quest import QuestPolicy
from tandemkv.cache_rank.policies.registry import (
    POLICIES,
    check_resolved,
    find_policy,
    resolve_selection,
)
from tandemkv.cache_rank.protocol.messages import Timing
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings


class Some(PolicyOptions):
    layers: tuple[int, ...] = Field(default=(), description="Layers.")
    name: str | None = Field(default=None, description="A name.")
    is_on: bool = Field(default=True, description="A switch.")


def test_texts_become_values() -> None:
    assert parse_option(Some, "p", "layers", "1, 2") == (1, 2)
    assert parse_option(Some, "p", "layers", "none") == ()
    assert parse_option(Some, "p", "name", "none") is None
    assert parse_option(Some, "p", "name", "x") == "x"
    assert parse_option(Some, "p", "is_on", "off") is False
    with pytest.raises(PolicyError, match=r"p\.layers=.*accepted: a list"):
        parse_option(Some, "p", "layers", "1,x")


def test_models_are_strict_and_frozen() -> None:
    with pytest.raises(PolicyError, match=r"p\.is_on=1"):
        read_options(Some, "p", {"is_on": 1})
    assert read_options(Some, "p", {"layers": [3]}).model_dump() == {
        "layers": (3,), "name": None, "is_on": True,
    }  # fmt: skip
    with pytest.raises(ValidationError):
        Some().is_on = False  # type: ignore[misc]


@pytest.mark.parametrize("text", ["inf", "-inf", "nan", "1e400"])
@pytest.mark.parametrize(
    ("policy", "option"), [("async_spade", "eps"), ("sfi", "decay"), ("kascade", "fraction")]
)
def test_numbers_that_json_does_not_have_are_refused(policy: str, option: str, text: str) -> None:
    model = find_policy(policy).options_model
    with pytest.raises(PolicyError, match=rf"{policy}\.{option}=.*finite number"):
        parse_option(model, policy, option, text)
    with pytest.raises(PolicyError, match=rf"{policy}\.{option}=.*finite number"):
        resolve_selection({"policy": policy, "options": {option: float(text)}})


def test_tuples_have_finite_numbers_too() -> None:
    class Weights(PolicyOptions):
        weights: tuple[float, ...] = ()

    with pytest.raises(PolicyError, match=r"p\.weights=.*finite number"):
        parse_option(Weights, "p", "weights", "1,inf")


def test_models_that_settings_cannot_carry_are_refused() -> None:
    class Missing(PolicyOptions):
        size: int

    class Nested(PolicyOptions):
        sizes: dict[str, int] = Field(default={"a": 1})

    class Upper(PolicyOptions):
        Size: int = 1

    for model, expected in (
        (Missing, "option size needs a default"),
        (Nested, "option sizes"),
        (Upper, "lower case"),
        (dict, "subclass of PolicyOptions"),
    ):
        with pytest.raises(PolicyError, match=expected):
            check_options_model(model, "p")


def test_every_option_of_every_policy_is_described() -> None:
    for name in POLICIES:
        for option in describe_options(find_policy(name).options_model):
            assert option.help.endswith("."), (name, option.name)
            assert option.accepted != "value", (name, option.name)


def test_both_processes_refuse_options_of_another_policy() -> None:
    selection = SelectionSettings(policy="quest", options={"page_tokens": 8})
    with pytest.raises(PolicyError, match="made for another declaration"):
        check_resolved(find_policy("quest"), selection)
    selection = SelectionSettings(policy="quest", options={"window": 8})
    with pytest.raises(PolicyError, match=r"quest\.window: .*it has: page_tokens"):
        check_resolved(find_policy("quest"), selection)
    # A class of one's own may be another on each host.
    for changes in ({"wants_query_window": True}, {"index": "keys"}):

        class Other(QuestPolicy):
            capabilities = replace(QuestPolicy.capabilities, **changes)

        with pytest.raises(PolicyError, match="made for another declaration"):
            check_resolved(Other, resolve_selection({"policy": "quest"}))
    declared = PolicyOptions().declare(PolicyCapabilities(timing=Timing.SAME_STEP_HIDDEN))
    assert declared.layers_ahead == 1
    with pytest.raises(ValidationError):
        SelectionSettings(options={f"x{i}": 1 for i in range(65)})
