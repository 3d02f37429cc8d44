# SPDX-License-Identifier: Apache-2.0
"""Measure at start what selection costs beside a layer of the model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tandemkv.cache_rank.protocol.all_reduce import all_reduce_max
from tandemkv.cache_rank.protocol.engine import (
    DenseLengths,
    Engine,
    PredictQuery,
    SelectionTime,
    measure_selection,
)
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings
from tandemkv.inference_rank.sglang import versions as sglang_versions
from tandemkv.inference_rank.sglang.live_model import own_backend

from .layer_time import LayerTime, measure_layer, measure_replay
from .plan import StartPlan

_LOG = logging.getLogger(__name__)

_MOST_BYTES = 256 << 20
"""Of the scratch keys that a layer's attention reads."""

Agree = Callable[[list[float]], list[float]]
"""Returns for each figure the largest of any tensor-parallel rank; all of them call it."""


class StartMeasurement:
    """The figures that a `StartPlan` is made of, taken as they can be had.

    `rank` says what is selected; `agree` is over the tensor-parallel ranks.
    """

    def __init__(
        self,
        settings: RankSettings,
        model: ModelSpec,
        rank: Engine,
        *,
        device: torch.device,
        agree: Agree,
    ) -> None:
        self._settings, self._model, self._rank = settings, model, rank
        self._device, self._agree = device, agree
        self._selection: SelectionTime | None = None
        self._layer: LayerTime | None = None
        self._has_graph = False
        self._reason = "nothing is selected"
        self.plan = self._make_plan()

    def measure(
        self, runner: Any, predict: PredictQuery, *, num_slots: int, max_batch: int
    ) -> None:
        """Time a selection and a layer, before anything is served or captured.

        Memory of its own is used and given back. Without enough of it nothing is measured, and
        the plan says so.
        """
        found: SelectionTime | None = None
        layer: LayerTime | None = None
        if self._device.type == "cuda" and not self._rank.program.is_captured:
            self._reason = "not measured: decode steps are not captured"
        elif self._rank.program.selects:
            layers = range(self._model.num_layers)
            first = next(x for x in layers if self._rank.program.is_sparse_layer(x))
            try:
                found = self._time_selection(
                    runner, predict, first, num_slots=num_slots, max_batch=max_batch
                )
                if found is None:
                    self._reason = "every request that fits is attended to as a whole"
                else:
                    layer = self._time_layer(runner.model.model.layers[first], found.batch)
            except torch.OutOfMemoryError as error:
                found, self._reason = None, "not measured: no memory left for it"
                _LOG.warning("selection is %s: %s", self._reason, error)
            finally:
                if self._device.type == "cuda":
                    torch.cuda.empty_cache()
            self._keep(found, layer)
        self._finish()

    def _time_selection(
        self, runner: Any, predict: PredictQuery, layer: int, *, num_slots: int, max_batch: int
    ) -> SelectionTime | None:
        """Time a selection with the weights of `layer`; None if nothing would be selected."""
        return measure_selection(
            model=self._model,
            settings=self._settings,
            num_slots=num_slots,
            page_size=int(runner.page_size),
            max_batch=max_batch,
            device=self._device,
            predict_query=lambda _, hidden, positions: predict(layer, hidden, positions),
            model_dir=Path(runner.model_config.model_path),
        )

    def _time_layer(self, layer: Any, batch: int) -> LayerTime:
        """Time a layer of the model that attends to a resident set and a ring for each request."""
        selection, model = self._settings.selection, self._model
        attended = selection.num_resident + selection.num_recent_tokens
        dtype = getattr(torch, model.stored_dtype)
        most = _MOST_BYTES // (model.num_kv_heads * model.head_dim * dtype.itemsize)
        shape = (min(batch * attended, most), model.num_kv_heads, model.head_dim)
        k, v = (torch.ones(shape, dtype=dtype, device=self._device) for _ in range(2))
        return measure_layer(layer, k, v, model=model, batch=batch, attended=attended)

    def after_capture(self, graphs: Any) -> None:
        """Time a captured decode step without selection, and make the plan anew.

        `graphs` is SGLang's ``DecodeCudaGraphRunner``, with the buffers of the capture: the replays
        write to the padding slot and the padding row.
        """
        from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import (
            FullCudaGraphBackend,
        )

        layer, is_whole = self._layer, isinstance(graphs.backend, FullCudaGraphBackend)
        if self._has_graph or self._selection is None or layer is None or not is_whole:
            return
        self._has_graph = True  # a later capture would disturb requests
        sizes = sorted(graphs.capture_bs)
        size = next((n for n in sizes if n >= self._selection.batch), sizes[-1])
        least = own_backend(graphs.attn_backend).kinds[-1]
        key = graphs._make_graph_key(size, None, str(least))
        with graphs.backend.replay_session():
            total = measure_replay(lambda: graphs.backend.replay(key, None), self._device)
        (weights,) = self._agree([total / self._model.num_layers])
        self._layer = replace(layer, weights_us=weights, of_graph=True)
        self._finish()

    def _keep(self, found: SelectionTime | None, layer: LayerTime | None) -> None:
        """Take the slowest rank's figures; none if a rank has none."""
        missing = float("inf")
        figures = [missing] * 4
        if found is not None and layer is not None:
            weights = layer.weights_us
            figures = [found.scan_us, found.transfer_us, layer.attention_us]
            figures.append(missing if weights is None else weights)
        scan, transfer, attention, weights_us = self._agree(figures)
        if found is None:
            return
        if scan == missing:
            self._reason = "not measured: a tensor-parallel rank has no memory left for it"
            return
        self._reason = ""
        self._selection = replace(found, scan_us=scan, transfer_us=transfer)
        self._layer = LayerTime(
            weights_us=None if weights_us == missing else weights_us, attention_us=attention
        )

    def _finish(self) -> None:
        self.plan = self._make_plan()
        _LOG.info("start plan: %s", self.plan.text())

    def _make_plan(self) -> StartPlan:
        selection = self._settings.selection
        return StartPlan(
            settings=selection,
            measured=self._selection,
            layer=self._layer,
            is_cuda=self._device.type == "cuda",
            dense_tokens=DenseLengths.of(selection, selection.num_resident).num_dense,
            scanned=self._rank.program.scanned_share,
            note=self._reason,
        )


def agree_over_ranks(figures: list[float]) -> list[float]:
    """Return the largest of each figure over SGLang's tensor-parallel group."""
    return all_reduce_max(sglang_versions.tensor_group(), figures)
