# SPDX-License-Identifier: Apache-2.0
"""Predict a layer's query with the modules of the model that is being served."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tandemkv.cache_rank.protocol.errors import ContractError


class LiveQueryPredictor:
    """``rope(q_norm(W_q^l norm_l(h)))`` with SGLang's own layers.

    No weight is held twice, and under tensor parallelism each rank predicts its own heads.

    Parameters
    ----------
    model : Any
        SGLang's model; its decoder layers must have ``input_layernorm`` and ``self_attn`` with
        ``qkv_proj``, ``rotary_emb`` and, where there is one, ``q_norm``.
    num_kv_heads, head_dim : int
        Of this rank.

    Raises
    ------
    ContractError
        If the layers are built otherwise, or the projection is quantised.
    """

    def __init__(self, model: Any, *, num_qo_heads: int, head_dim: int) -> None:
        self._num_heads, self._head_dim = num_qo_heads, head_dim
        self._layers = list(model.model.layers)
        for index, layer in enumerate(self._layers):
            attention = getattr(layer, "self_attn", None)
            weight = getattr(getattr(attention, "qkv_proj", None), "weight", None)
            if weight is None or not hasattr(attention, "rotary_emb"):
                raise ContractError(
                    f"{type(model).__name__}: layer {index} has no self_attn.qkv_proj.weight or "
                    "rotary_emb; look_ahead cannot read its query projection"
                )
            if not weight.is_floating_point() or weight.element_size() < 2:
                raise ContractError(
                    f"layer {index}: qkv_proj is quantised ({weight.dtype}); look_ahead needs an "
                    "unquantised one, serve with --policy last_query or another model"
                )

    def __call__(self, layer: int, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return ``[B, Hq, D]`` for `hidden` ``[B, hidden_size]``; `hidden` stays as it is."""
        module = self._layers[layer]
        attention = module.self_attn
        normed = module.input_layernorm(hidden)
        size = self._num_heads * self._head_dim
        projection = attention.qkv_proj
        bias = getattr(projection, "bias", None)
        query = F.linear(normed, projection.weight[:size], None if bias is None else bias[:size])
        if hasattr(attention, "q_norm"):
            query = attention.q_norm(query.view(-1, self._head_dim))
        # The rotary kernels take a key too, and work in place.
        query = query.view(len(hidden), size).contiguous()
        query, _ = attention.rotary_emb(
            positions, query, query.new_zeros(len(hidden), self._head_dim)
        )
        return query.view(len(hidden), self._num_heads, self._head_dim)
