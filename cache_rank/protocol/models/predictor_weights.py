# SPDX-License-Identifier: Apache-2.0
"""What predicts a layer's query from the residual stream, handed from one process to another.

The inference rank has the weights of the model that it serves, whatever they were loaded from. It
copies those that the prediction reads into mapped tensors beside the engine.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

from tandemkv.cache_rank.protocol.errors import ProtocolError
from tandemkv.cache_rank.protocol.head_shard import HeadShard
from tandemkv.cache_rank.protocol.memory.mapped_tensors import MappedTensors
from tandemkv.kernels.query import QueryWeights, predict_query

from .model_spec import ModelSpec

PREDICTOR_PREFIX = "predict_"
_OPTIONAL = ("norm", "weight_scale", "bias", "query_norm")
_BY_HEAD = ("weight", "weight_scale", "bias")
"""With a row for each element of each query head."""
_EPSILONS = "epsilons"
_NUMBERS = "layers"
_FORM = "form"
_COS_SIN = "cos_sin"
_ITEM_BYTES = 4
"""Of the widest dtype that they have."""


def num_positions(model: ModelSpec, capacity_tokens: int) -> int:
    """Return how many positions a request can have: the context's, or those that the pool holds."""
    return min(model.max_context, capacity_tokens)


def most_bytes(model: ModelSpec, capacity_tokens: int) -> int:
    """Return more bytes than `put_weights` makes for `model`, with a table of `num_positions`."""
    rows = model.num_qo_heads * model.head_dim
    of_layer = rows * (model.hidden_size + 3) + model.hidden_size  # scale, bias, norm by head; norm
    table = num_positions(model, capacity_tokens) * model.head_dim
    numbers = 3 * model.num_layers + 2  # its number and two epsilons; the form
    pages = mmap.PAGESIZE * (len(_OPTIONAL) + 5)  # a tensor takes one at least
    return _ITEM_BYTES * (model.num_layers * of_layer + table + numbers) + pages


def put_weights(
    tensors: MappedTensors,
    layers: Sequence[QueryWeights | None],
    cos_sin: torch.Tensor,
    shard: HeadShard | None = None,
) -> None:
    """Copy the weights of the layers that are predicted for into mapped `tensors`.

    They are of the engine's home, and of the heads of `shard`, by default of all. `layers` has None
    where nothing is predicted; all others have the same fields, `head_dim` and
    `rotates_neighbours`. ``cos_sin [num_positions, rotary_dim]`` is as for
    `tandemkv.kernels.query.predict_query`.

    Raises `SettingsError` if there is no memory for them, `ProtocolError` if layers have other
    fields than the first one.
    """
    shard = shard or HeadShard()
    kept = {layer: weights for layer, weights in enumerate(layers) if weights is not None}
    first = next(iter(kept.values()))
    names = _fields_of(first)
    if any(_fields_of(weights) != names for weights in kept.values()):
        raise ProtocolError("layers predict with other fields than the first one")
    norm = first.query_norm
    is_over_all = norm is not None and len(norm) != first.head_dim

    def part_of(weights: QueryWeights, name: str) -> torch.Tensor:
        part: torch.Tensor = getattr(weights, name)
        return shard.of(part, 0) if name in _BY_HEAD and not is_over_all else part

    def put(name: str, content: torch.Tensor, home: str) -> None:
        made = tensors.allocate(PREDICTOR_PREFIX + name, content.shape, content.dtype, home)
        made.copy_(content)

    for name in names:
        part = part_of(first, name)
        out = tensors.allocate(
            PREDICTOR_PREFIX + name, (len(kept), *part.shape), part.dtype, "engine"
        )
        for place, weights in enumerate(kept.values()):
            out[place].copy_(part_of(weights, name))
    put(_NUMBERS, torch.tensor(list(kept), dtype=torch.int32), "host")
    epsilons = [[x.norm_eps, x.query_norm_eps] for x in kept.values()]
    put(_EPSILONS, torch.tensor(epsilons, dtype=torch.float32), "host")
    form = [first.head_dim, int(first.rotates_neighbours)]
    put(_FORM, torch.tensor(form, dtype=torch.int32), "host")
    put(_COS_SIN, cos_sin, "engine")


def _fields_of(weights: QueryWeights) -> list[str]:
    return ["weight", *(name for name in _OPTIONAL if getattr(weights, name) is not None)]


