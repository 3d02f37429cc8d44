# SPDX-License-Identifier: Apache-2.0
"""The models that can be served, by the architecture that their ``config.json`` names.

One list. The inference rank, the cache rank, the checks before a start, the plan and the table in
``docs/models.md`` all read it. An entry says where an architecture differs from Llama's; what an
entry does not say is read from SGLang's modules: biases, rotary embedding, epsilons.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from tandemkv.cache_rank.protocol.errors import UnsupportedModelError

SEE_DOCS = "see docs/models.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Names of the fields of ``config.json`` that describe a mixture of experts."""

    count: str
    per_token: str = "num_experts_per_tok"
    size: str = "moe_intermediate_size"
    """Experts of a layer, those that a token goes through, and their inner width."""
    shared_size: str = ""
    """Inner width of the experts that every token goes through; empty if there are none."""
    shared_count: str = ""
    """How many of `shared_size` there are; empty for one."""
    dense_layers: str = ""
    """First layers that have an MLP of `intermediate_size` instead; empty if there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How the decoder layers of one architecture make their queries."""

    name: str
    """In ``architectures`` of ``config.json``, and of SGLang's class."""
    models: str
    """Well-known models of it, for the documentation."""
    attention_norm: str | None = "input_layernorm"
    """Module of a decoder layer that normalises the residual stream before attention. None if
    attention reads the stream as it is."""
    other_norms: tuple[str, ...] = ("post_attention_layernorm",)
    """The layer's other norms of `hidden_size`."""
    query_norm: Literal["none", "head", "layer"] = "none"
    """An RMS norm of the query: of each head, or of all heads of the layer together. A model may
    switch it off in its configuration."""
    rotates: Literal["halves", "neighbours"] = "halves"
    """Which elements of a head RoPE turns together: ``i`` and ``i + r / 2`` (NeoX style), or
    ``2 i`` and ``2 i + 1``. `r` elements of a head are turned, the rest is left as it is."""
    scale_field: str = ""
    """Field of ``config.json`` that is the softmax scale; empty for ``1 / sqrt(head_dim)``."""
    window_counts: bool = False
    """Whether a `sliding_window` is one without `use_sliding_window`."""
    full_every: int = 0
    """Every so many layers one attends to the whole context, where ``config.json`` does not say
    which. The others are SGLang's. 0: all are alike."""
    others: Literal["sliding_attention", "linear_attention"] = "sliding_attention"
    """What the others do, as ``layer_types`` names it."""
    gates_heads: bool = False
    """Whether ``q_proj`` has, behind the rows of each head's query, as many of a gate."""
    has_sinks: bool = False
    """Whether each query head has a learned logit that takes a share of its softmax."""
    scales_rope: bool = True
    """Whether the layers' ``rotary_emb`` has the scaling of RoPE that attention uses."""
    ties_embeddings: bool = False
    """Whether input and output embedding are one where ``tie_word_embeddings`` is missing."""
    decoder_config: str = ""
    """Field of ``config.json`` that describes the decoder, where other parts of the model have
    fields of their own. Such a model is served for text: SGLang gives its layers three rows of
    positions, which are equal where a request has no images."""
    tensor_prefix: str = "model."
    """What the names of the decoder's tensors begin with in the checkpoint."""
    names_strategy: bool = False
    """Whether a GPU's SGLang must be told to keep extra states: on its own it does that for a list
    of architectures, which lacks this one."""
    splits_linear: bool = False
    """Whether the checkpoint has two tensors each where Qwen3-Next's linear attention has one: for
    qkv and z, and for b and a."""
    fused_qkv: bool = False
    fused_gate_up: bool = False
    """Whether the checkpoint has one tensor for q, k and v, or for gate and up."""
    mlp_matrices: int = 3
    """Matrices of an MLP: gate, up and down, or two."""
    experts: Experts | None = None


