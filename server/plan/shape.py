# SPDX-License-Identifier: Apache-2.0
"""Shapes of models: how many bytes their weights and their KV take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tandemkv.cache_rank.protocol.errors import SettingsError, UnsupportedModelError
from tandemkv.cache_rank.protocol.model_spec import SUPPORTED_ARCHITECTURES, read_config

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a dense decoder with grouped-query attention that matter for a plan.

    `item_bytes` is the size of one weight and of one K or V element.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied_embeddings: bool = False
    item_bytes: int = 2

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer: q, k, v, o, gate, up, down and two norms."""
        qo = 2 * self.hidden_size * self.num_qo_heads * self.head_dim
        kv = 2 * self.hidden_size * self.num_kv_heads * self.head_dim
        return qo + kv + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size

    @property
    def weight_bytes(self) -> int:
        """All weights."""
        embeddings = (1 if self.tied_embeddings else 2) * self.vocab_size * self.hidden_size
        total = self.num_layers * self.layer_parameters + embeddings + self.hidden_size
        return total * self.item_bytes

    @property
    def step_weight_bytes(self) -> int:
        """Weights that one decode step reads: of the input embedding only a few rows."""
        head = self.vocab_size * self.hidden_size
        return (self.num_layers * self.layer_parameters + head) * self.item_bytes

    @property
    def predictor_bytes(self) -> int:
        """What queries are predicted with: W_q and norm of every layer, the model's own."""
        width = self.num_qo_heads * self.head_dim + 1
        return self.num_layers * self.hidden_size * width * self.item_bytes

    def predictor_copy_bytes(self, dtype: str) -> int:
        """Return what a cache GPU keeps of that: a copy, or W_q in int8 with scales per row."""
        if dtype == "native":
            return self.predictor_bytes
        width = self.num_qo_heads * self.head_dim
        layer = width * (self.hidden_size + 4) + self.hidden_size * self.item_bytes
        return self.num_layers * layer

    @property
    def kv_layer_token_bytes(self) -> int:
        """K and V of one token in one layer, all KV heads."""
        return 2 * self.num_kv_heads * self.head_dim * self.item_bytes

    @property
    def kv_token_bytes(self) -> int:
        """K and V of one token, all layers."""
        return self.num_layers * self.kv_layer_token_bytes


BUILT_IN_SHAPES: Mapping[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape(
            name="qwen3-8b", num_layers=36, hidden_size=4096, num_qo_heads=32, num_kv_heads=8,
            head_dim=128, intermediate_size=12288, vocab_size=151936,
        ),
        ModelShape(
            name="llama-3.1-8b", num_layers=32, hidden_size=4096, num_qo_heads=32, num_kv_heads=8,
            head_dim=128, intermediate_size=14336, vocab_size=128256,
        ),
    )
}  # fmt: skip


def find_shape(model: str, *, dtype: str = "bfloat16") -> ModelShape:
    """Return the shape of a built-in name or of a model directory.

    Raises
    ------
    SettingsError
        If `model` is neither, listing the names, or `dtype` is unknown.
    UnsupportedModelError
        If the directory's model is not one that can be served.
    """
    if dtype not in ITEM_BYTES:
        raise SettingsError(f"dtype={dtype} is unknown; known: {', '.join(ITEM_BYTES)}")
    shape = BUILT_IN_SHAPES.get(model.lower())
    if shape is not None:
        return replace(shape, item_bytes=ITEM_BYTES[dtype])
    path = Path(model).expanduser()
    if not path.is_dir():
        raise SettingsError(
            f"model={model}: neither a model directory nor a built-in shape "
            f"({', '.join(BUILT_IN_SHAPES)}); nothing is downloaded"
        )
    return shape_of_config(read_config(path), name=path.resolve().name, dtype=dtype)


def shape_of_config(config: Mapping[str, Any], *, name: str, dtype: str) -> ModelShape:
    """Return the shape that a ``config.json`` describes.

    Parameters
    ----------
    config : Mapping[str, Any]
        Contents of ``config.json``.
    name : str
        Shown to the user.
    dtype : str
        Of weights and KV when served, a key of `ITEM_BYTES`.

    Raises
    ------
    UnsupportedModelError
        If a field is missing or the architecture is not a supported one.
    """
    architecture = str((config.get("architectures") or ["unknown"])[0])
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise UnsupportedModelError(
            f"architecture={architecture} is not supported; supported: "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    try:
        heads = int(config["num_attention_heads"])
        return ModelShape(
            name=name,
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=int(config["hidden_size"]),
            num_qo_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            intermediate_size=int(config["intermediate_size"]),
            vocab_size=int(config["vocab_size"]),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            item_bytes=ITEM_BYTES[dtype],
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UnsupportedModelError(
            f"model={name}: config.json lacks or garbles a field of the model's shape "
            f"({type(error).__name__}: {error})"
        ) from error
