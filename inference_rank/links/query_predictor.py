# SPDX-License-Identifier: Apache-2.0
"""Predict a layer's query with the modules of the model that is being served."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import torch

from tandemkv.cache_rank.protocol.errors import ContractError
from tandemkv.inference_rank.sglang.live_model import architecture_of, layers_of
from tandemkv.kernels.query import QueryWeights, predict_query

from .query_layer import QueryLayer
from .query_projection import QueryPlace

logger = logging.getLogger(__name__)


class LiveQueryPredictor:
    """``rope(q_norm(W_q^l norm_l(h)))`` with the weights of SGLang's own layers.

    The model's architecture tells what of that a layer has (`Architecture`). Under tensor
    parallelism each rank predicts its own heads. A norm over all heads is then taken over the
    rank's own, which changes a query's length, and not its direction. On the model's own GPU no
    weight is held twice, but for an int8 copy, for a W_q that has gates between its rows, and for
    that of a quantised model, which is dequantised once (`read_projection`). Where a layer is built
    of plain RMS norms and rotary embeddings its query is made in one operation
    (`tandemkv.kernels.query`), else by calling the layer's modules.

    With ``place.is_int8``, where a query is made in one operation, ``W_q`` is a copy with a scale
    per row, made by `load` and not refreshed: reading it is most of the operation's time, and what
    is predicted only chooses tokens. `model`'s class has the name of an `Architecture`; what
    attends in its decoder layers must have ``qkv_proj``, ``rotary_emb`` and, where there is one,
    ``q_norm``. Nothing is predicted for `skipped` layers: a sliding window, or linear attention.
    """

    def __init__(self, model: Any, place: QueryPlace, *, skipped: Collection[int] = ()) -> None:
        self._model, self._place = model, place
        self._skipped = frozenset(skipped)
        self._layers: list[QueryLayer | None] = []

    def load(self) -> None:
        """Take what is needed of each layer; only for policies that predict queries.

        Raises `ContractError` or `UnsupportedModelError` if the layers are built otherwise, or a
        quantised projection cannot be read.
        """
        name, entry = type(self._model).__name__, architecture_of(self._model)
        self._layers = [
            None
            if i in self._skipped
            else QueryLayer.of(f"{name}, layer {i}", i, layer, entry, self._place)
            for i, layer in enumerate(layers_of(self._model))
        ]
        kept = self._kept
        num_fused = sum(layer.fused is not None for layer in kept)
        is_int8 = self._place.is_int8
        logger.info(
            "queries of %d of %d layers in one operation%s",
            num_fused, len(kept), ", W_q in int8" if is_int8 and num_fused else "",
        )  # fmt: skip
        if is_int8 and num_fused < len(kept):
            logger.warning(
                "predictor_dtype=int8: %d layers of %s are built of other norms or rotary "
                "embeddings, and keep W_q as it is", len(kept) - num_fused, name,
            )  # fmt: skip

    @property
    def _kept(self) -> list[QueryLayer]:
        return [layer for layer in self._layers if layer is not None]

    def weights(self) -> tuple[list[QueryWeights | None], torch.Tensor]:
        """Return what predicts in one operation: weights of each layer, and the rotation.

        None where nothing is predicted; ``[num_positions, rotary_dim]``, see `predict_query`.
        Raises `ContractError` if a layer's query takes more than one operation, or layers turn
        queries differently.
        """
        kept = self._kept
        if any(layer.fused is None for layer in kept):
            raise ContractError(
                f"{type(self._model).__name__} is built of other norms or rotary embeddings than "
                "those that another process can predict queries with; use --cache-ranks 0"
            )
        cos_sin: torch.Tensor = kept[0].rotary.cos_sin_cache
        others = (x.rotary.cos_sin_cache for x in kept if x.rotary is not kept[0].rotary)
        if not all(torch.equal(cos_sin, other) for other in others):
            raise ContractError(
                f"{type(self._model).__name__}: layers that attend to the whole context turn "
                "queries by different angles, and another process has one table; use --cache-ranks "
                "0"
            )
        return [None if layer is None else layer.fused for layer in self._layers], cos_sin

    def __call__(self, layer: int, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return ``[B, Hq, D]`` for `hidden` ``[B, hidden_size]``; `hidden` stays as it is."""
        own = self._layers[layer]
        assert own is not None  # nothing is selected for skipped layers
        if own.fused is None:
            return own.call(hidden, positions)
        # Looked up anew: SGLang may put a longer cache in its place.
        return predict_query(hidden, positions, own.fused, own.rotary.cos_sin_cache)
