# SPDX-License-Identifier: Apache-2.0
"""The rotary embedding that a model's configuration describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tandemkv.cache_rank.policies.base import Rotary
from tandemkv.cache_rank.protocol.errors import UnsupportedModelError

_LENGTH_DEPENDENT = ("dynamic", "longrope")


def read_rotary(model_dir: Path) -> Rotary:
    """Return the inverse frequencies and the factor, as transformers computes them.

    Raises
    ------
    UnsupportedModelError
        If the frequencies depend on the length of the request, or the kind is unknown.
    """
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config: Any = AutoConfig.from_pretrained(model_dir)
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    parameters = dict(parameters or {})
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    if kind in _LENGTH_DEPENDENT:
        raise UnsupportedModelError(
            f"rope_type={kind} changes with the length of the request, so keys cannot be cached "
            "after RoPE for later queries; set another one in config.json"
        )
    if kind == "default":
        theta = parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 1e4
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        return Rotary(1.0 / float(theta) ** exponent)
    if kind not in ROPE_INIT_FUNCTIONS:
        raise UnsupportedModelError(
            f"rope_type={kind} is unknown; known: default, {', '.join(sorted(ROPE_INIT_FUNCTIONS))}"
        )
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return Rotary(inv_freq.float(), float(scaling))
