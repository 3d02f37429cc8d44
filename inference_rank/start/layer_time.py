# SPDX-License-Identifier: Apache-2.0
"""Time one layer of the model that is loaded, without selection."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.kernels.attention import attend_paged
from tandemkv.kernels.stopwatch import event_us, median_us

_NUM_REPLAYS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """One layer of the model without selection, in us."""

    weights_us: float | None
    """Everything but attention; None if it could not be measured."""
    attention_us: float
    """To as many tokens as a request with a resident set attends to."""
    of_graph: bool = False
    """Whether `weights_us` is of a captured decode step, launches and collectives included, and not
    of the layer's matrices and norms alone, which is a lower bound."""

    @property
    def us(self) -> float | None:
        """All of it."""
        return None if self.weights_us is None else self.weights_us + self.attention_us

    @property
    def counted(self) -> str:
        """What `us` is, in words."""
        if self.weights_us is None:
            return "not measured: the layer has experts, or its matrices are packed or quantised"
        if self.of_graph:
            return "captured decode step without selection, and attention"
        return "matrices, norms and attention only, a lower bound"


def measure_layer(
    layer: Any,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    model: ModelSpec,
    batch: int,
    attended: int,
) -> LayerTime:
    """Time what the weights of SGLang's decoder `layer` and its attention take.

    `batch` requests attend to `attended` tokens each, in ``keys, values [num_slots, H, D]``.
    Nothing of that is written to. `model` has the heads of this rank.
    """
    dtype, device = getattr(torch, model.dtype), keys.device
    query = keys.new_ones((batch, model.num_qo_heads, model.head_dim), dtype=dtype)
    slots = torch.arange(batch * attended, device=device, dtype=torch.int32) % len(keys)
    slots, lengths = slots.view(batch, attended), torch.full((batch,), attended, device=device)
    attention_us = median_us(
        lambda: attend_paged(query, keys, values, slots, lengths, scale=model.scale), device
    )
    parameters = [p.detach() for p in layer.parameters()]
    weights = [p for p in parameters if p.dim() == 2]
    norms = [p for p in parameters if p.shape == (model.hidden_size,)]
    if not weights or any(p.dim() > 2 or p.dtype != dtype for p in parameters):
        return LayerTime(weights_us=None, attention_us=attention_us)
    inputs = {w.shape[1]: w.new_zeros((batch, w.shape[1])) for w in weights}
    hidden = torch.ones((batch, model.hidden_size), dtype=dtype, device=device)

    def run() -> None:
        for norm in norms:
            F.rms_norm(hidden, (model.hidden_size,), norm)
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)

    return LayerTime(weights_us=median_us(run, device), attention_us=attention_us)


def measure_replay(replay: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a captured step on `device`, in us.

    Always of the same number of replays: every tensor-parallel rank has to make as many.
    """
    samples = [event_us(replay, device) for _ in range(_NUM_REPLAYS)]
    return statistics.median(samples[1:])
