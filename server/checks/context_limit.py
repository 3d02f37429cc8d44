# SPDX-License-Identifier: Apache-2.0
"""How a model is extended to a context that its ``config.json`` does not allow."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_ARCHITECTURES = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
_TRAINED, _LIMITS, _MOST = 32768, (32768, 40960), 131072
"""Of the models whose cards give YaRN: what they were trained for, what their files say of it, and
what the cards go up to."""


def how_to_extend(config: Mapping[str, Any], tokens: int) -> str:
    """Say what to change in the ``config.json`` that `config` is of, for requests of `tokens`.

    Of the Qwen models that are extended by YaRN these are the values of their cards; the factor is
    that of `tokens`, for a larger one costs quality at short lengths.
    """
    limit, names = config.get("max_position_embeddings"), config.get("architectures") or ()
    known = set(names) & set(_ARCHITECTURES)
    if not known or limit not in _LIMITS or tokens > _MOST:
        return (
            "extend the model, as its card says: in a copy of its directory set rope_scaling "
            f'and "max_position_embeddings": {tokens} in config.json, and serve that copy'
        )
    factor = math.ceil(10 * tokens / _TRAINED) / 10
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": _TRAINED,
    }
    changed = json.dumps({"max_position_embeddings": tokens, "rope_scaling": scaling})
    return (
        "extend the model by YaRN, as its card says: in a copy of its directory set "
        f"{changed[1:-1]} in config.json, and serve that copy"
    )
