# SPDX-License-Identifier: Apache-2.0
"""Whether queries can be predicted from a model's weights, checked before a start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandemkv.cache_rank.protocol.errors import SettingsError, UnsupportedModelError
from tandemkv.cache_rank.protocol.models.weight_formats import read_weight_format
from tandemkv.inference_rank.weights.query_checkpoint import (
    LOADED_FROM_SAFETENSORS,
    WITHOUT_PREDICTION,
    QueryCheckpoint,
)
from tandemkv.server.settings.launch_settings import ServeSettings
from tandemkv.server.settings.sglang_args import value_of


def check_query_weights(
    settings: ServeSettings, model_dir: Path, config: Mapping[str, Any]
) -> None:
    """Refuse a quantised model whose ``W_q`` cannot be read, if the policy predicts queries.

    The headers of a quantised checkpoint are read, no weight. Raises `SettingsError` if an argument
    makes SGLang's modules unreadable, `UnsupportedModelError` with the format, the reason and what
    to do.
    """
    if not settings.selection.declared.predicts_from_hidden:
        return
    arguments, policy = settings.sglang_args, settings.selection.policy
    if value_of(arguments, "--torchao-config"):
        raise SettingsError(
            f"SGLang argument --torchao-config cannot be passed with policy={policy}: it predicts "
            f"queries from W_q, which torchao keeps in its own form; drop it, or "
            f"{WITHOUT_PREDICTION}"
        )
    weights = read_weight_format(model_dir, config)
    if weights is None:
        return
    load_format = value_of(arguments, "--load-format") or "auto"
    if load_format in LOADED_FROM_SAFETENSORS:
        QueryCheckpoint(model_dir).check()
        return
    # The one layout that is read from SGLang's modules: see `read_projection`.
    if load_format != "dummy" or weights.packing != "fp8" or weights.block is None:
        raise UnsupportedModelError(
            f"model={model_dir.name}, quantisation={weights.method}, --load-format {load_format}: "
            f"policy={policy} predicts queries from W_q, which is read from safetensors if it is "
            f"quantised; use --load-format auto, or {WITHOUT_PREDICTION}"
        )
