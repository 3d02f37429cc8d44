# SPDX-License-Identifier: Apache-2.0
"""The rotary embedding of a model's configuration, against transformers' own."""

import json

import in_float64
import pytest
import torch
from transformers import (
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.ernie4_5 import modeling_ernie4_5
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.glm4 import modeling_glm4
from transformers.models.glm4_moe import modeling_glm4_moe
from transformers.models.llama import modeling_llama

from tandemkv.cache_rank.engine.rotary import read_rotary
from tandemkv.cache_rank.protocol.errors import UnsupportedModelError

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
CASES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"head_dim": 16}),
    "llama-bias": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True}),
    "llama3-rope": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3}),
    "yarn-rope": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": YARN}),
    "linear-rope": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "mistral": (MistralForCausalLM, MistralConfig, {"head_dim": 16, "sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 24}),
    "neighbours": (Ernie4_5ForCausalLM, Ernie4_5Config, {"head_dim": 16, "pad_token_id": None}),
    "half-neighbours": (
        Glm4ForCausalLM,
        Glm4Config,
        {"head_dim": 16, "pad_token_id": None, "rope_parameters": HALF},
    ),
    "half-yarn": (
        Glm4ForCausalLM,
        Glm4Config,
        {"head_dim": 16, "pad_token_id": None, "rope_parameters": HALF | YARN},
    ),
    "half": (
        Glm4MoeForCausalLM,
        Glm4MoeConfig,
        {"head_dim": 16, "rope_parameters": HALF, "moe_intermediate_size": 16,
         "n_routed_experts": 2, "num_experts_per_tok": 1},
    ),
}  # fmt: skip
TURNS = {
    "glm4": modeling_glm4, "glm4_moe": modeling_glm4_moe, "ernie4_5": modeling_ernie4_5,
}  # fmt: skip


def make_model(path, model_class, config_class, changes):
    torch.manual_seed(7)
    config = config_class(**SHAPE, architectures=[model_class.__name__], **changes)
    model = model_class(config).eval()
    model.save_pretrained(path)
    if model_class is Ernie4_5ForCausalLM:  # of another name in published checkpoints
        file = path / "config.json"
        file.write_text(file.read_text().replace("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"))
    return model


@pytest.mark.parametrize("case", CASES)
def test_queries_are_turned_as_transformers_does(tmp_path, case):
    model = make_model(tmp_path, *CASES[case])
    dim = model.model.layers[0].self_attn.head_dim
    query, positions = torch.randn(1, 4, 5, dim), torch.tensor([0, 3, 77, 128, 255])
    cos, sin = model.model.rotary_emb(torch.randn(1, 5, 32), positions.unsqueeze(0))
    module = TURNS.get(model.config.model_type, modeling_llama)
    want, _ = module.apply_rotary_pos_emb(query, query, cos, sin)
    rotary = read_rotary(tmp_path)
    halves = rotary.to_halves(query[0].transpose(0, 1)).contiguous()
    got = in_float64.rotated(halves, positions, rotary.inv_freq, rotary.scaling).float()
    got = rotary.from_halves(got)
    if case == "half-yarn":  # what is turned is left unscaled, here and where it is turned back
        scaling = model.model.rotary_emb.attention_scaling
        assert scaling > 1.1
        got = torch.cat((got[..., : dim // 2] * scaling, got[..., dim // 2 :]), -1)
    torch.testing.assert_close(got, want[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_minimax_names_the_part_that_is_turned(tmp_path):
    config = SHAPE | {
        "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "head_dim": 16,
        "rotary_dim": 4, "rope_theta": 1e4, "num_local_experts": 2, "num_experts_per_tok": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    rotary = read_rotary(tmp_path)
    assert rotary.inv_freq.tolist() == pytest.approx([1.0, 0.01, 0, 0, 0, 0, 0, 0])
    assert rotary.order.tolist() == [0, 1, 4, 6, 8, 10, 12, 14, 2, 3, 5, 7, 9, 11, 13, 15]


def test_a_decoder_with_a_configuration_of_its_own_is_asked(tmp_path):
    """Three positions of a token, where all are its place, are one."""
    rope = {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0], "mrope_interleaved": True,
    }  # fmt: skip
    text = {"model_type": "qwen3_5_text", "head_dim": 16, "rope_parameters": rope}
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
        "text_config": SHAPE | text,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    rotary = read_rotary(tmp_path)
    assert rotary.inv_freq.tolist() == pytest.approx([1.0, 0.01, 0, 0, 0, 0, 0, 0])
    assert rotary.order.tolist() == [0, 1, 4, 6, 8, 10, 12, 14, 2, 3, 5, 7, 9, 11, 13, 15]


LINEAR = {"rope_type": "linear", "factor": 8.0}
OF_LAYERS = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None},
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": LINEAR},
        {"rope_parameters": OF_LAYERS},
        {"rope_parameters": OF_LAYERS | {"full_attention": LINEAR | {"rope_theta": 1e6}}},
    ],
    ids=["published", "published-linear", "by-layer-type", "by-layer-type-linear"],
)
def test_layers_without_a_window_have_a_base_of_their_own(tmp_path, rope):
    """They are those that select; layers with one have a base of 1e4."""
    config = SHAPE | {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 16,
        "num_hidden_layers": 6, "sliding_window": 16, **rope,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    turned = Gemma3RotaryEmbedding(Gemma3TextConfig.from_pretrained(tmp_path))
    rotary = read_rotary(tmp_path)
    assert rotary.inv_freq.tolist() == turned.full_attention_inv_freq.tolist()
    assert rotary.scaling == turned.full_attention_attention_scaling
    assert rotary.inv_freq.tolist() != turned.sliding_attention_inv_freq.tolist()


def test_length_dependent_rope_is_refused(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    make_model(tmp_path, LlamaForCausalLM, LlamaConfig, {"rope_parameters": rope})
    with pytest.raises(UnsupportedModelError, match="rope_type=dynamic"):
        read_rotary(tmp_path)
