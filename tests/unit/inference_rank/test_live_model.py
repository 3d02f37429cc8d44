# SPDX-License-Identifier: Apache-2.0
"""What SGLang has built is compared with what the configuration says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tandemkv.cache_rank.protocol.errors import ContractError
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.inference_rank.sglang.live_model import (
    attention_of,
    check_live_attention,
    own_backend,
)

SPEC = ModelSpec(
    architecture="GraniteForCausalLM",
    num_layers=2,
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim=16,
    hidden_size=64,
    max_context=128,
    dtype="float32",
    model_hash="0",
    softmax_scale=0.11,
)


def make_model(**changes: object) -> Any:
    """Two layers as SGLang builds them, the second with `changes` to its attention."""
    built = {
        "tp_q_head_num": 4, "tp_k_head_num": 2, "head_dim": 16, "v_head_dim": 16, "scaling": 0.11,
        "sliding_window_size": -1, "logit_cap": 0.0,
    }  # fmt: skip
    attentions = [SimpleNamespace(**built), SimpleNamespace(**{**built, **changes})]
    layers = [SimpleNamespace(self_attn=SimpleNamespace(attn=x)) for x in attentions]
    model = type("GraniteForCausalLM", (), {})()
    model.model = SimpleNamespace(layers=layers)
    return model


def test_what_is_as_the_configuration_says_is_accepted() -> None:
    check_live_attention(make_model(), SPEC)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"scaling": 0.25}, r"layer 1.*softmax scale 0\.25, not 0\.11.*docs/models\.md"),
        ({"sliding_window_size": 1023}, r"window 1023, not -1"),
        ({"logit_cap": 30.0}, r"cap of logits 30\.0, not 0\.0"),
        ({"head_dim": 32, "v_head_dim": 32}, r"head_dim 32, not 16; v_head_dim 32, not 16"),
        ({"tp_k_head_num": 4}, r"KV heads 4, not 2"),
    ],
)
def test_differences_are_named(changes: dict[str, object], match: str) -> None:
    with pytest.raises(ContractError, match=match):
        check_live_attention(make_model(**changes), SPEC)


def test_a_scale_that_the_configuration_does_not_have_is_found() -> None:
    plain = msgspec.structs.replace(SPEC, softmax_scale=None)
    with pytest.raises(ContractError, match=r"softmax scale 0\.11, not 0\.25"):
        check_live_attention(make_model(), plain)


def test_layers_with_a_window_are_those_of_the_configuration() -> None:
    spec = msgspec.structs.replace(SPEC, windowed_layers=(1,))
    check_live_attention(make_model(sliding_window_size=1023), spec)
    with pytest.raises(ContractError, match=r"layer 1.*window -1, not one"):
        check_live_attention(make_model(), spec)


def test_layers_of_linear_attention_are_those_of_the_configuration() -> None:
    """The others have their modules in the layer itself, as SGLang builds Qwen3-Next."""
    spec, model = msgspec.structs.replace(SPEC, linear_layers=(0,)), make_model()
    full = SimpleNamespace(attn=model.model.layers[1].self_attn.attn)
    linear = SimpleNamespace(linear_attn=SimpleNamespace(attn=None))
    model.model.layers = [linear, full]
    check_live_attention(model, spec)
    assert (attention_of(full), attention_of(linear)) == (full, None)
    with pytest.raises(ContractError, match=r"layer 0 has no self_attn\.attn"):
        check_live_attention(model, SPEC)
    model.model.layers = [full, full]
    with pytest.raises(ContractError, match=r"layer 0.*has K and V, not a state"):
        check_live_attention(model, spec)


def test_there_are_as_many_layers_as_the_configuration_says() -> None:
    model = make_model()
    model.model.layers = model.model.layers[:1]
    with pytest.raises(ContractError, match=r"has built 1 layers, and config\.json says 2"):
        check_live_attention(model, SPEC)


def test_our_backend_is_found_in_sglangs() -> None:
    own = SimpleNamespace()
    assert own_backend(own) is own
    assert own_backend(SimpleNamespace(full_attn_backend=own)) is own


def test_layers_without_attention_are_refused() -> None:
    model = make_model()
    del model.model.layers[1].self_attn
    with pytest.raises(ContractError, match=r"layer 1 has no self_attn\.attn"):
        check_live_attention(model, SPEC)