_QWEN3_NEXT = Architecture(
    name="Qwen3NextForCausalLM",
    models="Qwen3-Next-80B-A3B",
    query_norm="head",
    full_every=4,
    others="linear_attention",
    gates_heads=True,
    experts=Experts(count="num_experts", shared_size="shared_expert_intermediate_size"),
)
_QWEN3_5_MOE = replace(
    _QWEN3_NEXT,
    name="Qwen3_5MoeForConditionalGeneration",
    models="Qwen3.5-35B-A3B, 122B-A10B, 397B-A17B",
    splits_linear=True,
    decoder_config="text_config",
    tensor_prefix="model.language_model.",
)
_QWEN3_5_MOE_DECODER = replace(
    _QWEN3_NEXT,
    name="Qwen3_5MoeForCausalLM",
    models="Qwen3.5 with experts, the decoder alone",
    splits_linear=True,
    names_strategy=True,
)

ARCHITECTURES: Mapping[str, Architecture] = {
    entry.name: entry
    for entry in (
        Architecture(name="LlamaForCausalLM", models="Llama 2, 3, 3.1, 3.2 (text), 3.3; SmolLM2"),
        Architecture(
            name="MistralForCausalLM",
            models="Mistral 7B v0.2 and later, Nemo, Small",
            window_counts=True,
        ),
        Architecture(name="Qwen2ForCausalLM", models="Qwen1.5, Qwen2, Qwen2.5, QwQ"),
        Architecture(name="Qwen3ForCausalLM", models="Qwen3", query_norm="head"),
        Architecture(
            name="Qwen2MoeForCausalLM",
            models="Qwen1.5-MoE, Qwen2-57B-A14B",
            experts=Experts(count="num_experts", shared_size="shared_expert_intermediate_size"),
        ),
        Architecture(
            name="Qwen3MoeForCausalLM",
            models="Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
            query_norm="head",
            experts=Experts(count="num_experts"),
        ),
        Architecture(
            name="MixtralForCausalLM",
            models="Mixtral 8x7B, 8x22B",
            window_counts=True,
            experts=Experts(count="num_local_experts", size="intermediate_size"),
        ),
        Architecture(
            name="Glm4ForCausalLM",
            models="GLM-4-0414, GLM-Z1",
            other_norms=(
                "post_attention_layernorm",
                "post_self_attn_layernorm",
                "post_mlp_layernorm",
            ),
            rotates="neighbours",
            fused_gate_up=True,
        ),
        Architecture(
            name="Glm4MoeForCausalLM",
            models="GLM-4.5, 4.5-Air, 4.6, 4.7",
            query_norm="head",
            experts=Experts(
                count="n_routed_experts",
                shared_size="moe_intermediate_size",
                shared_count="n_shared_experts",
                dense_layers="first_k_dense_replace",
            ),
        ),
        Architecture(
            name="MiniMaxM2ForCausalLM",
            models="MiniMax-M2, M2.1",
            query_norm="layer",
            experts=Experts(count="num_local_experts", size="intermediate_size"),
        ),
        Architecture(
            name="Phi3ForCausalLM",
            models="Phi-4 (14B)",
            window_counts=True,
            fused_qkv=True,
            fused_gate_up=True,
        ),
        Architecture(
            name="GraniteForCausalLM",
            models="Granite 3.0 to 3.3",
            scale_field="attention_multiplier",
        ),
        Architecture(
            name="GraniteMoeForCausalLM",
            models="Granite 3.0 1B-A400M, 3B-A800M",
            scale_field="attention_multiplier",
            experts=Experts(count="num_local_experts", size="intermediate_size"),
        ),
        Architecture(
            name="Olmo2ForCausalLM",
            models="OLMo 2",
            attention_norm=None,
            other_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
            query_norm="layer",
        ),
        Architecture(
            name="OlmoeForCausalLM",
            models="OLMoE",
            query_norm="layer",
            experts=Experts(count="num_experts", size="intermediate_size"),
        ),
        Architecture(name="ArceeForCausalLM", models="AFM-4.5B", mlp_matrices=2),
        Architecture(
            name="ApertusForCausalLM",
            models="Apertus 8B, 70B",
            attention_norm="attention_layernorm",
            other_norms=("feedforward_layernorm",),
            query_norm="head",
            mlp_matrices=2,
        ),
        Architecture(name="Ernie4_5_ForCausalLM", models="ERNIE 4.5 0.3B", rotates="neighbours"),
        Architecture(
            name="Ernie4_5_MoeForCausalLM",
            models="ERNIE 4.5 21B-A3B, 300B-A47B (text)",
            rotates="neighbours",
            experts=Experts(
                count="moe_num_experts",
                per_token="moe_k",
                shared_size="moe_intermediate_size",
                shared_count="moe_num_shared_experts",
                dense_layers="moe_layer_start_index",
            ),
        ),
        Architecture(
            name="Gemma3ForCausalLM",
            models="Gemma 3 270M, 1B (text)",
            other_norms=(
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ),
            query_norm="head",
            scale_field="query_pre_attn_scalar",
            full_every=6,
            scales_rope=False,
            ties_embeddings=True,
        ),
        Architecture(
            name="GptOssForCausalLM",
            models="gpt-oss 20B, 120B",
            full_every=2,
            has_sinks=True,
            experts=Experts(count="num_local_experts", size="intermediate_size"),
        ),
        _QWEN3_NEXT,
        replace(
            _QWEN3_5_MOE,
            name="Qwen3_5ForConditionalGeneration",
            models="Qwen3.5 0.8B to 27B",
            experts=None,
        ),
        _QWEN3_5_MOE,
        replace(
            _QWEN3_5_MOE_DECODER,
            name="Qwen3_5ForCausalLM",
            models="Qwen3.5, the decoder alone",
            experts=None,
        ),
        _QWEN3_5_MOE_DECODER,
    )
}

