# SPDX-License-Identifier: Apache-2.0
"""Random models of a few hundred kilobytes, one or more of each architecture in the list.

Weights are large enough that tokens depend on what is attended to. They are drawn and written by
transformers, whose modules in float64 are also what SGLang's streams and our queries are compared
with.
"""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from transformers.modeling_utils import AttentionInterface

from tandemkv.cache_rank.protocol.models.architectures import ARCHITECTURES

VOCABULARY = 512
LAYERS = 3
LENGTHS, STEPS = (80, 400), 12
"""Of the prompts, which are decoded together, and of what follows them."""
MODES = {"stock": "", "exact": "exact", "sparse": "look_ahead"}
"""Ways to run a model, with our policy; none with SGLang's own backend."""
_SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
    "tie_word_embeddings": False,
}  # fmt: skip
_PLAIN = {"rope_type": "default", "rope_theta": 1e4}
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 256,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512,
}  # fmt: skip
_HALF = _PLAIN | {"partial_rotary_factor": 0.5}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_WINDOWS = {
    "num_hidden_layers": 5, "head_dim": 32, "sliding_window": 48,
    "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
}  # fmt: skip
"""The first and the last layer have a window, which both prompts are longer than."""
_LAST_IS_FULL = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
"""Likewise, but that the last layer is a full one, as in gpt-oss and the least of Gemma 3."""
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_DELTA_NETS = {
    "num_hidden_layers": 5, "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"] * 2 + ["linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4,
}  # fmt: skip
"""The first and the last layer are gated delta nets."""
_MROPE = {"partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
_TEXT_OF_QWEN3_5 = {**_DELTA_NETS, "rope_parameters": _PLAIN | _MROPE}
_SHARED_EXPERTS = {
    **_EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
_VISION = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
    "num_position_embeddings": 16, "patch_size": 4,
}  # fmt: skip
_GRANITE = {
    "attention_multiplier": 0.11, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
    "logits_scaling": 2.0, "rope_parameters": _PLAIN,
}  # fmt: skip


class TinyModel(NamedTuple):
    """A model by its entry in the list, transformers' names, and what differs from Llama's."""

    architecture: str
    kind: str
    changes: dict[str, Any]
    written: Mapping[str, Any] = MappingProxyType({})
    """Fields of ``config.json`` that published checkpoints have and transformers does not write;
    the decoder's, where it has fields of its own."""
    stacks_experts: bool = False
    """Whether the experts of a layer are one tensor, as published."""


MODELS = {
    "llama": TinyModel("LlamaForCausalLM", "Llama", {"rope_parameters": _PLAIN}),
    "llama-3.1": TinyModel(
        "LlamaForCausalLM", "Llama", {"head_dim": 32, "rope_parameters": _LLAMA3}
    ),
    "mistral": TinyModel("MistralForCausalLM", "Mistral", {"head_dim": 32, "sliding_window": None}),
    "qwen2": TinyModel("Qwen2ForCausalLM", "Qwen2", {}),
    "qwen3": TinyModel("Qwen3ForCausalLM", "Qwen3", {"head_dim": 32}),
    "qwen3-yarn": TinyModel(
        "Qwen3ForCausalLM", "Qwen3", {"head_dim": 32, "rope_parameters": _YARN}
    ),
    "qwen2-moe": TinyModel(
        "Qwen2MoeForCausalLM",
        "Qwen2Moe",
        {**_EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    ),
    "qwen3-moe": TinyModel(
        "Qwen3MoeForCausalLM", "Qwen3Moe", {**_EXPERTS, "head_dim": 32, "moe_intermediate_size": 32}
    ),
    "mixtral": TinyModel("MixtralForCausalLM", "Mixtral", {**_LOCAL, "sliding_window": None}),
    "glm4": TinyModel(
        "Glm4ForCausalLM",
        "Glm4",
        {"head_dim": 32, "attention_bias": True, "rope_parameters": _HALF},
    ),
    "glm4-moe": TinyModel(
        "Glm4MoeForCausalLM",
        "Glm4Moe",
        {
            "head_dim": 32, "attention_bias": True, "use_qk_norm": True, "rope_parameters": _HALF,
            "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        },
    ),
    "minimax-m2": TinyModel(
        "MiniMaxM2ForCausalLM",
        "MiniMaxM2",
        {**_LOCAL, "head_dim": 32, "rope_parameters": _HALF},
        {
            "rotary_dim": 16, "use_qk_norm": True, "qk_norm_type": "per_layer",
            "scoring_func": "sigmoid", "use_routing_bias": True, "attn_type_list": [1] * LAYERS,
        },
    ),
    "phi-4": TinyModel("Phi3ForCausalLM", "Phi3", {"rope_parameters": _PLAIN}),
    "granite": TinyModel("GraniteForCausalLM", "Granite", _GRANITE),
    "granite-moe": TinyModel("GraniteMoeForCausalLM", "GraniteMoe", {**_GRANITE, **_LOCAL}),
    "olmo2": TinyModel("Olmo2ForCausalLM", "Olmo2", {"rope_parameters": _PLAIN}),
    "olmoe": TinyModel(
        "OlmoeForCausalLM",
        "Olmoe",
        {**_EXPERTS, "num_key_value_heads": 4, "rope_parameters": _PLAIN},
    ),
    "arcee": TinyModel("ArceeForCausalLM", "Arcee", {"head_dim": 32, "rope_parameters": _PLAIN}),
    "apertus": TinyModel(
        "ApertusForCausalLM", "Apertus", {"head_dim": 32, "rope_parameters": _PLAIN}
    ),
    "ernie4.5": TinyModel("Ernie4_5_ForCausalLM", "Ernie4_5", {"head_dim": 32}),
    "ernie4.5-moe": TinyModel(
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32,
            "moe_num_shared_experts": 1, "moe_layer_start_index": 1,
        },
    ),
    "gemma3": TinyModel(
        "Gemma3ForCausalLM",
        "Gemma3Text",
        {
            **_WINDOWS, **_LAST_IS_FULL, "query_pre_attn_scalar": 24, "tie_word_embeddings": True,
            "rope_parameters": {
                "sliding_attention": _PLAIN, "full_attention": _PLAIN | {"rope_theta": 1e6},
            },
        },
    ),
    "gpt-oss": TinyModel(
        "GptOssForCausalLM",
        "GptOss",
        {**_WINDOWS, **_LOCAL, "rope_parameters": _YARN | {"truncate": False}},
        {"swiglu_limit": 7.0},
    ),
    "qwen3-next": TinyModel(
        "Qwen3NextForCausalLM",
        "Qwen3Next",
        {
            **_DELTA_NETS, **_EXPERTS, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32, "rope_parameters": _HALF,
        },
        {
            "full_attention_interval": 2, "rope_theta": 1e4, "partial_rotary_factor": 0.5,
            "rope_scaling": None,
        },
    ),
    "qwen3.5": TinyModel(
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5",
        {**_TEXT_OF_QWEN3_5, "linear_num_value_heads": 6},
        {"full_attention_interval": 2},
    ),
    "qwen3.5-moe": TinyModel(
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5Moe",
        {**_TEXT_OF_QWEN3_5, **_SHARED_EXPERTS},
        {"full_attention_interval": 2},
        stacks_experts=True,
    ),
    "qwen3.5-text-yarn": TinyModel(
        "Qwen3_5ForCausalLM",
        "Qwen3_5Text",
        {**_DELTA_NETS, "rope_parameters": _YARN | _MROPE},
        {"full_attention_interval": 2},
    ),
    "qwen3.5-moe-text": TinyModel(
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeText",
        {**_TEXT_OF_QWEN3_5, **_SHARED_EXPERTS},
        {"full_attention_interval": 2},
    ),
}  # fmt: skip


FOR_GPUS: dict[str, Any] = {
    "vocab_size": 49152, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64,
    "max_position_embeddings": 8192, "num_experts": 4, "n_routed_experts": 4,
    "num_local_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 4, "moe_k": 4,
    "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "out_hidden_size": 256,
    "original_max_position_embeddings": 2048, "mrope_section": [4, 2, 2], "rotary_dim": 32,
}  # fmt: skip
"""What is larger for the kernels of a GPU, wherever it is. Each token goes to all experts: rounding
would have it go to others, and the text would be another one."""


def _on_gpus(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return `fields` with values of `FOR_GPUS`, at any depth."""
    return {
        key: _on_gpus(value) if isinstance(value, dict) else FOR_GPUS.get(key, value)
        for key, value in fields.items()
    }


def prompts() -> list[np.ndarray]:
    """Return the same tokens each time."""
    draw = np.random.default_rng(3)
    return [draw.integers(3, 500, length).astype(np.int32) for length in LENGTHS]


def _class_of(model: TinyModel) -> Any:
    """Return transformers' class; some have their configuration under another name."""
    purpose = model.architecture.rpartition("For")[2]
    return getattr(transformers, f"{model.kind.removesuffix('Text')}For{purpose}")


def _config_of(model: TinyModel, *, for_gpus: bool) -> Any:
    fields = {**_SHAPE, **model.changes}
    decoder = ARCHITECTURES[model.architecture].decoder_config
    parts = {decoder: fields, "vision_config": _VISION, "tie_word_embeddings": False}
    given = parts if decoder else fields
    return getattr(transformers, f"{model.kind}Config")(**(_on_gpus(given) if for_gpus else given))


def write_model(name: str, folder: Path, *, for_gpus: bool = False) -> None:
    """Write ``config.json`` and weights of a model, always the same; float32.

    With `for_gpus` it is bfloat16, of sizes that kernels of GPUs take.
    """
    chosen = MODELS[name]
    torch.manual_seed(0)
    model = _class_of(chosen)(_config_of(chosen, for_gpus=for_gpus))
    scale = 0.1 if for_gpus else 0.2
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key and parameter.dim() == 1:
                parameter.uniform_(0.6, 1.4)
            elif "sinks" in key:  # as SGLang keeps them, and large enough to matter
                parameter.uniform_(0.0, 6.0)
                parameter.copy_(parameter.bfloat16())
            elif key.endswith("A_log"):  # some states last for hundreds of tokens
                parameter.uniform_(-5.0, 0.0)
            else:
                parameter.normal_(0.0, scale)
    if for_gpus:
        model.to(torch.bfloat16)
    model.save_pretrained(folder, save_original_format=not chosen.stacks_experts)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"architectures": [chosen.architecture]}
    written = _on_gpus(chosen.written) if for_gpus else chosen.written
    config.get(ARCHITECTURES[chosen.architecture].decoder_config, config).update(written)
    path.write_text(json.dumps(config))


def write_tokenizer(folder: Path, source: Path) -> None:
    """Copy the tokenizer of `source`, and write what prepares images, which SGLang asks for."""
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(source / file, folder / file)
    if "vision_config" in json.loads((folder / "config.json").read_text()):
        transformers.Qwen3VLProcessor(
            image_processor=transformers.Qwen2VLImageProcessor(),
            tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
            video_processor=transformers.Qwen3VLVideoProcessor(),
        ).save_pretrained(folder)


QUERY_TOLERANCE = 5e-6
"""Of the largest element; float32 against float64. Found: 3e-7."""


class Reference:
    """A model in float64, by transformers' modules."""

    def __init__(self, name: str, folder: Path) -> None:
        AttentionInterface.register("captured", _attend)
        self._model = _class_of(MODELS[name]).from_pretrained(
            folder, dtype=torch.float64, attn_implementation="captured"
        )
        self._model.eval()
        self._decoder = getattr(self._model.model, "language_model", self._model.model)
        if hasattr(self._model, "set_experts_implementation"):
            self._model.set_experts_implementation("eager")

    @torch.no_grad()
    def streams(self, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what each layer is given ``[layers, n, hidden]``, and logits ``[n, vocab]``."""
        seen: list[torch.Tensor] = []
        hooks = [
            layer.register_forward_pre_hook(
                lambda _, args, kwargs: seen.append((args or (kwargs["hidden_states"],))[0][0]),
                with_kwargs=True,
            )
            for layer in self._decoder.layers
        ]
        logits = self._model(torch.tensor([tokens]), use_cache=False).logits[0]
        for hook in hooks:
            hook.remove()
        return torch.stack(seen), logits

    @torch.no_grad()
    def query(self, layer: int, stream: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return a layer's query ``[n, Hq, D]`` for a stream ``[n, hidden]`` of any tokens."""
        module, stream = self._decoder.layers[layer], stream.double()[None]
        kinds = getattr(self._decoder.config, "layer_types", None)
        rotary = self._decoder.rotary_emb
        by_kind = "layer_type" in inspect.signature(rotary.forward).parameters
        angles = rotary(
            stream, positions[None], **({"layer_type": kinds[layer]} if by_kind else {})
        )
        module(stream, position_embeddings=angles, position_ids=positions[None])
        found: torch.Tensor = module.self_attn.captured[0]
        return found.transpose(0, 1)

    def check_queries(self, sparse: Mapping[str, torch.Tensor]) -> None:
        """Fail unless the queries of `sparse` are those of its streams, found in whatever way."""
        for at, layer in enumerate(sparse["layers"].tolist()):
            want = self.query(layer, sparse["streams"][at], sparse["positions"][at])
            limit = QUERY_TOLERANCE * float(want.abs().max())
            for way in ("live", "mapped", "by_modules"):
                error = (sparse[way][at].double() - want).abs().max()
                assert float(error) < limit, (way, layer, at)


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: Any,
    *, scaling: float, sliding_window: int | None = None, s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attend causally, in float64 to the end, and keep the query ``[1, Hq, n, D]``."""
    module.captured = query
    window = None if sliding_window is None else sliding_window - 1
    out = attend_by_definition(
        query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), s_aux,
        scale=scaling, window=window,
    )  # fmt: skip
    return out[None], None


def attend_by_definition(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None,
    *, scale: float, window: int | None,
) -> torch.Tensor:  # fmt: skip
    """Return causal attention of the last m of n tokens ``[m, Hq, D]``, by one softmax.

    `window` tokens before its own are attended to; None: all. ``sinks [Hq]`` are logits of tokens
    that have no value.
    """
    group = query.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    logits = torch.einsum("mhd,nhd->hmn", query, keys) * scale
    own = torch.arange(len(keys) - len(query), len(keys))[:, None]
    behind = own - torch.arange(len(keys))
    hidden = behind < 0 if window is None else (behind < 0) | (behind > window)
    logits = logits.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        column = sinks.to(logits.dtype)[:, None, None].expand(-1, len(query), -1)
        logits = torch.cat((logits, column), -1)
    weights = logits.softmax(-1)[..., : len(keys)]
    return torch.einsum("hmn,nhd->mhd", weights, values)
