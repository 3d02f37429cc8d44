# SPDX-License-Identifier: Apache-2.0
"""The rotary embedding that a model's configuration describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tandemkv.cache_rank.policies.base import Rotary
from tandemkv.cache_rank.protocol.errors import UnsupportedModelError
from tandemkv.cache_rank.protocol.models.model_spec import architecture_of_config, read_config

_LENGTH_DEPENDENT = ("dynamic", "longrope")
_SELECTING = "full_attention"
"""Kind of the layers that select, where a model turns the queries of its kinds differently."""


def read_rotary(model_dir: Path) -> Rotary:
    """Return the inverse frequencies and the factor, as transformers computes them.

    They are those of the layers without a window where others have their own.

    Raises `UnsupportedModelError` if the frequencies depend on the length of the request, or the
    kind is unknown.
    """
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    entry = architecture_of_config(read_config(model_dir))
    config: Any = AutoConfig.from_pretrained(model_dir)
    if entry.decoder_config:
        config = getattr(config, entry.decoder_config)
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    parameters = dict(parameters or {})
    by_kind = {}
    if _SELECTING in parameters:  # Gemma 3: layers with a window have another base
        by_kind = {"layer_type": _SELECTING}
        parameters = dict(parameters[_SELECTING])
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    if kind in _LENGTH_DEPENDENT:
        raise UnsupportedModelError(
            f"rope_type={kind} changes with the length of the request, so keys cannot be cached "
            "after RoPE for later queries; set another one in config.json"
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if kind == "default":
        theta = parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 1e4
        dim = _rotary_dim(config, parameters, head_dim)
        exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        inv_freq, scaling = 1.0 / float(theta) ** exponent, 1.0
    elif kind in ROPE_INIT_FUNCTIONS:
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **by_kind)
    else:
        known = ", ".join(sorted(ROPE_INIT_FUNCTIONS))
        raise UnsupportedModelError(f"rope_type={kind} is unknown; known: default, {known}")
    return _in_halves(inv_freq.float(), float(scaling), head_dim, rotates=entry.rotates)


def _rotary_dim(config: Any, parameters: dict[str, Any], head_dim: int) -> int:
    """Return how many elements of a head are turned.

    `rotary_dim` is MiniMax's field, `partial_rotary_factor` everybody else's.
    """
    given = getattr(config, "rotary_dim", None)
    if given is not None:
        return int(given)
    factor = parameters.get("partial_rotary_factor")
    if factor is None:
        factor = getattr(config, "partial_rotary_factor", None)
    return int(head_dim * (1.0 if factor is None else factor))


def _in_halves(inv_freq: torch.Tensor, scaling: float, head_dim: int, *, rotates: str) -> Rotary:
    """Return the rotation as one of the halves of a head whose elements are put in another order.

    What is not turned has frequency 0. It must not be scaled either: then nothing is, which cancels
    where queries are turned back and forth.
    """
    turned = len(inv_freq)
    if turned == head_dim // 2 and rotates == "halves":
        return Rotary(inv_freq, scaling)
    pairs = torch.arange(head_dim).view(-1, 2)  # of neighbours
    if rotates == "halves":
        pairs[:turned, 0] = torch.arange(turned)
        pairs[:turned, 1] = turned + torch.arange(turned)
    padded = torch.nn.functional.pad(inv_freq, (0, head_dim // 2 - turned))
    is_whole = turned == head_dim // 2
    return Rotary(padded, scaling if is_whole else 1.0, order=pairs.T.flatten())
