# SPDX-License-Identifier: Apache-2.0
"""What two processes of one host map: which tensors there are, and which flag means what.

The inference rank makes all of it. What survives an epoch is K/V, request table and weights of
sample tokens; flags, ring and staging are new in each epoch, so that nothing of an earlier one can
satisfy a wait. On GPUs staging and flags in GPU memory survive too, for captured graphs name their
addresses; their step numbers grow from epoch to epoch instead.

Each tensor names its home, the GPU whose kernels read it in a step, or the host; docs/design.md has
the table. With an engine on the host's CPU beside a model on a GPU all of it is the host's memory
(`Homes.host_engine`), and resident sets, which such an engine does not write, are not mapped.

Where both are one device, resident sets lie behind the tokens in the same tensor, so that attention
names both by one list of slots (`RegionSizes.is_apart`).

Several cache ranks of one inference rank (`RegionSizes.shard`) map one pool of all KV heads and one
request table; each reads and writes its own heads there. Ring, staging and the flags that its GPU
polls are made for each. Where each has a GPU the pool is in as many parts, of consecutive layers:
K/V lie evenly however the heads are divided, and each cache rank reads most of its rows from the
GPUs of the others. On another host (link ``message``) each has a pool of its own heads instead;
beside the model their pumps map one pool, which lies whole on the model's GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tandemkv.cache_rank.protocol.engine import EnginePools
from tandemkv.cache_rank.protocol.errors import ProtocolError
from tandemkv.cache_rank.protocol.gpu_flags import flag_specs
from tandemkv.cache_rank.protocol.head_shard import HeadShard, part_bounds
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.models.predictor_weights import PREDICTOR_PREFIX
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings
from tandemkv.cache_rank.protocol.step_flags import WORDS_APART
from tandemkv.cache_rank.protocol.step_ring import ring_shape

from .descriptor_messages import TensorSpec
from .mapped_tensors import MappedTensors

POOL = "kv"
"""K/V of all tokens; with a number behind it, of a part of the layers."""
STAMPS = "row_stamps"
"""Of what the engine remembers of rows: which request and which step each copy is of."""
SEED_BUFFERS = 2
"""Layers whose prompt queries may be under way at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionSizes:
    """Sizes that both ranks must agree on."""

    num_slots: int
    """Slots of tokens, the padding page included."""
    num_rows: int
    """Rows of the request table; row 0 is padding."""
    page_size: int
    """Tokens that lie in consecutive slots."""
    is_apart: bool = False
    """Whether resident sets, latest tokens and samples of each row lie apart from the pool, beside
    the model (`Placement.has_far_pool`)."""
    shard: HeadShard = field(default_factory=HeadShard)
    """Of the pool's KV heads, those that the model of this region has."""
    num_sharing: int = 1
    """Cache ranks that map one pool, each for its heads."""
    has_whole_pool: bool = False
    """Whether one GPU has all layers of the pool, whoever maps it."""
    maps_sets: bool = True
    """Whether resident sets are mapped; not where the engine writes none of them
    (`Placement.host_engine`)."""

    @property
    def num_pools(self) -> int:
        """Parts that the layers of the pool are in."""
        return self.num_sharing if self.is_apart and not self.has_whole_pool else 1

    @property
    def max_batch(self) -> int:
        """Requests of a step at most."""
        return self.num_rows - 1


class FlagIndex:
    """Numbers of the flags of an epoch behind the ring's, for a model of `num_layers` layers.

    `input` is raised by the forward pass: the layer's residual stream (decode) or K/V and prompt
    queries (prefill) are in place; that of layer `num_layers` ends the step. `query`: so is the
    layer's query, behind its attention if it selects for the next step. `ready` is raised by the
    engine: the resident set may be attended to, or is filled.
    """

    LOADED, FINISHED, PROGRESS, ABORTED, CONFIRMED = range(2, 7)
    RESTORED, RESEEDED = range(7, 9)
    _FIRST = 9

    def __init__(self, num_layers: int) -> None:
        self._layers = num_layers + 1
        self.end = num_layers

    @property
    def count(self) -> int:
        """Flags in all."""
        return self._FIRST + 3 * self._layers

    def input(self, layer: int) -> int:
        """See the class."""
        return self._FIRST + layer

    def query(self, layer: int) -> int:
        """See the class."""
        return self._FIRST + self._layers + layer

    def ready(self, layer: int) -> int:
        """See the class."""
        return self._FIRST + 2 * self._layers + layer


