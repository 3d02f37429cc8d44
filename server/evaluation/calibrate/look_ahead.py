# SPDX-License-Identifier: Apache-2.0
"""Projections that predict a query from an earlier residual stream, fitted by least squares.

`look_ahead` applies the W_q of layer l to the stream of an earlier layer m, as if what layers m to
l - 1 add were nothing. Part of that is the same for all tokens, or linear in the stream. So ``W``
and ``b`` are fitted to ``W norm_l(h_m) + b = W_q norm_l(h_l)`` over texts, with a ridge that draws
``W`` to W_q: what the texts do not tell stays the model's own. How strong the ridge is, texts
decide that were kept out. A query is made as before, with other numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tandemkv.cache_rank.calibration.format import CalibrationError
from tandemkv.cache_rank.protocol.models.architectures import find_architecture
from tandemkv.cache_rank.protocol.models.fitted_queries import fitted_layers, stream_of
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec

from .attention import load_network, stream_before

SKIPPED_TOKENS = 4
"""First tokens of a text, whose streams are like no others: attention gathers there."""
RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Of the mean square of an input."""
KEPT_OUT_EVERY = 8
"""Every eighth text is kept out, the first one too."""


class Fit(NamedTuple):
    """A layer's projection, and what of its queries' variance is missed on texts kept out.

    `weight` is ``[Hq * D, hidden_size]``, `bias` ``[Hq * D]``; `own` is missed with W_q.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    own: float
    fitted: float


class Moments:
    """Sums over tokens that a projection is fitted to, and judged by.

    For inputs x ``[T, n]`` and what is missing beside W_q, d ``[T, m]``: counts, sums and products.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        zeros = partial(torch.zeros, dtype=torch.float64)
        self.xx, self.x = zeros(inputs, inputs), zeros(inputs)
        self.xd, self.d = zeros(inputs, outputs), zeros(outputs)
        self.dd, self.qq, self.count = 0.0, 0.0, 0

    def add(self, x: torch.Tensor, missing: torch.Tensor, query: torch.Tensor) -> None:
        """Add the tokens of a text."""
        x, missing, query = x.double(), missing.double(), query.double()
        self.xx += x.t() @ x
        self.xd += x.t() @ missing
        self.x += x.sum(0)
        self.d += missing.sum(0)
        self.dd += float(missing.square().sum())
        self.qq += float((query - query.mean(0)).square().sum())
        self.count += len(x)

    def solve(self, ridge: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the change ``[n, m]`` of W_q transposed, and the bias ``[m]``."""
        mean_x, mean_d = self.x / self.count, self.d / self.count
        xx = self.xx - self.count * torch.outer(mean_x, mean_x)
        xd = self.xd - self.count * torch.outer(mean_x, mean_d)
        xx.diagonal().add_(ridge * float(self.xx.diagonal().mean()))
        change = torch.linalg.solve(xx, xd)
        return change, mean_d - mean_x @ change

    def missed(self, change: torch.Tensor, bias: torch.Tensor) -> float:
        """Return the share of the queries' variance that a change leaves."""
        squares = self.dd + float((change * (self.xx @ change)).sum())
        squares += self.count * float(bias.square().sum())
        squares -= 2 * float((change * self.xd).sum()) + 2 * float(bias @ self.d)
        squares += 2 * float(self.x @ change @ bias)
        return squares / max(self.qq, 1e-30)


class QueryMeasurement:
    """Runs a model with transformers, and fits the queries of its layers `distance` layers ahead.

    Raises `CalibrationError` if its layers have no projection of queries alone.
    """

    def __init__(self, model_dir: Path, model: ModelSpec, *, dtype: str, distance: int) -> None:
        self._network = load_network(model_dir, dtype)
        self._distance, self._num_texts = distance, 0
        self._layers = {x: self._network.model.layers[x] for x in fitted_layers(model)}
        norm = find_architecture(model.architecture).attention_norm
        self._norms = {x: _part(layer, norm, model) for x, layer in self._layers.items()}
        self._streams: dict[int, torch.Tensor] = {}
        self._queries: dict[int, torch.Tensor] = {}
        sizes = model.hidden_size, model.num_qo_heads * model.head_dim
        self._moments = {x: (Moments(*sizes), Moments(*sizes)) for x in self._layers}
        for number, layer in enumerate(self._network.model.layers):
            layer.register_forward_pre_hook(partial(self._keep_stream, number), with_kwargs=True)
        for number, layer in self._layers.items():
            projection = _part(_part(layer, "self_attn", model), "q_proj", model)
            if projection.out_features != sizes[1]:
                raise CalibrationError(
                    f"{model.architecture}: q_proj has {projection.out_features} rows, and "
                    f"queries {sizes[1]}; queries with gates cannot be fitted"
                )
            projection.register_forward_hook(partial(self._keep_query, number))

    @torch.inference_mode()
    def add(self, tokens: Sequence[int]) -> None:
        """Read a text."""
        self._network.model(torch.tensor([list(tokens)]), use_cache=False)
        is_kept_out = self._num_texts % KEPT_OUT_EVERY == 0
        self._num_texts += 1
        for number, layer in self._layers.items():
            stream = self._streams[stream_of(number, self._distance)]
            x, query = self._norms[number](stream), self._queries[number]
            x, query = x[SKIPPED_TOKENS:], query[SKIPPED_TOKENS:]
            projection = layer.self_attn.q_proj
            own = torch.nn.functional.linear(x, projection.weight, projection.bias)
            self._moments[number][int(is_kept_out)].add(x, query - own, query)

    def result(self) -> dict[int, Fit]:
        """Return the projection of each layer, in the dtype of the model.

        Raises `CalibrationError` if fewer than two texts were read.
        """
        if self._num_texts < 2:
            raise CalibrationError("texts=1: one text is kept out; give two or more")
        return {number: self._fit(number) for number in self._layers}

    def _fit(self, number: int) -> Fit:
        read, kept_out = self._moments[number]
        projection = self._layers[number].self_attn.q_proj
        nothing = torch.zeros_like(read.xd), torch.zeros_like(read.d)
        own = kept_out.missed(*nothing)
        found = [read.solve(ridge) for ridge in RIDGES]
        missed = [kept_out.missed(*change) for change in found]
        best = min(range(len(found)), key=missed.__getitem__)
        (change, bias), fitted = found[best], missed[best]
        if fitted >= own:  # so few texts, or so little to add
            (change, bias), fitted = nothing, own
        if projection.bias is not None:
            bias = bias + projection.bias.detach().double()
        weight = projection.weight.detach().double() + change.t()
        dtype = projection.weight.dtype
        return Fit(weight.to(dtype), bias.to(dtype), own, fitted)

    def _keep_stream(
        self, number: int, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._streams[number] = stream_before(args, kwargs)[0]

    def _keep_query(self, number: int, _: Any, __: Any, output: torch.Tensor) -> None:
        self._queries[number] = output[0].flatten(1)


def _part(module: Any, name: str | None, model: ModelSpec) -> Any:
    """Return a module's part; without a name what changes nothing."""
    if name is None:
        return torch.nn.Identity()
    found = getattr(module, name, None)
    if found is None:
        raise CalibrationError(
            f"{model.architecture}: its layers have no {name} in transformers, so its queries "
            "cannot be fitted; serve without predictor"
        )
    return found
