# SPDX-License-Identifier: Apache-2.0
"""Reads the residual stream at the entry of each decoder layer, and tells when logits are made."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tandemkv.cache_rank.protocol.errors import ContractError

from .live_model import architecture_of, layers_of

LayerInput = Callable[[int, torch.Tensor, torch.Tensor | None], None]
LayerNormed = Callable[[int, torch.Tensor], None]


def put_stream(
    out: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
) -> None:
    """Write the residual stream, ``hidden_states + residual``, to the first rows of `out`.

    The decoder layer adds and normalises its inputs in place, so what is read beside it must be a
    copy.
    """
    out = out[: len(hidden_states)]
    if residual is None:
        out.copy_(hidden_states)
    else:
        torch.add(hidden_states, residual, out=out)


def install_residual_hooks(model: Any, on_layer_input: LayerInput) -> None:
    """Register hooks on every decoder layer of an SGLang model.

    SGLang gives a layer its `hidden_states`, and maybe a `residual`. The residual stream is their
    sum, or `hidden_states` alone in the first layer, where `residual` is None, and in models that
    do not normalise it before attention. Layers that normalise it and take no `residual` get a part
    of it, and the rest is in SGLang's forward batch (0.5.21 on): there it is read behind the norm.
    Raises `ContractError` if the model has no ``model.layers``, or a layer takes no
    ``hidden_states`` or lacks the norm that its architecture has. In a pass, if a norm is not
    called as a module.
    """

    def read(layer: int, given: dict[str, Any]) -> None:
        if getattr(given["hidden_states"], "_sglang_needs_allreduce_fusion", False):
            raise ContractError(
                "SGLang fuses a layer's all-reduce into the next layer's norm, so its input "
                "is not the residual stream; disable that fusion in SGLang "
                "(--enforce-disable-flashinfer-allreduce-fusion)"
            )
        on_layer_input(layer, given["hidden_states"], given.get("residual"))

    for index, module in enumerate(layers_of(model)):
        names = tuple(inspect.signature(module.forward).parameters)
        if "hidden_states" not in names:
            raise ContractError(
                f"{type(module).__name__} takes {names}, and no hidden_states; this model's "
                "decoder layers cannot be hooked, serve it with stock SGLang"
            )
        norm = architecture_of(model).attention_norm
        if "residual" in names or norm is None:
            _before(module, partial(read, index))
        else:
            _read_behind_norm(index, module, norm, on_layer_input)


def _read_behind_norm(layer: int, module: Any, name: str, on_layer_input: LayerInput) -> None:
    norm = getattr(module, name, None)
    if norm is None:
        raise _lacks(module, name)
    is_due = False  # others call the norm as well, such as what predicts queries

    def enter(_module: Any, _args: tuple[Any, ...]) -> None:
        nonlocal is_due
        is_due = True

    def on_normed(_layer: int, stream: torch.Tensor) -> None:
        nonlocal is_due
        if is_due:
            is_due = False
            on_layer_input(layer, stream, None)

    def leave(_module: Any, _args: tuple[Any, ...], _output: Any) -> None:
        if is_due:
            raise ContractError(
                f"layer {layer}: SGLang has not called {name} as a module, so its residual stream "
                "is not known; disable fused norms in SGLang "
                "(--enforce-disable-flashinfer-allreduce-fusion)"
            )

    module.register_forward_pre_hook(enter)
    norm.register_forward_hook(_behind_norm(layer, on_normed))
    module.register_forward_hook(leave)


def install_norm_hooks(model: Any, on_normed: LayerNormed) -> None:
    """Register a hook on the first norm of every decoder layer of an SGLang model.

    It gets the residual stream ``[B, hidden]`` that was normalised, in memory that nothing writes
    to until the layer has attended: SGLang's norms add their two inputs in place. A norm that is
    fused with the all-reduce before it is not called as a module, and no hook with it. Where
    attention reads the stream as it is, the hook is on the attention, before it. Raises
    `ContractError` if a layer lacks the norm that its architecture has.
    """

    def read(layer: int, given: dict[str, Any]) -> None:
        on_normed(layer, given["hidden_states"])

    name = architecture_of(model).attention_norm
    for index, module in enumerate(layers_of(model)):
        if name is None:
            attention = getattr(module, "self_attn", None)
            if attention is None:
                raise _lacks(module, "self_attn")
            _before(attention, partial(read, index))
            continue
        norm = getattr(module, name, None)
        if norm is None:
            raise _lacks(module, name)
        norm.register_forward_hook(_behind_norm(index, on_normed))


def _behind_norm(layer: int, on_normed: LayerNormed) -> Callable[..., None]:
    def hook(_module: Any, args: tuple[Any, ...], output: Any) -> None:
        on_normed(layer, output[1] if isinstance(output, tuple) else args[0])

    return hook


def _before(module: Any, act: Callable[[dict[str, Any]], None]) -> None:
    """Call `act` with the arguments of each call of `module`, by name."""
    names = tuple(inspect.signature(module.forward).parameters)

    def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        act({**dict(zip(names, args)), **kwargs})  # noqa: B905

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _lacks(module: Any, name: str) -> ContractError:
    return ContractError(
        f"{type(module).__name__} has no {name}; a second GPU cannot select for this model, serve "
        "it with --cache-ranks 0"
    )


def install_logits_hook(model: Any, on_logits: Callable[[], None]) -> None:
    """Call `on_logits` whenever an SGLang model has queued its logits, the last of a forward pass.

    Raises `ContractError` if the model has no ``logits_processor``.
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