def kept_specs(
    model: ModelSpec, selection: SelectionSettings, sizes: RegionSizes
) -> tuple[TensorSpec, ...]:
    """Return what survives an epoch: K/V, resident sets, and tables."""
    slots, layers = sizes.num_slots, model.num_layers
    heads, dim = sizes.shard.whole(model.num_kv_heads), model.head_dim
    beside: tuple[TensorSpec, ...] = ()
    if sizes.is_apart:
        beside = tuple(
            TensorSpec(
                name, (layers, sizes.num_rows, width, heads, dim), model.stored_dtype, "inference"
            )
            for name, width in _widths_beside(selection)
            if sizes.maps_sets
        )
    else:
        slots += sizes.num_rows * selection.num_resident
        slots = -(-slots // sizes.page_size) * sizes.page_size
    weights = (layers, sizes.num_rows, heads, selection.num_samples)
    return (
        *_pool_specs(sizes, (layers, 2, slots, heads, dim), model.stored_dtype),
        *beside,
        TensorSpec("req_to_token", (sizes.num_rows, model.max_context), "int32", "inference"),
        TensorSpec("sample_log_weight", weights, "float32", "inference"),
    )


def _pool_specs(
    sizes: RegionSizes, shape: tuple[int, int, int, int, int], dtype: str
) -> tuple[TensorSpec, ...]:
    count, (layers, *rest) = sizes.num_pools, shape
    if count == 1:
        return (TensorSpec(POOL, shape, dtype, "engine"),)
    bounds = (part_bounds(number, count, layers) for number in range(count))
    return tuple(
        TensorSpec(f"{POOL}_{number}", (end - start, *rest), dtype, f"pool_{number}")
        for number, (start, end) in enumerate(bounds)
    )


def is_pool(spec: TensorSpec) -> bool:
    """Whether `spec` has K/V of all tokens, of some layers at least."""
    return spec.name == POOL or spec.name.startswith(f"{POOL}_")


def layers_of_pool(tensors: MappedTensors, sizes: RegionSizes) -> list[torch.Tensor]:
    """Return K and V of each layer, ``[2, slots, H, D]``, whichever GPU has them."""
    if sizes.num_pools == 1:
        return list(tensors[POOL].unbind())
    parts = (tensors[f"{POOL}_{number}"] for number in range(sizes.num_pools))
    return [layer for part in parts for layer in part.unbind()]


def _widths_beside(selection: SelectionSettings) -> tuple[tuple[str, int], ...]:
    """Return tensors of each row that lie beside the model, and their slots."""
    resident = selection.num_resident + selection.num_recent_tokens
    found = [(f"resident_{kind}", resident) for kind in "kv"]
    if selection.num_samples:
        found += [(f"sample_{kind}", selection.num_samples) for kind in "kv"]
    return tuple(found)


def host_specs(model: ModelSpec, sizes: RegionSizes) -> tuple[TensorSpec, ...]:
    """Return where the two hosts meet: flags and ring, new in each epoch."""
    return (
        TensorSpec("flags", (FlagIndex(model.num_layers).count, WORDS_APART), "int64"),
        TensorSpec("ring", ring_shape(sizes.max_batch), "int64"),
    )


def staging_specs(
    model: ModelSpec, selection: SelectionSettings, sizes: RegionSizes
) -> tuple[TensorSpec, ...]:
    """Return what is handed over in a step."""
    layers, batch = model.num_layers, sizes.max_batch
    query = (model.num_qo_heads, model.head_dim)
    seeds = (SEED_BUFFERS, batch * selection.seed_window, *query)
    remote = TensorSpec("remote_outputs", (batch, *query), model.dtype, "inference")
    return (
        TensorSpec("streams", (layers, batch, model.hidden_size), model.dtype, "engine"),
        TensorSpec("queries", (layers, batch, *query), model.dtype, "engine"),
        TensorSpec("seed_queries", seeds, model.dtype, "engine"),
        # Of a policy that attends: one layer's, used up before the next layer's query is there.
        TensorSpec(
            "outputs", (batch, model.num_qo_heads, model.head_dim + 1), "float32", "inference"
        ),
        # The same of an exact layer, which is attended to where the K/V are.
        *((remote,) if sizes.is_apart else ()),
    )


class RegionSpecs(NamedTuple):
    """What is mapped, by how long it lives."""

    kept: tuple[TensorSpec, ...]
    """Survives an epoch; all cache ranks of an inference rank map it."""
    own: tuple[TensorSpec, ...]
    """Survives an epoch, of one cache rank."""
    epoch: tuple[TensorSpec, ...]
    """New in each epoch, of one cache rank."""


def specs_by_life(
    model: ModelSpec, selection: SelectionSettings, sizes: RegionSizes, *, on_gpu: bool
) -> RegionSpecs:
    """Return what survives an epoch, and what is new in each."""
    kept, epoch = kept_specs(model, selection, sizes), host_specs(model, sizes)
    staging = staging_specs(model, selection, sizes)
    if not on_gpu:
        return RegionSpecs(kept, (), (*epoch, *staging))
    requests = tuple(
        TensorSpec(name, (sizes.max_batch,), "int64", "engine")
        for name in ("step_rows", "step_lengths")
    )
    to_engine, to_all = flag_specs(model.num_layers, sizes.max_batch, sizes.num_sharing)
    return RegionSpecs((*kept, to_all), (*staging, *requests, to_engine), epoch)


def part_books(
    tensors: MappedTensors, model: ModelSpec, selection: SelectionSettings, sizes: RegionSizes
) -> MappedTensors:
    """Take out of `tensors` what an engine of an earlier epoch made, and return it.

    All else has to be what the two ranks agreed on, and weights of the prediction
    (`predictor_weights`), which are checked by who reads them. Raises as `check_agreed`.
    """
    others = check_agreed(tensors, model, selection, sizes)
    books = MappedTensors(tensors.homes)
    tensors.hand_over([x for x in others if not x.startswith(PREDICTOR_PREFIX)], books)
    return books


def check_agreed(
    tensors: MappedTensors, model: ModelSpec, selection: SelectionSettings, sizes: RegionSizes
) -> list[str]:
    """Return the names of all in `tensors` besides what the two ranks agreed on.

    Raises `ProtocolError` if any of that is missing or differs, naming the first.
    """
    found = {spec.name: spec for spec in tensors.specs}
    wanted = specs_by_life(model, selection, sizes, on_gpu=tensors.homes.are_on_gpu)
    for spec in (spec for specs in wanted for spec in specs):
        if found.pop(spec.name, None) != spec:
            raise ProtocolError(
                f"mapped tensor {spec.name!r} must be {spec.dtype}{list(spec.shape)}; start both "
                "ranks with the same settings"
            )
    return list(found)


def pools_of(
    tensors: MappedTensors, model: ModelSpec, selection: SelectionSettings, sizes: RegionSizes
) -> EnginePools:
    """Return the engine's pools as views of the mapped tensors, of its own KV heads."""
    shard, width = sizes.shard, selection.num_resident
    kv = [shard.of(layer, 2) for layer in layers_of_pool(tensors, sizes)]
    if not sizes.maps_sets:
        shape = (sizes.num_rows, 0, model.num_kv_heads, model.head_dim)
        resident = [(k.new_empty(shape), v.new_empty(shape)) for k, v in kv]
    elif sizes.is_apart:
        sets = (shard.of(tensors[name], 3) for name in ("resident_k", "resident_v"))
        resident = list(zip(*sets, strict=True))
    else:
        shape = (sizes.num_rows, width, model.num_kv_heads, model.head_dim)
        tail = slice(sizes.num_slots, sizes.num_slots + sizes.num_rows * width)
        resident = [(k[tail].view(shape), v[tail].view(shape)) for k, v in kv]
    return EnginePools(
        k=[k[: sizes.num_slots] for k, _ in kv],
        v=[v[: sizes.num_slots] for _, v in kv],
        resident=resident,
        page_size=sizes.page_size,
        log_weight=shard.of(tensors["sample_log_weight"], 2) if selection.num_samples else None,
        is_far=sizes.is_apart,
    )


def seed_buffer(tensors: MappedTensors, layer: int) -> torch.Tensor:
    """Return where the prompt queries ``[n, Hq, D]`` of `layer` lie, shared with other layers."""
    return tensors["seed_queries"][layer % SEED_BUFFERS]
