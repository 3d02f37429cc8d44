# SPDX-License-Identifier: Apache-2.0
"""A model directory of some shape, for dummy weights."""

from __future__ import annotations

import json
from pathlib import Path

from tandemkv.server.plan.shape import ModelShape


def write_model_config(shape: ModelShape, model_dir: Path, *, max_context: int) -> None:
    """Write a model directory of `shape` that dummy weights can be loaded for.

    Parameters
    ----------
    shape : ModelShape
        The sizes.
    model_dir : Path
        Made if needed; gets ``config.json`` only.
    max_context : int
        Longest request, output included; rounded up to a power of two.
    """
    is_qwen = shape.name.startswith("qwen3")
    config = {
        "architectures": ["Qwen3ForCausalLM" if is_qwen else "LlamaForCausalLM"],
        "model_type": "qwen3" if is_qwen else "llama",
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": 1 << max(7, (max_context - 1).bit_length()),
        "num_attention_heads": shape.num_qo_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0 if is_qwen else 500000.0,
        "tie_word_embeddings": shape.tied_embeddings,
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
    }
    model_dir.mkdir(parents=True, exist_ok=True)
    (model_dir / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
