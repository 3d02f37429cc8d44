# SPDX-License-Identifier: Apache-2.0
"""Find the adapter of an architecture."""

from __future__ import annotations

from importlib import import_module

from tandemkv.cache_rank.protocol.errors import UnsupportedModelError

from .base import ModelAdapter

_HERE = "tandemkv.cache_rank.model_adapters"
ADAPTERS = {
    "LlamaForCausalLM": f"{_HERE}.llama:LlamaAdapter",
    "MistralForCausalLM": f"{_HERE}.llama:LlamaAdapter",
    "Qwen2ForCausalLM": f"{_HERE}.qwen2:Qwen2Adapter",
    "Qwen3ForCausalLM": f"{_HERE}.qwen3:Qwen3Adapter",
}


def find_adapter(architecture: str) -> type[ModelAdapter]:
    """Return the adapter class of `architecture`.

    Raises
    ------
    UnsupportedModelError
        If there is none.
    """
    path = ADAPTERS.get(architecture)
    if path is None:
        raise UnsupportedModelError(
            f"architecture={architecture} has no adapter; there are {', '.join(sorted(ADAPTERS))}"
        )
    module_name, _, class_name = path.partition(":")
    found: type[ModelAdapter] = getattr(import_module(module_name), class_name)
    return found
