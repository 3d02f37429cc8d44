# SPDX-License-Identifier: Apache-2.0
"""A model directory of some shape, for dummy weights."""

from __future__ import annotations

import json
from pathlib import Path

from tandemkv.server.plan.shape import ModelShape


def write_model_config(shape: ModelShape, model_dir: Path, *, max_context: int) -> None:
    """Write a model directory of `shape` that dummy weights can be loaded for.

    `model_dir` gets ``config.json`` only; quantised matrices are FP8 in blocks of 128.
    `max_context` has the output included, and is rounded up to a power of two.
    """
    is_qwen, experts = shape.name.startswith("qwen3"), shape.experts
    name = ("Qwen3" if is_qwen else "Llama") + ("Moe" if experts else "")
    config = {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": ("qwen3" if is_qwen else "llama") + ("_moe" if experts else ""),
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
    if experts:
        config |= {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": experts.size,
            "norm_topk_prob": True,
            "num_experts": experts.count,
            "num_experts_per_tok": experts.per_token,
        }
    if shape.is_quantised:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
    model_dir.mkdir(parents=True, exist_ok=True)
    (model_dir / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
