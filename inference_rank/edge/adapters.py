# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters that a request names: in ``lora_path``, or as ``model: base:adapter``."""

from __future__ import annotations

from typing import Any

from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings

from .limits import Adapters, Limits
from .refusal import shown
from .values import fault, wrong


def adapters_of(args: Any, selection: SelectionSettings) -> Adapters | None:
    """Return the adapters of an SGLang server, and why they are not served; None if it has none.

    `args` are the server's arguments, resolved.
    """
    if not args.enable_lora:
        return None
    names = frozenset(str(adapter.lora_name) for adapter in args.lora_paths or ())
    if not selection.declared.predicts_from_hidden:
        return Adapters(names=names)
    return Adapters(
        names=names,
        unserved=f"policy={selection.policy} predicts queries from W_q of the model, which an "
        "adapter changes; send the request without one, or start the server with a policy that "
        "predicts no query from the residual stream (--policy exact, streaming, last_query or "
        "quest)",
    )


def lora_path(name: str, value: Any, limits: Limits) -> None:
    """Check the field that names one adapter for all prompts of a request."""
    if type(value) is not str or not value:
        raise wrong(name, value, "the name of one adapter")
    if limits.adapters is None:
        raise fault(
            name,
            f"{name}={shown(value)}: this server has no adapters (it was started without "
            "`-- --lora-paths`); remove the field",
            "unknown_parameter",
        )
    _check_adapter(name, value, limits.adapters)


def model_and_adapter(model: str, limits: Limits) -> str:
    """Return the model of ``base:adapter``, as SGLang reads that name, and check the adapter.

    Raises `RequestRefusedError`: 400 if the adapter does not exist or is not served.
    """
    if limits.adapters is None or ":" not in model:
        return model
    base, _, adapter = (part.strip() for part in model.partition(":"))
    if adapter:
        _check_adapter("model", adapter, limits.adapters)
    return base


def _check_adapter(name: str, adapter: str, adapters: Adapters) -> None:
    if adapter not in adapters.names:
        known = ", ".join(sorted(adapters.names)) or "none"
        said = f"{name}: this server has no adapter {shown(adapter)}; it has {shown(known)}"
        raise fault(name, said, "adapter_not_found")
    if adapters.unserved:
        said = f"{name}: adapter {shown(adapter)} is not served: {adapters.unserved}"
        raise fault(name, said, "adapter_not_served")
