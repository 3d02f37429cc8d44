# SPDX-License-Identifier: Apache-2.0
"""Compare the tensors of an unquantised checkpoint with its ``config.json``.

The layout is that of the model's architecture in Hugging Face's files. Names that are not known
are passed over: experts, and all of a checkpoint in which nothing is known (another prefix), which
is therefore accepted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tandemkv.cache_rank.protocol.models.architectures import Architecture
from tandemkv.cache_rank.protocol.models.attention_config import linear_layers
from tandemkv.cache_rank.protocol.models.model_spec import architecture_of_config
from tandemkv.server.plan.shape import linear_shape

Shape = tuple[int, ...]

_ATTENTION, _LINEAR = "self_attn.", "linear_attn."

_LAYER = re.compile(r"layers\.(?P<layer>\d+)\.(?P<part>.+)")
_HEAD = "lm_head.weight"


def check_shapes(tensors: Mapping[str, Shape], config: Mapping[str, Any]) -> None:
    """Check number of layers, completeness of each, and shapes.

    `tensors` are shapes by name; the attention's in ``config.json`` has been read before. Raises
    `ValueError`: what is wrong, and as a second argument the tensor that it is about, if there is
    one.
    """
    prefix = architecture_of_config(config).tensor_prefix
    layers: dict[int, dict[str, Shape]] = {}
    for name, shape in tensors.items():
        match = _LAYER.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if match is not None:
            layers.setdefault(int(match["layer"]), {})[match["part"]] = shape
    entry = architecture_of_config(config)
    parts, others = _expected(config, entry)
    linear = frozenset(linear_layers(config, entry))
    is_known = any(part in parts for found in layers.values() for part in found)
    if is_known:
        _check_layers(layers, parts, config, linear)
    for layer, found in sorted(layers.items()):
        for part, shape in found.items():
            _check_shape(f"{prefix}layers.{layer}.{part}", shape, parts.get(part))
    for name, wanted in others.items():
        if name in tensors:
            _check_shape(name, tensors[name], wanted)
        elif is_known and name != _HEAD:
            raise ValueError(f"the checkpoint has no tensor {name}")
        elif is_known and not config.get("tie_word_embeddings", entry.ties_embeddings):
            raise ValueError(
                f"the checkpoint has no tensor {name}, and config.json does not set "
                "tie_word_embeddings"
            )


def _expected(
    config: Mapping[str, Any], entry: Architecture
) -> tuple[dict[str, Shape | None], dict[str, Shape | None]]:
    """Return the shapes of a layer's weights and of the others; None where config has no number."""
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    vocabulary = _number(config, "vocab_size")
    table = (vocabulary, hidden) if vocabulary else None
    norms = (entry.attention_norm, *entry.other_norms)
    layer: dict[str, Shape | None] = {f"{name}.weight": (hidden,) for name in norms if name}
    query, key = heads * head_dim, kv_heads * head_dim
    asked = 2 * query if entry.gates_heads else query
    attention: dict[str, Shape] = {"q_proj": (asked, hidden), "k_proj": (key, hidden)}
    attention |= {"v_proj": (key, hidden)}
    if entry.fused_qkv:
        attention = {"qkv_proj": (query + 2 * key, hidden)}
    attention["o_proj"] = (hidden, query)
    if entry.query_norm != "none":
        is_whole = entry.query_norm == "layer"
        attention |= {"q_norm": (query if is_whole else head_dim,)}
        attention |= {"k_norm": (key if is_whole else head_dim,)}
    layer |= {f"{_ATTENTION}{name}.weight": shape for name, shape in attention.items()}
    linear = linear_shape(config, entry)
    if linear is not None:
        layer |= {f"{_LINEAR}{name}": shape for name, shape in linear.tensors(hidden).items()}
    if entry.experts is None:
        layer |= _mlp(entry, hidden, _number(config, "intermediate_size"))
    embedding, norm = (f"{entry.tensor_prefix}{x}.weight" for x in ("embed_tokens", "norm"))
    return layer, {embedding: table, norm: (hidden,), _HEAD: table}


def _mlp(entry: Architecture, hidden: int, inner: int | None) -> dict[str, Shape | None]:
    """Return the shapes of a dense MLP's weights."""
    if inner is None:
        found: dict[str, Shape | None] = {"up_proj": None, "down_proj": None}
    elif entry.fused_gate_up:
        found = {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}
    else:
        found = {"up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        if entry.mlp_matrices == 3:
            found["gate_proj"] = (inner, hidden)
    return {f"mlp.{name}.weight": shape for name, shape in found.items()}


def _check_layers(
    layers: Mapping[int, Mapping[str, Shape]],
    parts: Mapping[str, Shape | None],
    config: Mapping[str, Any],
    linear: frozenset[int],
) -> None:
    """Each layer has the known parts that any of its kind has, and config says how many there are.

    Layers of `linear` attention have no `self_attn`, and the others no `linear_attn`.
    """
    wanted, prefix = int(config["num_hidden_layers"]), architecture_of_config(config).tensor_prefix
    used = [part for part in parts if any(part in found for found in layers.values())]
    for layer in range(wanted):
        for part in used:
            other_kind = _ATTENTION if layer in linear else _LINEAR
            if not part.startswith(other_kind) and part not in layers.get(layer, {}):
                raise ValueError(
                    f"num_hidden_layers={wanted}, but the checkpoint has no tensor "
                    f"{prefix}layers.{layer}.{part} (it has {_count_attention(layers)} layers)"
                )
    # Layers for predicting several tokens may follow; those are counted elsewhere.
    projection = next(part for part in parts if part.startswith(_ATTENTION))
    beyond = [layer for layer in layers if layer >= wanted and projection in layers[layer]]
    if beyond and not config.get("num_nextn_predict_layers"):
        raise ValueError(
            f"num_hidden_layers={wanted}, but the checkpoint has {_count_attention(layers)} layers",
            f"{prefix}layers.{min(beyond)}.{projection}",
        )


def _count_attention(layers: Mapping[int, Mapping[str, Shape]]) -> int:
    return sum(
        any(part.startswith((_ATTENTION, _LINEAR)) for part in found) for found in layers.values()
    )


def _check_shape(name: str, shape: Shape, wanted: Shape | None) -> None:
    if wanted is not None and shape != wanted:
        raise ValueError(f"{name} has shape {list(shape)}, config.json means {list(wanted)}", name)


def _number(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) and value > 0 else None
