# SPDX-License-Identifier: Apache-2.0
"""Weights that queries are predicted with, read once for all epochs of a process."""

from __future__ import annotations

from pathlib import Path

from tandemkv.cache_rank.model_adapters.registry import find_adapter
from tandemkv.cache_rank.policies.registry import find_policy
from tandemkv.cache_rank.protocol.local import PredictQuery
from tandemkv.cache_rank.protocol.messages import Timing
from tandemkv.cache_rank.protocol.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings import RankSettings


class Predictors:
    """Predictions with the checkpoint's weights.

    Parameters
    ----------
    settings, model_dir
        As of the cache rank.
    """

    def __init__(self, settings: RankSettings, model_dir: Path) -> None:
        self._selection, self._model_dir = settings.selection, model_dir
        self._kept: tuple[ModelSpec, PredictQuery] | None = None

    def of(self, model: ModelSpec) -> PredictQuery | None:
        """Return the prediction for `model`; None if the policy predicts no query."""
        if find_policy(self._selection.policy).capabilities.timing is not Timing.SAME_STEP_HIDDEN:
            return None
        if self._kept is None or self._kept[0] != model:
            self._kept = None
            exact = self._selection.exact_layer_ids
            layers = [layer for layer in range(model.num_layers) if layer not in exact]
            adapter = find_adapter(model.architecture)
            made = adapter(self._model_dir, model, layers=layers)
            self._kept = (model, made.predict_query)
        return self._kept[1]
