# SPDX-License-Identifier: Apache-2.0
"""Reads the residual stream at the entry of each decoder layer, and tells when logits are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tandemkv.cache_rank.protocol.errors import ContractError

LayerInput = Callable[[int, torch.Tensor, torch.Tensor | None], None]
LayerNormed = Callable[[int, torch.Tensor], None]


def install_residual_hooks(model: Any, on_layer_input: LayerInput) -> None:
    """Register a forward pre-hook on every decoder layer of an SGLang model.

    SGLang calls a layer of its Llama and Qwen models as ``layer(positions, hidden_states,
    forward_batch, residual)``; the residual stream is ``hidden_states + residual``, or
    ``hidden_states`` alone in the first layer, where `residual` is None.

    Raises
    ------
    ContractError
        If the model has no ``model.layers``.
    """
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is None:
        raise ContractError(
            f"{type(model).__name__} has no model.layers; this model's decoder layers cannot be "
            "hooked, serve it with stock SGLang"
        )

    def hook_for(layer: int) -> Callable[..., None]:
        def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            bound = dict(zip(("positions", "hidden_states", "forward_batch", "residual"), args))  # noqa: B905
            bound.update(kwargs)
            if getattr(bound["hidden_states"], "_sglang_needs_allreduce_fusion", False):
                raise ContractError(
                    "SGLang fuses a layer's all-reduce into the next layer's norm, so its input "
                    "is not the residual stream; disable that fusion in SGLang"
                )
            on_layer_input(layer, bound["hidden_states"], bound["residual"])

        return hook

    for index, module in enumerate(layers):
        module.register_forward_pre_hook(hook_for(index), with_kwargs=True)


def install_norm_hooks(model: Any, on_normed: LayerNormed) -> None:
    """Register a forward hook on the first norm of every decoder layer of an SGLang model.

    It gets the residual stream ``[B, hidden]`` that was normalised, in memory that nothing writes
    to until the layer has attended: SGLang's norms add their two inputs in place. A norm that is
    fused with the all-reduce before it is not called as a module, and no hook with it.

    Raises
    ------
    ContractError
        If a layer has no ``input_layernorm``.
    """

    def hook_for(layer: int) -> Callable[..., None]:
        def hook(_module: Any, args: tuple[Any, ...], output: Any) -> None:
            on_normed(layer, output[1] if isinstance(output, tuple) else args[0])

        return hook

    for index, module in enumerate(model.model.layers):
        norm = getattr(module, "input_layernorm", None)
        if norm is None:
            raise ContractError(
                f"{type(module).__name__} has no input_layernorm; a second GPU cannot select for "
                "this model, serve it with --cache-ranks 0"
            )
        norm.register_forward_hook(hook_for(index))


def install_logits_hook(model: Any, on_logits: Callable[[], None]) -> None:
    """Call `on_logits` whenever an SGLang model has queued its logits, the last of a forward pass.

    Raises
    ------
    ContractError
        If the model has no ``logits_processor``.
    """
    processor = getattr(model, "logits_processor", None)
    if processor is None:
        raise ContractError(
            f"{type(model).__name__} has no logits_processor, so nobody knows when a step ends; "
            "serve this model with --late-layers 0"
        )

    def hook(_module: Any, _args: tuple[Any, ...], _output: Any) -> None:
        on_logits()

    processor.register_forward_hook(hook)