def weights_for(tensors: MappedTensors, shard: HeadShard) -> dict[str, torch.Tensor]:
    """Return by name what `put_weights` has put, as far as the heads of `shard` need it.

    Raises `ProtocolError` if they are incomplete, or of another shape.
    """
    names = [x.name for x in tensors.specs if x.name.startswith(PREDICTOR_PREFIX)]
    if not names:
        return {}
    _parts_of(tensors)
    parted = () if _is_over_all_heads(tensors) else tuple(PREDICTOR_PREFIX + x for x in _BY_HEAD)
    return {x: shard.of(tensors[x], 1) if x in parted else tensors[x] for x in names}


def _parts_of(tensors: MappedTensors) -> dict[str, torch.Tensor]:
    """Return the fields of `QueryWeights` that there are, each with a layer's in its first place.

    Raises `ProtocolError` if one is missing, or no such tensor.
    """
    names = ("weight", _NUMBERS, _EPSILONS, _FORM, _COS_SIN)
    missing = [name for name in names if PREDICTOR_PREFIX + name not in tensors]
    if missing:
        raise ProtocolError(f"weights of the prediction lack {missing}; use one version")
    fields = ("weight", *_OPTIONAL)
    parts = {x: tensors[PREDICTOR_PREFIX + x] for x in fields if PREDICTOR_PREFIX + x in tensors}
    shape = tensors[PREDICTOR_PREFIX + _NUMBERS].shape
    wrong = [
        name
        for name, part in parts.items()
        if part.ndim != (3 if name == "weight" else 2) or part.shape[:1] != shape
    ]
    wrong += [_FORM] if tensors[PREDICTOR_PREFIX + _FORM].shape != (2,) else []
    if wrong:
        raise ProtocolError(f"weights of the prediction: {wrong} are of another model")
    return parts


def _is_over_all_heads(tensors: MappedTensors) -> bool:
    """Whether a query is divided by a norm over all heads, which then takes all of them."""
    norm = tensors.get(PREDICTOR_PREFIX + "query_norm")
    return norm is not None and norm.shape[1] != int(tensors[PREDICTOR_PREFIX + _FORM][0])


class MappedPredictor:
    """Predicts with the weights that `put_weights` has put: ``rope(q_norm(W_q norm(h)))``.

    `tensors`, with the weights of all heads or as `weights_for` has them, are to be kept as long as
    this object. It predicts for `num_heads` query heads, those of `shard`. Raises `ProtocolError`
    if they are of another model, or incomplete.
    """

    def __init__(
        self,
        tensors: MappedTensors,
        num_layers: int,
        num_heads: int,
        shard: HeadShard | None = None,
    ) -> None:
        shard = shard or HeadShard()
        parts = _parts_of(tensors)
        numbers = tensors[PREDICTOR_PREFIX + _NUMBERS].tolist()
        wrong = [_NUMBERS] if max(numbers, default=0) >= num_layers else []
        head_dim, rotates_neighbours = tensors[PREDICTOR_PREFIX + _FORM].tolist()
        width = num_heads * head_dim
        self._predicts_all = shard.count > 1 and _is_over_all_heads(tensors)
        is_whole = parts["weight"].shape[1] == shard.whole(width)
        if not is_whole and (self._predicts_all or parts["weight"].shape[1] != width):
            wrong.append("weight")
        if wrong:
            raise ProtocolError(f"weights of the prediction: {wrong} are of another model")
        epsilons = tensors[PREDICTOR_PREFIX + _EPSILONS].tolist()
        self._cos_sin = tensors[PREDICTOR_PREFIX + _COS_SIN]
        self._shard = shard
        # A norm over all heads takes all of them: what is predicted must not depend on the shards.
        if is_whole and not self._predicts_all:
            parts |= {name: shard.of(parts[name], 1) for name in _BY_HEAD if name in parts}
        self._layers = {
            layer: QueryWeights(
                **{name: part[place] for name, part in parts.items()},
                head_dim=head_dim,
                rotates_neighbours=bool(rotates_neighbours),
                norm_eps=norm_eps,
                query_norm_eps=query_norm_eps,
            )
            for place, (layer, (norm_eps, query_norm_eps)) in enumerate(
                zip(numbers, epsilons, strict=True)
            )
        }

    def __call__(self, layer: int, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return ``[B, Hq, D]`` for `hidden` ``[B, hidden_size]``; `hidden` stays as it is."""
        query = predict_query(hidden, positions, self._layers[layer], self._cos_sin)
        return self._shard.of(query, 1) if self._predicts_all else query
