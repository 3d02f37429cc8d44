# SPDX-License-Identifier: Apache-2.0
"""Predicted queries against the projections of transformers' own attention layers."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tandemkv.cache_rank.model_adapters.checkpoint import Checkpoint
from tandemkv.cache_rank.model_adapters.registry import ADAPTERS, find_adapter
from tandemkv.cache_rank.model_adapters.rotary import read_rotary
from tandemkv.cache_rank.protocol.errors import UnsupportedModelError
from tandemkv.cache_rank.protocol.model_spec import SUPPORTED_ARCHITECTURES, read_model_spec

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
}


def make_model(path, model_class, config_class, changes):
    torch.manual_seed(7)
    config = config_class(**SHAPE, architectures=[model_class.__name__], **changes)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:  # ones and zeros would hide a mistake
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(path)
    return model


def query_of(model, layer, hidden, positions):
    block = model.model.layers[layer]
    attention = block.self_attn
    normed = block.input_layernorm(hidden.unsqueeze(0))
    query = attention.q_proj(normed).view(1, len(hidden), -1, attention.head_dim)
    if hasattr(attention, "q_norm"):
        query = attention.q_norm(query)
    query = query.transpose(1, 2)
    cos, sin = model.model.rotary_emb(hidden.unsqueeze(0), positions.unsqueeze(0))
    rotated, _ = apply_rotary_pos_emb(query, query, cos, sin)
    return rotated[0].transpose(0, 1)


@pytest.mark.parametrize("case", CASES)
def test_predicted_query_is_the_layers_own(tmp_path, case):
    model = make_model(tmp_path, *CASES[case])
    spec = read_model_spec(tmp_path, dtype="float32")
    adapter = find_adapter(spec.architecture)(tmp_path, spec, layers=[0, 2])
    torch.manual_seed(1)
    hidden, positions = torch.randn(5, 32), torch.tensor([0, 3, 77, 128, 255])
    for layer in (0, 2):
        got = adapter.predict_query(layer, hidden, positions)
        with torch.no_grad():
            want = query_of(model, layer, hidden, positions)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    with pytest.raises(KeyError):
        adapter.predict_query(1, hidden, positions)


@pytest.mark.parametrize("case", ["llama", "qwen3"])
def test_hidden_of_the_same_layer_gives_the_true_query(tmp_path, case):
    """With the model's own stream, and not a random one: distance 0 is no prediction."""
    model = make_model(tmp_path, *CASES[case])
    spec = read_model_spec(tmp_path, dtype="float32")
    adapter = find_adapter(spec.architecture)(tmp_path, spec, layers=range(3))
    seen = {}
    hooks = [
        block.register_forward_pre_hook(lambda _, args, i=i: seen.__setitem__(i, args[0]))
        for i, block in enumerate(model.model.layers)
    ]
    with torch.no_grad():
        model(torch.arange(12).unsqueeze(0))
    for hook in hooks:
        hook.remove()
    positions = torch.arange(12)
    for layer in range(3):
        got = adapter.predict_query(layer, seen[layer][0], positions)
        with torch.no_grad():
            want = query_of(model, layer, seen[layer][0], positions)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_sharded_checkpoint(tmp_path):
    make_model(tmp_path, *CASES["qwen2"])
    spec = read_model_spec(tmp_path, dtype="float32")
    whole = find_adapter(spec.architecture)(tmp_path, spec, layers=range(3))
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    sharded = find_adapter(spec.architecture)(tmp_path, spec, layers=range(3))
    hidden, positions = torch.randn(2, 32), torch.tensor([4, 9])
    for layer in range(3):
        got = sharded.predict_query(layer, hidden, positions)
        assert torch.equal(got, whole.predict_query(layer, hidden, positions))
    index.unlink()
    with Checkpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.read(names[3]), tensors[names[3]])
        with pytest.raises(UnsupportedModelError, match=r"no tensor model\.missing"):
            checkpoint.read("model.missing")


def test_weights_are_kept_in_the_dtype_of_the_kv(tmp_path):
    make_model(tmp_path, *CASES["llama"])
    spec = read_model_spec(tmp_path, dtype="bfloat16")
    adapter = find_adapter(spec.architecture)(tmp_path, spec, layers=[1])
    got = adapter.predict_query(1, torch.randn(3, 32).bfloat16(), torch.arange(3))
    assert got.dtype == torch.bfloat16
    assert got.shape == (3, 4, 16)


def test_length_dependent_rope_is_refused(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    make_model(tmp_path, LlamaForCausalLM, LlamaConfig, {"rope_parameters": rope})
    with pytest.raises(UnsupportedModelError, match="rope_type=dynamic"):
        read_rotary(tmp_path)


def test_every_supported_architecture_has_an_adapter():
    assert set(ADAPTERS) == set(SUPPORTED_ARCHITECTURES)
    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM"):
        find_adapter("MambaForCausalLM")
