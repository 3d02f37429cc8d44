# SPDX-License-Identifier: Apache-2.0
"""Predict a layer's query with the modules of the model that is being served."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tandemkv.cache_rank.protocol.errors import ContractError
from tandemkv.kernels.query import QueryWeights, predict_query, quantize_query_weight

_FUSED_ROTARY = {"RotaryEmbedding", "Llama3RotaryEmbedding", "YaRNScalingRotaryEmbedding"}
"""SGLang's rotary embeddings that do no more than look up `cos_sin_cache`."""

logger = logging.getLogger(__name__)


class LiveQueryPredictor:
    """``rope(q_norm(W_q^l norm_l(h)))`` with the weights of SGLang's own layers.

    Under tensor parallelism each rank predicts its own heads, and on the model's own GPU no weight
    is held twice, but for an int8 copy. Where a layer is built of plain RMS norms and rotary
    embeddings (Llama, Qwen2, Qwen3) its query is made in one operation (`tandemkv.kernels.query`),
    else by calling the layer's modules.

    On another GPU the weights are copies, made by `load` and not refreshed. With
    `is_int8`, where a query is made in one operation, ``W_q`` is a copy with a scale per row:
    reading it is most of the operation's time, and what is predicted only chooses tokens.

    Parameters
    ----------
    model : Any
        SGLang's model; its decoder layers must have ``input_layernorm`` and ``self_attn`` with
        ``qkv_proj``, ``rotary_emb`` and, where there is one, ``q_norm``.
    num_qo_heads, head_dim : int
        Of this rank.
    device : torch.device
        Where to predict.
    is_far : bool
        Whether that is another GPU than the model's, or to be taken for one.
    is_int8 : bool
        Whether to keep a copy of W_q in int8, where the whole prediction is one operation.

    """

    def __init__(
        self,
        model: Any,
        *,
        num_qo_heads: int,
        head_dim: int,
        device: torch.device,
        is_far: bool = False,
        is_int8: bool = False,
    ) -> None:
        self._model, self._device = model, device
        self._is_far, self._is_int8 = is_far, is_int8
        self._num_heads, self._head_dim = num_qo_heads, head_dim
        self._layers: list[_Layer] = []

    def load(self) -> None:
        """Take what is needed of each layer; only for policies that predict queries.

        Raises
        ------
        ContractError
            If the layers are built otherwise, or the projection is quantised.
        """
        name, size = type(self._model).__name__, self._num_heads * self._head_dim
        self._layers = [
            _Layer.of(
                f"{name}, layer {i}",
                layer,
                size,
                self._device,
                is_far=self._is_far,
                is_int8=self._is_int8,
            )
            for i, layer in enumerate(self._model.model.layers)
        ]
        num_fused = sum(layer.fused is not None for layer in self._layers)
        logger.info(
            "queries of %d of %d layers in one operation%s",
            num_fused, len(self._layers), ", W_q in int8" if self._is_int8 and num_fused else "",
        )  # fmt: skip
        if self._is_int8 and num_fused < len(self._layers):
            logger.warning(
                "predictor_dtype=int8: %d layers of %s are built of other norms or rotary "
                "embeddings, and keep W_q as it is", len(self._layers) - num_fused, name,
            )  # fmt: skip

    def weights(self) -> tuple[list[QueryWeights], torch.Tensor]:
        """Return what predicts in one operation: weights of each layer, and the rotation.

        Returns
        -------
        layers : list of QueryWeights
            Of each layer.
        cos_sin : torch.Tensor
            ``[num_positions, head_dim]``; see `predict_query`.

        Raises
        ------
        ContractError
            If a layer's query takes more than one operation.
        """
        fused = [layer.fused for layer in self._layers]
        found = [weights for weights in fused if weights is not None]
        if len(found) < len(fused):
            raise ContractError(
                f"{type(self._model).__name__} is built of other norms or rotary embeddings than "
                "those that another process can predict queries with; use --cache-ranks 0"
            )
        return found, self._layers[0].rotary.cos_sin_cache

    def __call__(self, layer: int, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return ``[B, Hq, D]`` for `hidden` ``[B, hidden_size]``; `hidden` stays as it is."""
        own, size = self._layers[layer], len(hidden)
        if own.fused is not None:
            # Looked up anew: SGLang may put a longer cache in its place.
            return predict_query(hidden, positions, own.fused, own.rotary.cos_sin_cache)
        query = F.linear(own.norm(hidden), own.weight, own.bias)
        if own.query_norm is not None:
            query = own.query_norm(query.view(-1, self._head_dim))
        # The rotary kernels take a key too, and work in place; nobody reads this one.
        query = query.view(size, self._num_heads * self._head_dim)
        query, _ = own.rotary(positions, query, query.new_empty(size, self._head_dim))
        return query.view(size, self._num_heads, self._head_dim)


@dataclass(frozen=True, slots=True)
class _Layer:
    """What a decoder layer makes its query with."""

    norm: Any
    weight: torch.Tensor  # With `fused` the one in there.
    bias: torch.Tensor | None
    query_norm: Any
    rotary: Any
    fused: QueryWeights | None

    @classmethod
    def of(
        cls, name: str, layer: Any, size: int, device: torch.device, *, is_far: bool, is_int8: bool
    ) -> _Layer:  # fmt: skip
        attention = getattr(layer, "self_attn", None)
        projection = getattr(attention, "qkv_proj", None)
        weight = getattr(projection, "weight", None)
        if attention is None or weight is None or not hasattr(attention, "rotary_emb"):
            raise ContractError(
                f"{name} has no self_attn.qkv_proj.weight or rotary_emb; look_ahead cannot read "
                "its query projection"
            )
        if not weight.is_floating_point() or weight.element_size() < 2:
            raise ContractError(
                f"{name}: qkv_proj is quantised ({weight.dtype}); look_ahead needs an unquantised "
                "one: serve another checkpoint of the model"
            )
        bias = getattr(projection, "bias", None)

        def here(module: Any) -> Any:
            return copy.deepcopy(module).to(device) if is_far and module is not None else module

        norm, rotary = here(layer.input_layernorm), here(attention.rotary_emb)
        query_norm = here(getattr(attention, "q_norm", None))
        weight, weight_scale = weight.detach()[:size], None
        bias = None if bias is None else bias.detach()[:size].to(device)
        is_plain = _is_plain_norm(norm) and (query_norm is None or _is_plain_norm(query_norm))
        fused, is_fused = None, is_plain and _is_plain_rotary(rotary)
        if is_int8 and is_fused:
            weight, weight_scale = quantize_query_weight(weight, device)
        weight = weight.to(device)
        if is_fused:
            fused = QueryWeights(
                norm=norm.weight.detach(),
                norm_eps=float(norm.variance_epsilon),
                weight=weight,
                weight_scale=weight_scale,
                bias=bias,
                query_norm=None if query_norm is None else query_norm.weight.detach(),
                query_norm_eps=0.0 if query_norm is None else float(query_norm.variance_epsilon),
            )
        return cls(
            norm=norm, weight=weight, bias=bias, query_norm=query_norm, rotary=rotary, fused=fused
        )


def _is_plain_norm(norm: Any) -> bool:
    """Whether `norm` is SGLang's RMSNorm over whole vectors; its relatives weigh otherwise."""
    is_named_so = type(norm).__name__ == "RMSNorm"
    return is_named_so and getattr(norm, "variance_size_override", 0) is None


def _is_plain_rotary(rotary: Any) -> bool:
    """Whether `rotary` turns whole heads by the angles in its cache, NeoX style."""
    return (
        type(rotary).__name__ in _FUSED_ROTARY
        and bool(rotary.is_neox_style)
        and rotary.rotary_dim == rotary.head_size
    )