_MLA = "its attention is over compressed K/V (MLA), not over K/V heads"
_SLIDING = "some of its layers attend to a sliding window"
_LINEAR = "some of its layers are linear attention or state-space layers"
REFUSED: Mapping[str, str] = {
    "DeepseekV2ForCausalLM": _MLA,
    "DeepseekV3ForCausalLM": _MLA,
    "DeepseekV32ForCausalLM": _MLA,
    "Glm4MoeLiteForCausalLM": _MLA,
    "KimiK25ForConditionalGeneration": _MLA,
    "MiniCPM3ForCausalLM": _MLA,
    "Gemma2ForCausalLM": f"it caps its attention logits, and {_SLIDING}",
    "Gemma3ForConditionalGeneration": _SLIDING,
    "Cohere2ForCausalLM": _SLIDING,
    "Exaone4ForCausalLM": _SLIDING,
    "Olmo3ForCausalLM": _SLIDING,
    "Llama4ForConditionalGeneration": "some of its layers attend in chunks",
    "FalconH1ForCausalLM": _LINEAR,
    "GraniteMoeHybridForCausalLM": _LINEAR,
    "JambaForCausalLM": _LINEAR,
    "KimiLinearForCausalLM": _LINEAR,
    "MambaForCausalLM": _LINEAR,
    "NemotronHForCausalLM": _LINEAR,
}
"""Architectures that are often asked for, and why they cannot be served."""


def find_architecture(name: str) -> Architecture:
    """Return the entry of an architecture.

    Raises `UnsupportedModelError`, with the reason, if it is known, and the architectures that are
    supported.
    """
    entry = ARCHITECTURES.get(name)
    if entry is not None:
        return entry
    reason = REFUSED.get(name, "it is not in the list of those whose queries can be predicted")
    raise UnsupportedModelError(
        f"architecture={name} is not supported: {reason}; supported: {', '.join(ARCHITECTURES)} "
        f"({SEE_DOCS}); serve this model with stock SGLang"
    )
