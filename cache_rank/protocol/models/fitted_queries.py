# SPDX-License-Identifier: Apache-2.0
"""Fitted projections: what predicts a layer's query from an earlier residual stream, beside W_q.

A safetensors file of one model and one distance, made by ``tandemkv calibrate --policy look_ahead``
(`tandemkv.server.evaluation.calibrate.look_ahead` says how). For each layer l that attends to the
whole context, but the first, it has ``layers.{l}.weight`` ``[Hq * D, hidden_size]`` and
``layers.{l}.bias`` ``[Hq * D]``: before its norm and its rotation the query of layer l is about
``W norm_l(h_m) + b``, h_m being the residual stream at the entry of layer `stream_of`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Self

import torch

from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings

from .fitted_file import FittedFile, write_fitted_file
from .model_spec import ModelSpec

FORMAT = "tandemkv-fitted-queries"


def stream_of(layer: int, distance: int) -> int:
    """Return at the entry of which layer the residual stream is read for the query of `layer`."""
    return max(0, layer - distance)


def fitted_layers(model: ModelSpec) -> list[int]:
    """Layers with a projection: those that something is selected for, but the first."""
    return [x for x in range(1, model.num_layers) if x not in model.other_layers]


class FittedQueries:
    """The projections in a file; nothing but its header is read before they are asked for.

    Each has `num_query_rows`, those of all query heads.

    `path` is a file of `write_fitted_queries`, `model` is served, under tensor parallelism the
    whole one, and `distance` are the layers between the stream that is read and the query. The
    first `num_late` layers are predicted from the stream at their own entry: W_q is exact there.
    Raises `SettingsError` if it is no such file, or of another model or distance.
    """

    def __init__(self, path: Path, model: ModelSpec, distance: int, num_late: int = 0) -> None:
        self.num_query_rows = model.num_qo_heads * model.head_dim
        self._layers = {x for x in fitted_layers(model) if x >= num_late}
        self._file = FittedFile(
            "predictor",
            path,
            f"`tandemkv calibrate MODEL --policy look_ahead --distance {distance} --out FILE`",
        )
        self._file.check(model, FORMAT, {"distance": str(distance)})
        for layer in fitted_layers(model):
            self._file.check_shape(
                f"layers.{layer}.weight", (self.num_query_rows, model.hidden_size)
            )
            self._file.check_shape(f"layers.{layer}.bias", (self.num_query_rows,))

    @classmethod
    def of(cls, selection: SelectionSettings, model: ModelSpec) -> Self | None:
        """Return the file that `selection` names, None if it names none; raises as the class."""
        declared = selection.declared
        if not declared.predictor:
            return None
        path = Path(declared.predictor).expanduser()
        return cls(path, model, declared.layers_ahead, selection.num_late)

    def layer(
        self, layer: int, rows: range, *, dtype: torch.dtype, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the rows of a layer's weight and bias; None where W_q is to be taken."""
        if layer not in self._layers:
            return None
        weight, bias = (
            self._file.rows(f"layers.{layer}.{part}", rows).to(device, dtype)
            for part in ("weight", "bias")
        )
        return weight, bias


def write_fitted_queries(
    path: Path,
    model: ModelSpec,
    distance: int,
    layers: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
    about: Mapping[str, str],
) -> None:
    """Write weight and bias of each layer; `about` is noted beside what the file is of.

    Raises `SettingsError` if a file cannot be written there.
    """
    tensors = {
        f"layers.{layer}.{part}": tensor
        for layer, found in layers.items()
        for part, tensor in zip(("weight", "bias"), found, strict=True)
    }
    write_fitted_file(path, model, FORMAT, tensors, {**about, "distance": str(distance)})
