# SPDX-License-Identifier: Apache-2.0
"""What a decoder layer of SGLang's makes its query with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from tandemkv.cache_rank.protocol.errors import ContractError
from tandemkv.cache_rank.protocol.models.architectures import Architecture
from tandemkv.inference_rank.sglang.live_model import attention_of
from tandemkv.kernels.query import QueryWeights, quantize_query_weight

from .query_projection import QueryPlace, read_projection, rows_of

_PLAIN_ROTARY = {
    "RotaryEmbedding",
    "Llama3RotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
    "LinearScalingRotaryEmbedding",
    "DynamicNTKScalingRotaryEmbedding",
    "MRotaryEmbedding",
    "YaRNScalingMRotaryEmbedding",
}
"""SGLang's rotary embeddings that do no more than look up `cos_sin_cache`: those that can take
three positions of a token, too, where all are its place in the request."""
_PLAIN_NORMS = {"RMSNorm", "MiniMaxM2RMSNormTP"}
"""SGLang's norms that are an RMS norm; their relatives weigh otherwise."""
_OFFSET_NORMS = {"Gemma3RMSNorm", "GemmaRMSNorm"}
"""Those whose weights count from one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryLayer:
    """A layer's modules and weights; `weight` is that of `fused` where it is not None."""

    place: QueryPlace
    norm: Any
    weight: torch.Tensor
    bias: torch.Tensor | None
    query_norm: Any
    is_normed_whole: bool
    rotary: Any
    fused: QueryWeights | None

    @classmethod
    def of(
        cls, name: str, index: int, layer: Any, entry: Architecture, place: QueryPlace
    ) -> QueryLayer:
        """Take what is needed of a decoder layer.

        `name` is for errors, `index` the layer's in the checkpoint. Raises `ContractError` or
        `UnsupportedModelError` if the layer is not built as `entry` says, or its projection cannot
        be read.
        """
        attention = attention_of(layer)
        weight, bias = read_projection(name, index, attention, place)
        norm = _attention_norm(name, layer, entry)
        query_norm = getattr(attention, "q_norm", None)
        if query_norm is not None and entry.query_norm == "none":
            raise ContractError(
                f"{name} normalises its queries, and {entry.name} is not known to (see "
                "docs/models.md)"
            )
        rotary = attention.rotary_emb
        plain = cls(
            place=place,
            norm=norm,
            weight=weight,
            bias=None if bias is None else bias.to(place.device),
            query_norm=query_norm,
            is_normed_whole=query_norm is not None and entry.query_norm == "layer",
            rotary=rotary,
            fused=None,
        )
        norms = [x for x in (norm, query_norm) if x is not None]
        if all(map(_is_plain_norm, norms)) and type(rotary).__name__ in _PLAIN_ROTARY:
            fused = plain._in_one_operation(name)
            return replace(plain, weight=fused.weight, fused=fused)
        return replace(plain, weight=plain.weight.to(place.device))

    def _in_one_operation(self, name: str) -> QueryWeights:
        place, norm, query_norm = self.place, self.norm, self.query_norm
        weight, scale, own_norm = self.weight, None, None
        if place.is_int8:
            weight, scale = quantize_query_weight(weight, place.device)
        if query_norm is not None:
            size = place.width if self.is_normed_whole else place.head_dim
            own_norm = _weight_of(query_norm)  # SGLang may keep the whole
            rows = rows_of(name, len(own_norm), size, "weights of the queries' norm")
            own_norm = own_norm[rows.start : rows.stop]
        return QueryWeights(
            head_dim=place.head_dim,
            weight=weight.to(place.device),
            weight_scale=scale,
            bias=self.bias,
            norm=None if norm is None else _weight_of(norm),
            norm_eps=_epsilon_of(norm),
            query_norm=own_norm,
            query_norm_eps=_epsilon_of(query_norm),
            rotates_neighbours=not self.rotary.is_neox_style,
        )

    def call(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return ``[B, Hq, D]`` for `hidden` ``[B, hidden_size]``, by the layer's modules."""
        size, place = len(hidden), self.place
        normed = hidden if self.norm is None else _normed(self.norm, hidden)
        query = F.linear(normed, self.weight, self.bias)
        if self.query_norm is not None and self.is_normed_whole:
            query = self.query_norm(query)
        elif self.query_norm is not None:
            query = self.query_norm(query.view(-1, place.head_dim))
        # The rotary kernels take a key too, and work in place; nobody reads this one.
        query = query.view(size, place.width)
        query, _ = self.rotary(positions, query, query.new_empty(size, place.head_dim))
        return query.view(size, place.num_heads, place.head_dim)


def _normed(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Return the norm of `hidden`; later versions of SGLang let one quantise for what follows."""
    quantises = getattr(norm, "_quant_linear", None) is not None
    found: torch.Tensor = norm.forward_native(hidden) if quantises else norm(hidden)
    return found


def _attention_norm(name: str, layer: Any, entry: Architecture) -> Any:
    if entry.attention_norm is None:
        return None
    norm = getattr(layer, entry.attention_norm, None)
    if norm is None:
        raise ContractError(f"{name} has no {entry.attention_norm} (see docs/models.md)")
    return norm


def _is_plain_norm(norm: Any) -> bool:
    """Whether `norm` is an RMS norm over whole vectors."""
    is_named_so = type(norm).__name__ in _PLAIN_NORMS | _OFFSET_NORMS
    return is_named_so and getattr(norm, "variance_size_override", None) is None


def _weight_of(norm: Any) -> torch.Tensor:
    """Return what a normalised vector is multiplied with: the weight, or a copy that is 1 more."""
    weight: torch.Tensor = norm.weight.detach()
    return 1.0 + weight.float() if type(norm).__name__ in _OFFSET_NORMS else weight


def _epsilon_of(norm: Any) -> float:
    if norm is None:
        return 0.0
    return float(norm.eps if type(norm).__name__ == "Gemma3RMSNorm" else norm.variance_epsilon)
