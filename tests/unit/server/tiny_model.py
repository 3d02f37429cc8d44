# SPDX-License-Identifier: Apache-2.0
"""Model directories of a few kilobytes that are complete, for tests that damage them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}
TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": None,
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
}
_BYTES = 2


def write_model(path: Path, config: Mapping[str, Any] = CONFIG, *, shards: int = 1) -> Path:
    """Write configuration, tokenizer and weights (holes of zeros); returns `path`."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    write_weights(path, shapes(config), shards=shards)
    return path


def shapes(config: Mapping[str, Any] = CONFIG) -> dict[str, tuple[int, ...]]:
    """Return the tensors of Hugging Face's layout."""
    hidden = int(config["hidden_size"])
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads", heads))
    head_dim = int(config.get("head_dim", hidden // heads))
    inner = int(config.get("intermediate_size", 2 * hidden))
    table = (int(config.get("vocab_size", 100)), hidden)
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (heads * head_dim, hidden),
        "self_attn.k_proj": (kv_heads * head_dim, hidden),
        "self_attn.v_proj": (kv_heads * head_dim, hidden),
        "self_attn.o_proj": (hidden, heads * head_dim),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": table}
    for index in range(int(config["num_hidden_layers"])):
        found |= {f"model.layers.{index}.{part}.weight": shape for part, shape in layer.items()}
    found["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        found["lm_head.weight"] = table
    return found


def write_weights(
    path: Path, tensors: Mapping[str, tuple[int, ...]], *, shards: int = 1, index: bool = True
) -> None:
    """Write tensors to one file, or to several with an index, whose weights take no room."""
    if shards == 1:
        write_safetensors(path / "model.safetensors", tensors)
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        own = names[number::shards]
        write_safetensors(path / file, {name: tensors[name] for name in own})
        weight_map |= dict.fromkeys(own, file)
    if index:
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (path / "model.safetensors.index.json").write_text(text)


def write_safetensors(path: Path, tensors: Mapping[str, tuple[int, ...]]) -> None:
    """Write a header, and as many bytes as it says."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in tensors.items():
        start, end = end, end + prod(shape) * _BYTES
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
