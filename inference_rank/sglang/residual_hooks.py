# SPDX-License-Identifier: Apache-2.0
"""Reads the residual stream of each decoder layer, and tells when logits are made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from tandemkv.cache_rank.protocol.errors import ContractError

from .live_model import architecture_of, layers_of

OnStream = Callable[[int, torch.Tensor], None]


def install_residual_hooks(model: Any, on_stream: OnStream) -> None:
    """Call `on_stream` with each decoder layer's number and residual stream ``[B, hidden]``.

    That is behind the layer's first norm, whose input it was, in memory that nothing writes to
    until the layer has attended: SGLang's norms add their two inputs in place. So it can be read
    beside the product with W_qkv. Where attention reads the stream as it is, it is what the layer
    gets. Raises `ContractError` if the model has no ``model.layers``, or a layer takes no
    ``hidden_states`` or lacks the norm that its architecture has. In a pass, if a norm is not
    called as a module, such as one that is fused with the all-reduce before it.
    """
    layers = layers_of(model)
    name = architecture_of(model).attention_norm
    for index, module in enumerate(layers):
        names = tuple(inspect.signature(module.forward).parameters)
        if "hidden_states" not in names:
            raise ContractError(
                f"{type(module).__name__} takes {names}, and no hidden_states; this model's "
                "decoder layers cannot be hooked, serve it with stock SGLang"
            )
        if name is None:
            _before(module, partial(on_stream, index), names)
        else:
            _read_behind_norm(index, module, name, on_stream)


def _read_behind_norm(layer: int, module: Any, name: str, on_stream: OnStream) -> None:
    norm = getattr(module, name, None)
    if norm is None:
        raise ContractError(
            f"{type(module).__name__} has no {name}; its residual stream cannot be read, serve "
            "this model with stock SGLang"
        )
    is_due = False  # others call the norm as well, such as what predicts queries

    def enter(_module: Any, _args: tuple[Any, ...]) -> None:
        nonlocal is_due
        is_due = True

    def normed(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        nonlocal is_due
        if is_due:
            is_due = False
            # What it returns alone may be a tuple as well: a norm that quantises.
            residual = args[1] if len(args) > 1 else kwargs.get("residual")
            on_stream(layer, args[0] if residual is None else output[1])

    def leave(_module: Any, _args: tuple[Any, ...], _output: Any) -> None:
        if is_due:
            raise ContractError(
                f"layer {layer}: SGLang has not called {name} as a module, so its residual stream "
                "is not known; disable fused norms in SGLang "
                "(--enforce-disable-flashinfer-allreduce-fusion)"
            )

    module.register_forward_pre_hook(enter)
    norm.register_forward_hook(normed, with_kwargs=True)
    module.register_forward_hook(leave)


def _before(module: Any, act: Callable[[torch.Tensor], None], names: Sequence[str]) -> None:
    """Call `act` with the ``hidden_states`` of a call of `module`; its arguments are `names`."""

    def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        act({**dict(zip(names, args)), **kwargs}["hidden_states"])  # noqa: B905

    module.register_forward_pre_hook(hook, with_kwargs=True)


def check_whole(layer: int, stream: torch.Tensor, num_requests: int) -> None:
    """Raise `ContractError` if `stream` ``[n, hidden]`` is not of all requests of a step."""
    if len(stream) != num_requests:
        raise ContractError(
            f"layer {layer}: SGLang gave it {len(stream)} of the {num_requests} requests of a "
            "step, so queries are known of these alone; pass SGLang no arguments that share "
            "out a batch over ranks or overlap its parts"
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
