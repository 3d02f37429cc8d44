# SPDX-License-Identifier: Apache-2.0
"""Shapes of models: how many bytes their weights and their KV take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tandemkv.cache_rank.protocol.errors import SettingsError, UnsupportedModelError
from tandemkv.cache_rank.protocol.models.architectures import Architecture
from tandemkv.cache_rank.protocol.models.attention_config import (
    check_attention,
    linear_layers,
    windowed_layers,
)
from tandemkv.cache_rank.protocol.models.model_spec import architecture_of_config, read_config
from tandemkv.cache_rank.protocol.models.weight_formats import (
    WeightFormat,
    format_of,
    read_weight_format,
)

_SAME_COUNT = ("num_experts", "num_local_experts")
"""Two names of one number: some checkpoints have the one, and transformers writes the other."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """The mixture of experts in the MLP of a layer."""

    count: int
    per_token: int
    """Experts of a layer, and those that a token goes through."""
    size: int
    shared_size: int = 0
    """Inner width of one of them, and of all that every token goes through together."""
    num_dense_layers: int = 0
    """First layers of the model, which have an MLP of the model's `intermediate_size` instead."""

    def read_by(self, batch: int) -> float:
        """Return how many experts of a layer a step of `batch` tokens reads, as if by chance."""
        return self.count * (1 - (1 - self.per_token / self.count) ** batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """A layer of linear attention: a gated delta net, with heads of keys and of values."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    """Heads, and their sizes."""
    kernel: int
    """Tokens that its convolution takes together."""
    state_item_bytes: int = 4
    """Of an element of the recurrent state."""
    is_split: bool = False
    """Whether qkv and z, and b and a, are tensors of their own."""

    @property
    def value_width(self) -> int:
        """Elements of the values of a token, and of the gate of its output."""
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Elements of a token that are convolved: query, key and value."""
        return 2 * self.num_key_heads * self.key_dim + self.value_width

    def tensors(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of its tensors in Hugging Face's files, by name."""
        if self.is_split:
            rows = {"qkv": self.channels, "z": self.value_width}
            rows |= dict.fromkeys("ba", self.num_value_heads)
        else:
            rows = {"qkvz": self.channels + self.value_width, "ba": 2 * self.num_value_heads}
        return {
            **{f"in_proj_{part}.weight": (count, hidden_size) for part, count in rows.items()},
            "conv1d.weight": (self.channels, 1, self.kernel),
            "A_log": (self.num_value_heads,),
            "dt_bias": (self.num_value_heads,),
            "norm.weight": (self.value_dim,),
            "out_proj.weight": (hidden_size, self.value_width),
        }

    @property
    def state_bytes(self) -> int:
        """What SGLang keeps of a request in one layer: its state, and what is convolved next."""
        state = self.value_width * self.key_dim * self.state_item_bytes
        return state + self.channels * (self.kernel - 1) * ITEM_BYTES["bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder with grouped-query attention that matter for a plan.

    `item_bytes` is the size of one weight, and of one K or V element unless `kv_item_bytes` says
    otherwise; `mlp_matrices` is 3 with a gate, else 2; `experts` is None for a dense model.
    `matrix_bits` is the size of an element of the layers' matrices if those are quantised, else 0;
    their norms and routers are counted with them, embeddings and output are not quantised, nor is
    attention in `plain_attention` of the layers.
    `windowed_layers` attend to `window` tokens, and `linear_layers`, each a `linear`, have a state
    in place of K and V; nothing is selected for either. `gates_heads`: whether q has a gate of its
    size. `max_context`: tokens that its ``config.json`` allows a request, 0 if it does not say.
    `vision_parameters` read images; SGLang loads them, text does not go through them, and they are
    not quantised.
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
    mlp_matrices: int = 3
    experts: ExpertShape | None = None
    kv_item_bytes: int | None = None
    matrix_bits: float = 0.0
    plain_attention: int = 0
    windowed_layers: tuple[int, ...] = ()
    window: int = 0
    linear_layers: tuple[int, ...] = ()
    linear: LinearShape | None = None
    gates_heads: bool = False
    max_context: int = 0
    vision_parameters: int = 0

    def with_kv_dtype(self, kv_dtype: str) -> ModelShape:
        """Return the shape with K and V of a dtype, as ``cache.kv_dtype`` names it."""
        return self if kv_dtype == "auto" else replace(self, kv_item_bytes=1)

    @property
    def key_bytes(self) -> int:
        """One key of one KV head."""
        return self.head_dim * (self.kv_item_bytes or self.item_bytes)

    @property
    def is_quantised(self) -> bool:
        """Whether the layers' matrices are."""
        return self.matrix_bits > 0

    @property
    def copies_queries(self) -> bool:
        """Whether W_q is held once more where queries are predicted: dequantised, or ungated."""
        layers = self.num_layers - len(self.linear_layers)
        return self.gates_heads or (self.is_quantised and self.plain_attention < layers)

    @property
    def other_layers(self) -> tuple[int, ...]:
        """Layers that do not attend to the whole context."""
        return (*self.windowed_layers, *self.linear_layers)

    @property
    def num_full_layers(self) -> int:
        """Layers that attend to the whole context."""
        return self.num_layers - len(self.other_layers)

    @property
    def state_bytes(self) -> int:
        """What one request has in all layers of linear attention, however long it is."""
        return 0 if self.linear is None else len(self.linear_layers) * self.linear.state_bytes

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer with K and V besides its MLP: q, k, v, o and two norms."""
        qo = (3 if self.gates_heads else 2) * self.hidden_size * self.num_qo_heads * self.head_dim
        kv = 2 * self.hidden_size * self.num_kv_heads * self.head_dim
        return qo + kv + 2 * self.hidden_size

    @property
    def weight_bytes(self) -> int:
        """All weights."""
        embeddings = (1 if self.tied_embeddings else 2) * self.vocab_size * self.hidden_size
        others = embeddings + self.hidden_size + self.vision_parameters
        return (
            self._layer_bytes(self.experts.count if self.experts else 0) + others * self.item_bytes
        )

    def step_weight_bytes(self, batch: int) -> int:
        """Return the bytes of weights that one decode step of `batch` requests reads.

        Of the input embedding these are only a few rows, which do not count, and of experts those
        that `batch` tokens go through.
        """
        head = self.vocab_size * self.hidden_size
        read = self.experts.read_by(batch) if self.experts else 0
        return self._layer_bytes(read) + head * self.item_bytes

    @property
    def mlp_width(self) -> int:
        """Inner width of the MLPs that one token goes through in a layer, the widest of them."""
        experts = self.experts
        if experts is None:
            return self.intermediate_size
        own = experts.per_token * experts.size + experts.shared_size
        return max(own, self.intermediate_size) if experts.num_dense_layers else own

    def _layer_bytes(self, experts_read: float) -> int:
        """Bytes of all layers, with so many experts in each that has some.

        With them are counted the router, and what all tokens go through.
        """
        matrix, experts = self.mlp_matrices * self.hidden_size, self.experts
        num_dense = self.num_layers if experts is None else experts.num_dense_layers
        total: float = num_dense * matrix * self.intermediate_size
        tensors = {} if self.linear is None else self.linear.tensors(self.hidden_size)
        own = sum(math.prod(shape) for shape in tensors.values()) + 2 * self.hidden_size
        total += len(self.linear_layers) * own
        total += (self.num_layers - len(self.linear_layers)) * self.attention_parameters
        if experts is not None:
            read = matrix * (experts_read * experts.size + experts.shared_size)
            total += (self.num_layers - num_dense) * (read + experts.count * self.hidden_size)
        if self.is_quantised:
            plain = self.plain_attention * self.attention_parameters
            return round((total - plain) * self.matrix_bits / 8) + plain * self.item_bytes
        return round(total) * self.item_bytes

    @property
    def predictor_bytes(self) -> int:
        """What queries are predicted with: W_q, as it is multiplied, and norm of full layers."""
        width = self.num_qo_heads * self.head_dim + 1
        return self.num_full_layers * self.hidden_size * width * self.item_bytes

    def predictor_copy_bytes(self, dtype: str) -> int:
        """Return what a cache GPU keeps of that: a copy, or W_q in int8 with scales per row."""
        if dtype == "native":
            return self.predictor_bytes
        width = self.num_qo_heads * self.head_dim
        layer = width * (self.hidden_size + 4) + self.hidden_size * self.item_bytes
        return self.num_full_layers * layer

    @property
    def kv_layer_token_bytes(self) -> int:
        """K and V of one token in one layer, all KV heads."""
        return 2 * self.num_kv_heads * self.key_bytes

    @property
    def kv_token_bytes(self) -> int:
        """K and V of one token, all layers."""
        return (self.num_layers - len(self.linear_layers)) * self.kv_layer_token_bytes


_CONFIG: Mapping[str, Any] = {
    "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
_QWEN3_8B = {
    **_CONFIG, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
    "intermediate_size": 12288, "max_position_embeddings": 40960, "num_hidden_layers": 36,
    "rope_theta": 1e6, "vocab_size": 151936,
}  # fmt: skip
BUILT_IN_CONFIGS: Mapping[str, dict[str, Any]] = {
    "qwen3-8b": _QWEN3_8B,
    "qwen3-8b-fp8": {
        **_QWEN3_8B,
        "quantization_config": {
            "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        },
    },
    "qwen3-30b-a3b": {
        **_QWEN3_8B, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    "llama-3.1-8b": {
        **_CONFIG, "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "intermediate_size": 14336, "max_position_embeddings": 131072, "num_hidden_layers": 32,
        "rope_theta": 5e5, "vocab_size": 128256,
    },
}  # fmt: skip
"""What ``config.json`` says of models that `plan` and `bench decode` know by name."""


def is_built_in(model: str) -> bool:
    """Whether `model` names a built-in shape; a directory of that name comes first."""
    return model.lower() in BUILT_IN_CONFIGS and not Path(model).expanduser().is_dir()


def find_shape(
    model: str, *, dtype: str = "bfloat16", names: Iterable[str] = BUILT_IN_CONFIGS
) -> ModelShape:
    """Return the shape of a model directory, or of a built-in name if there is no such directory.

    Raises `SettingsError` if `model` is neither, listing `names`, or `dtype` is unknown;
    `UnsupportedModelError` if the directory's model is not one that can be served.
    """
    if dtype not in ITEM_BYTES:
        raise SettingsError(f"dtype={dtype} is unknown; known: {', '.join(ITEM_BYTES)}")
    path = Path(model).expanduser()
    if is_built_in(model):
        name, config = model.lower(), BUILT_IN_CONFIGS[model.lower()]
        return shape_of_config(config, name=name, dtype=dtype, weights=format_of(config))
    if not path.is_dir():
        raise SettingsError(
            f"model={model}: neither a model directory nor one of {', '.join(names)}; "
            "nothing is downloaded"
        )
    return shape_of_model(path, name=path.resolve().name, dtype=dtype)


def find_config(model: str) -> Mapping[str, Any]:
    """Return ``config.json`` of what `find_shape` takes; raises as that does."""
    find_shape(model)
    if is_built_in(model):
        return BUILT_IN_CONFIGS[model.lower()]
    return read_config(Path(model).expanduser())


def shape_of_model(model_dir: Path, *, name: str, dtype: str) -> ModelShape:
    """Return the shape of a model directory; arguments and errors as of `shape_of_config`."""
    config = read_config(model_dir)
    weights = read_weight_format(model_dir, config)
    return shape_of_config(config, name=name, dtype=dtype, weights=weights)


def plain_attention(config: Mapping[str, Any], weights: WeightFormat) -> int:
    """Return in how many layers with K/V the projections of attention are not quantised."""
    entry = architecture_of_config(config)
    projection = "qkv_proj" if entry.fused_qkv else "q_proj"
    layers = set(range(int(config["num_hidden_layers"]))) - set(linear_layers(config, entry))
    names = (f"{entry.tensor_prefix}layers.{layer}.self_attn.{projection}" for layer in layers)
    return sum(not weights.converts(name) for name in names)


def shape_of_config(
    config: Mapping[str, Any], *, name: str, dtype: str, weights: WeightFormat | None = None
) -> ModelShape:
    """Return the shape that a ``config.json`` describes, its matrices quantised as `weights` are.

    `name` is shown to the user; `dtype`, a key of `ITEM_BYTES`, is that of weights and KV when
    served. Raises `UnsupportedModelError` if a field is missing or the architecture is not a
    supported one.
    """
    entry = architecture_of_config(config)
    check_attention(config, entry, name=name)
    try:
        heads = int(config["num_attention_heads"])
        return ModelShape(
            name=name,
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=int(config["hidden_size"]),
            num_qo_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            intermediate_size=_dense_size(config, entry),
            vocab_size=int(config["vocab_size"]),
            tied_embeddings=bool(config.get("tie_word_embeddings", entry.ties_embeddings)),
            item_bytes=ITEM_BYTES[dtype],
            mlp_matrices=entry.mlp_matrices,
            experts=_experts(config, entry),
            matrix_bits=weights.bits if weights else 0.0,
            plain_attention=plain_attention(config, weights) if weights else 0,
            windowed_layers=windowed_layers(config, entry),
            window=int(config.get("sliding_window") or 0) if entry.full_every else 0,
            linear_layers=linear_layers(config, entry),
            linear=linear_shape(config, entry),
            gates_heads=entry.gates_heads,
            max_context=int(config.get("max_position_embeddings") or 0),
            vision_parameters=_vision_parameters(config, entry),
        )
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise UnsupportedModelError(
            f"model={name}: config.json lacks or garbles a field of the model's shape "
            f"({type(error).__name__}: {error})"
        ) from error


def _vision_parameters(config: Mapping[str, Any], entry: Architecture) -> int:
    """Return the parameters of what reads images, a transformer over patches of them."""
    if not entry.decoder_config:
        return 0
    own = config["vision_config"]
    hidden, inner = int(own["hidden_size"]), int(own["intermediate_size"])
    volume = int(own["temporal_patch_size"]) * int(own["patch_size"]) ** 2
    patches = int(own["in_channels"]) * volume + 1 + int(own["num_position_embeddings"])
    block = 4 * hidden * (hidden + 1) + 2 * hidden * inner + inner + 5 * hidden
    merged, out = hidden * int(own["spatial_merge_size"]) ** 2, int(own["out_hidden_size"])
    merger = merged * (merged + 1) + (merged + 1) * out + 2 * hidden
    return hidden * patches + int(own["depth"]) * block + merger


def linear_shape(config: Mapping[str, Any], entry: Architecture) -> LinearShape | None:
    """Return what a ``config.json`` says of linear attention; None if the model has none.

    Raises `UnsupportedModelError` if a field is missing or garbled.
    """
    if entry.others != "linear_attention":
        return None
    try:
        return LinearShape(
            num_key_heads=int(config["linear_num_key_heads"]),
            num_value_heads=int(config["linear_num_value_heads"]),
            key_dim=int(config["linear_key_head_dim"]),
            value_dim=int(config["linear_value_head_dim"]),
            kernel=int(config["linear_conv_kernel_dim"]),
            state_item_bytes=ITEM_BYTES[str(config.get("mamba_ssm_dtype") or "float32")],
            is_split=entry.splits_linear,
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UnsupportedModelError(
            "config.json lacks or garbles a field of the shape of linear attention "
            f"({type(error).__name__}: {error})"
        ) from error


def _dense_size(config: Mapping[str, Any], entry: Architecture) -> int:
    """Inner width of an MLP; a model all of whose layers have experts need not name one."""
    size = config.get("intermediate_size")
    if size is None and entry.experts is not None and not entry.experts.dense_layers:
        return 0
    return int(config["intermediate_size"])


def _experts(config: Mapping[str, Any], entry: Architecture) -> ExpertShape | None:
    names = entry.experts
    if names is None:
        return None
    field = names.count
    if field not in config and field in _SAME_COUNT:
        field = next((name for name in _SAME_COUNT if name in config), field)
    count, per_token = int(config[field]), int(config[names.per_token])
    if not 0 < per_token <= count:
        raise ValueError(f"{names.per_token}={per_token} of {field}={count} experts")
    shared = int(config[names.shared_size]) if names.shared_size else 0
    if names.shared_count:
        shared *= int(config.get(names.shared_count) or 0)
    dense = int(config.get(names.dense_layers) or 0) if names.dense_layers else 0
    return ExpertShape(
        count=count,
        per_token=per_token,
        size=int(config[names.size]),
        shared_size=shared,
        num_dense_layers=min(dense, int(config["num_hidden_layers"])),
    )
