# SPDX-License-Identifier: Apache-2.0
"""What a ``config.json`` says of a model's attention, and what of it cannot be served."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from tandemkv.cache_rank.protocol.errors import UnsupportedModelError

from .architectures import SEE_DOCS, Architecture

_STOCK = f"serve this model with stock SGLang ({SEE_DOCS})"
_OTHER_ATTENTION = {
    "attn_logit_softcapping": "its attention logits are capped",
    "attn_logit_cap": "its attention logits are capped",
    "attn_temperature_tuning": "the scale of its attention depends on the position",
    "llama_4_scaling": "the scale of its attention depends on the position",
    "dual_chunk_attention_config": "it attends to chunks of a long context in different ways",
    "kv_lora_rank": "its attention is over compressed K/V (MLA)",
    "use_bidirectional_attention": "its tokens attend to later ones",
}
"""Fields that change what attention is, whatever the architecture. Set to null, 0 or false they
mean nothing."""
_OTHER_SCALES = ("attention_multiplier", "query_pre_attn_scalar")
_BATCH_DEPENDENT_ROPE = ("longrope", "su")
_MOST_LAYERS = 1 << 12
_PATTERNS = {
    "sliding_attention": "sliding_window_pattern",
    "linear_attention": "full_attention_interval",
}
"""The field that says which layers attend to the whole context, where ``layer_types`` does not."""


def check_attention(config: Mapping[str, Any], entry: Architecture, *, name: str) -> None:
    """Refuse a model with layers whose attention is neither over the whole context nor SGLang's.

    Raises `UnsupportedModelError`, with the field and the reason.
    """
    try:
        reason = next(_objections(config, entry), "")
    except TypeError as error:
        reason = f"config.json garbles a field that lists layers ({error})"
    if reason:
        raise UnsupportedModelError(f"model={name}: {reason}; {_STOCK}")


def _objections(config: Mapping[str, Any], entry: Architecture) -> Iterator[str]:
    other = _layer_kinds(config) - {"full_attention"}
    if entry.full_every:
        other -= {entry.others}
    if "sliding_attention" in other or _has_window(config, entry):
        yield "sliding-window attention is not supported"
    if other:
        kinds = ", ".join(sorted(other))
        yield f"layers of type {kinds} are not supported, only full_attention"
    for field, reason in _OTHER_ATTENTION.items():
        if config.get(field):
            yield f"{reason} ({field})"
    for field in _OTHER_SCALES:
        if config.get(field) is not None and field != entry.scale_field:
            yield (
                f"{field}={config[field]} is another softmax scale than {entry.name} has in SGLang"
            )
    kind = rope_type(config)
    if kind in _BATCH_DEPENDENT_ROPE:
        yield (
            f"rope_type={kind} turns a key by factors that depend on the other requests of its "
            "batch, so keys of one request may not fit one query"
        )
    if kind != "default" and not entry.scales_rope:
        yield (
            f"rope_type={kind}: SGLang turns keys by model.rotary_emb, and the layers' own "
            "rotary_emb, which queries are predicted with, has no scaling"
        )


def windowed_layers(config: Mapping[str, Any], entry: Architecture) -> tuple[int, ...]:
    """Return the layers that attend to a sliding window, ascending.

    Raises `KeyError`, `TypeError` or `ValueError` if ``config.json`` does not say it, or all layers
    do.
    """
    return _other_layers(config, entry) if entry.others == "sliding_attention" else ()


def linear_layers(config: Mapping[str, Any], entry: Architecture) -> tuple[int, ...]:
    """Return the layers of linear attention, ascending; errors as of `windowed_layers`."""
    return _other_layers(config, entry) if entry.others == "linear_attention" else ()


def _other_layers(config: Mapping[str, Any], entry: Architecture) -> tuple[int, ...]:
    if not entry.full_every:
        return ()
    count, kinds = int(config["num_hidden_layers"]), config.get("layer_types")
    if count > _MOST_LAYERS:  # they are listed below
        raise ValueError(f"num_hidden_layers={count} must be {_MOST_LAYERS} at most")
    if kinds is None:
        every = int(config.get(_PATTERNS[entry.others]) or entry.full_every)
        found = tuple(x for x in range(count) if (x + 1) % every)
    elif len(kinds) < count:
        raise ValueError(f"layer_types has {len(kinds)} entries for {count} layers")
    else:
        found = tuple(x for x in range(count) if kinds[x] == entry.others)
    if len(found) == count:
        raise ValueError("no layer attends to the whole context, so there is nothing to select")
    return found


def rope_type(config: Mapping[str, Any]) -> str:
    """Return the kind of rotary embedding of full attention, ``default`` if none is named."""
    for field in ("rope_parameters", "rope_scaling"):
        found = config.get(field)
        if isinstance(found, Mapping) and "full_attention" in found:
            found = found["full_attention"]  # one for each kind of layer
        if isinstance(found, Mapping):
            kind = found.get("rope_type") or found.get("type")
            if kind:
                return str(kind)
    return "default"


def softmax_scale(config: Mapping[str, Any], entry: Architecture) -> float | None:
    """Return the factor of the attention logits; None where it is ``1 / sqrt(head_dim)``.

    Raises `KeyError`, `TypeError` or `ValueError` if the field that the architecture takes it from
    is missing or no positive number.
    """
    if not entry.scale_field:
        return None
    scale = float(config[entry.scale_field])
    if not 0 < scale <= 1024:
        raise ValueError(f"{entry.scale_field}={scale} must be above 0, and 1024 at most")
    return 1.0 / math.sqrt(scale) if entry.scale_field == "query_pre_attn_scalar" else scale


def _layer_kinds(config: Mapping[str, Any]) -> set[str]:
    kinds = {str(kind) for kind in config.get("layer_types") or []}
    # MiniMax's own field: 1 is full attention, 0 is linear.
    if any(kind != 1 for kind in config.get("attn_type_list") or []):
        kinds.add("linear_attention")
    return kinds


def _has_window(config: Mapping[str, Any], entry: Architecture) -> bool:
    window = config.get("sliding_window")
    if not window or not config.get("use_sliding_window", entry.window_counts):
        return False
    # A window that no request can outgrow is none: Phi-3 writes one of its longest context.
    limit = config.get("max_position_embeddings")
    return not (isinstance(limit, int) and isinstance(window, int) and window >= limit)
