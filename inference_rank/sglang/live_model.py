# SPDX-License-Identifier: Apache-2.0
"""SGLang's model in this process, compared with the list of architectures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tandemkv.cache_rank.protocol.errors import ContractError, UnsupportedModelError
from tandemkv.cache_rank.protocol.models.architectures import Architecture, find_architecture
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec


def architecture_of(model: Any) -> Architecture:
    """Return the entry of an SGLang model, whose class has the architecture's name.

    Raises `ContractError` if there is none.
    """
    try:
        return find_architecture(type(model).__name__)
    except UnsupportedModelError as error:
        raise ContractError(str(error)) from error


def layers_of(model: Any) -> Sequence[Any]:
    """Return the decoder layers of an SGLang model.

    Raises `ContractError` if the model has no ``model.layers``.
    """
    layers: Sequence[Any] | None = getattr(getattr(model, "model", None), "layers", None)
    if layers is None:
        raise ContractError(
            f"{type(model).__name__} has no model.layers; this model's decoder layers cannot be "
            "hooked, serve it with stock SGLang"
        )
    return layers


def attention_of(layer: Any) -> Any:
    """Return what of an SGLang decoder layer attends to K/V, None if nothing does.

    Some models have its modules in the layer itself.
    """
    found = getattr(layer, "self_attn", None)
    return layer if found is None and hasattr(layer, "attn") else found


def own_backend(backend: Any) -> Any:
    """Return our attention backend of a model; beside linear attention SGLang has wrapped it."""
    return getattr(backend, "full_attn_backend", backend)


def check_live_attention(model: Any, spec: ModelSpec) -> None:
    """Compare each layer's attention, as SGLang has built it, with what `spec` says of it.

    The specification is read from ``config.json``. Where SGLang reads the file otherwise, or gives
    another layer a window, the engine would score keys by another rule than attention has. Raises
    `ContractError`, naming the layer and the difference, or if there are more or fewer layers.
    """
    layers = layers_of(model)
    if len(layers) != spec.num_layers:
        raise ContractError(
            f"{type(model).__name__}: SGLang has built {len(layers)} layers, and config.json says "
            f"{spec.num_layers}; change config.json, and not by SGLang's arguments"
        )
    for index, layer in enumerate(layers):
        attention = getattr(attention_of(layer), "attn", None)
        if index in spec.linear_layers and hasattr(layer, "linear_attn") and attention is None:
            continue
        if attention is None:
            raise ContractError(
                f"{type(model).__name__}, layer {index} has no self_attn.attn; serve this model "
                "with stock SGLang"
            )
        found = {
            "query heads": (int(attention.tp_q_head_num), spec.num_qo_heads),
            "KV heads": (int(attention.tp_k_head_num), spec.num_kv_heads),
            "head_dim": (int(attention.head_dim), spec.head_dim),
            "v_head_dim": (int(attention.v_head_dim), spec.head_dim),
            "cap of logits": (float(attention.logit_cap), 0.0),
        }
        wrong = [f"{name} {a}, not {b}" for name, (a, b) in found.items() if a != b]
        if index in spec.linear_layers:
            wrong.append("K and V, not a state")
        window, has_window = int(attention.sliding_window_size), index in spec.windowed_layers
        if (window >= 0) != has_window:
            wrong.append(f"window {window}, not {'one' if has_window else -1}")
        if not math.isclose(float(attention.scaling), spec.scale, rel_tol=1e-6):
            wrong.append(f"softmax scale {attention.scaling}, not {spec.scale}")
        if wrong:
            raise ContractError(
                f"{type(model).__name__}, layer {index}: SGLang's attention has "
                f"{'; '.join(wrong)} as config.json says (see docs/models.md); serve this model "
                "with stock SGLang"
            )
