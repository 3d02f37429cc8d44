# SPDX-License-Identifier: Apache-2.0
"""Memory of each GPU of a placement. Every part grows, or stays, with context and concurrency."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from .placement import Placement, PlacementKind
from .shape import ModelShape
from .workload import Workload

GIB = 1 << 30
RUNTIME_BYTES = 3 * GIB
"""CUDA context, NCCL, captured graphs and FlashInfer's workspace. An estimate: SGLang on an H200
leaves between 2 and 4 GiB to them."""
CACHE_RUNTIME_BYTES = 1 * GIB
"""The same on a GPU that runs no model: CUDA context, transport, workspace of one layer."""
USABLE_FRACTION = 0.95
"""Part of a GPU's memory that is planned with; the rest is the allocator's fragmentation."""
BOOK_COPIES = 3
"""The books of each row, and two versions of them in memory that outlives the cache rank."""
NUM_LANES = 2
"""Selections at once, each with a scratch of its own (`CacheEngine`)."""
STATES_PER_REQUEST = {"cpu": 3, "cuda": 5}
"""Recurrent states that SGLang keeps of each running request: its own, two that the radix tree may
have of it, and with overlapping passes two that are being copied."""
PREFIX_BUFFERS = 2
"""Layers whose prefixes, up to the longest request's K/V, a prefill has on the model's GPU at once
(`PrefixStaging`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes on one GPU, or in the host's memory, by part."""

    weights: int = 0
    predictor: int = 0
    """W_q that queries are predicted with, where it is a copy."""
    kv: int = 0
    states: int = 0
    key_index: int = 0
    resident_set: int = 0
    selection_scratch: int = 0
    books: int = 0
    staging: int = 0
    activations: int = 0
    runtime: int = 0

    @property
    def total(self) -> int:
        """Sum of the parts."""
        return sum(asdict(self).values())

    def describe(self) -> str:
        """Return the parts in GiB, largest first."""
        parts = sorted(asdict(self).items(), key=lambda item: -item[1])
        return " + ".join(
            f"{name.replace('_', ' ')} {size / GIB:.2f}" for name, size in parts if size
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementMemory:
    """Memory of one GPU that runs the model, and of one cache GPU if there are any."""

    inference: Footprint
    cache: Footprint | None = None

    @property
    def roles(self) -> tuple[tuple[str, Footprint], ...]:
        """Each kind of GPU with its footprint."""
        cache = () if self.cache is None else (("cache", self.cache),)
        return (("inference", self.inference), *cache)

    @property
    def largest(self) -> Footprint:
        """The footprint of the fullest GPU."""
        return max((footprint for _, footprint in self.roles), key=lambda item: item.total)


def memory_of(placement: Placement, shape: ModelShape, load: Workload) -> PlacementMemory:
    """Return what each GPU of `placement` holds.

    Cache GPUs have equal parts of the K/V, layer by layer, and of what else they hold as much as
    the one with the most KV heads. By messages they have all layers of their heads, and the model's
    GPUs hold what they do in process: SGLang's pool stays there. `tp_size` must divide the head
    counts. The resident set has ``concurrency + 1`` rows, as row 0 is padding.
    """
    tp_size = placement.tp_size
    kv = load.total_tokens * shape.kv_token_bytes
    model = {
        "weights": _shard(shape.weight_bytes, tp_size),
        "states": _shard(shape.state_bytes * num_states(load.concurrency, "cuda"), tp_size),
        "activations": activation_bytes(shape, load, tp_size),
        "runtime": RUNTIME_BYTES,
    }
    shards = min(tp_size, shape.num_kv_heads)  # more GPUs have the same heads again
    if placement.kind is PlacementKind.DENSE:
        return PlacementMemory(inference=Footprint(kv=_shard(kv, shards), **model))
    # In one process samples stay where the pool has them.
    is_own = placement.kind is not PlacementKind.IN_PROCESS
    rows = (load.concurrency + 1) * (load.row_tokens if is_own else load.set_tokens)
    resident = _shard(rows * shape.num_full_layers * shape.kv_layer_token_bytes, shards)
    is_other = shape.copies_queries or load.is_fitted
    copied = shape.predictor_bytes if is_other and load.predicts else 0
    if placement.kind is PlacementKind.IN_PROCESS:
        dtype = load.own_predictor_dtype
        copy = copied if dtype == "native" else shape.predictor_copy_bytes(dtype)
        model["predictor"] = _shard(copy, tp_size)
        return PlacementMemory(
            inference=Footprint(
                kv=_shard(kv, shards),
                key_index=_shard(index_bytes(shape, load), shards),
                resident_set=resident,
                selection_scratch=_shard(scratch_bytes(shape, load), shards),
                **model,
            )
        )
    # While the start hands W_q to the cache GPU, the model's GPU holds all of it.
    model["predictor"] = _shard(copied, tp_size)
    prefixes = PREFIX_BUFFERS * load.longest_tokens * shape.kv_layer_token_bytes
    inference = Footprint(resident_set=resident, staging=_shard(prefixes, shards), **model)
    if placement.by_messages:
        own = Placement(kind=PlacementKind.IN_PROCESS, tp_size=tp_size)
        inference = memory_of(own, shape, load).inference
    return PlacementMemory(inference=inference, cache=_cache_gpu(placement, shape, load))


def _cache_gpu(placement: Placement, shape: ModelShape, load: Workload) -> Footprint:
    """Return what a cache GPU holds; see `memory_of`."""
    caches, tp_size = placement.num_cache_gpus, placement.tp_size
    kv = load.total_tokens * shape.kv_token_bytes

    def heads(size: int) -> int:
        return _largest(size, shape.num_kv_heads, caches)

    by_layers = _shard(_largest(kv, shape.num_layers, caches // tp_size), tp_size)
    return Footprint(
        predictor=heads(shape.predictor_copy_bytes(load.predictor_dtype)),
        kv=heads(kv) if placement.by_messages else by_layers,
        key_index=heads(index_bytes(shape, load)),
        selection_scratch=heads(scratch_bytes(shape, load)),
        books=heads(book_bytes(shape, load)),
        staging=staging_bytes(shape, load, caches),
        runtime=CACHE_RUNTIME_BYTES,
    )


def num_states(max_running: int, device: str) -> int:
    """Return how many recurrent states SGLang has room for, if it serves so many requests.

    One is padding.
    """
    return STATES_PER_REQUEST[device] * max_running + 1


def index_bytes(shape: ModelShape, load: Workload) -> int:
    """Bytes of the key index beside the KV, unsharded; none if keys are scanned as they are."""
    if load.index_dtype == "native" or not load.selects:
        return 0
    layers = shape.num_full_layers
    if load.anchors is not None:
        layers = load.num_scanned(shape.num_layers, shape.other_layers)
    heads = layers * shape.num_kv_heads
    return math.ceil(load.total_tokens * heads * load.index_head_token_bytes(shape))


def scratch_bytes(shape: ModelShape, load: Workload) -> int:
    """Bytes that stand between a scan and its choice, unsharded; none if nothing is selected.

    For each token and KV head: a float16 for each query head of the group, padded to a power of
    two, a maximum and a constant of 16 tokens each, float32, and the mirror's two bits
    (`make_select_scratch`, `make_mirror_scratch`). Policies that rank by methods of their own have
    less: the latter alone, with an int32 more.
    """
    if not load.selects:
        return 0
    group = max(2, 1 << (shape.num_qo_heads // shape.num_kv_heads - 1).bit_length())
    # As wide as SGLang's request table, whatever there is room for.
    width = load.max_context or load.context_tokens
    tokens = load.concurrency * width * shape.num_kv_heads
    return NUM_LANES * (tokens * (2 * group + 2 * 4 * group // 16) + tokens // 4)


def book_bytes(shape: ModelShape, load: Workload) -> int:
    """Bytes of what the engine remembers of rows, unsharded; none if nothing is selected.

    For each resident slot its position and when it was used, int32 each.
    """
    if not load.selects:
        return 0
    slots = shape.num_full_layers * (load.concurrency + 1) * shape.num_kv_heads * load.num_resident
    return BOOK_COPIES * 2 * 4 * slots


def staging_bytes(shape: ModelShape, load: Workload, num_shards: int) -> int:
    """Bytes of what the model's GPU sends to a cache GPU, the fullest of `num_shards`.

    A residual stream and a query for each layer and request, and the last queries of prompts, of
    two layers (`shared_region.staging_specs`).
    """
    query = _largest(shape.num_qo_heads, shape.num_kv_heads, num_shards) * shape.head_dim
    streams = shape.num_layers * load.concurrency * (shape.hidden_size + query)
    return (streams + 2 * load.concurrency * load.seed_window * query) * shape.item_bytes


def activation_bytes(shape: ModelShape, load: Workload, tp_size: int) -> int:
    """Bytes of one forward pass at its widest.

    Residual, normed and attention streams, the MLP's gate, up and product, and the logits in
    float32 with their softmax.
    """
    width = 4 * shape.hidden_size + _shard(3 * shape.mlp_width, tp_size)
    logits = 2 * load.concurrency * shape.vocab_size * 4
    return load.chunk_tokens * width * shape.item_bytes + logits


def _largest(size: int, count: int, num_parts: int) -> int:
    """Return the largest part of `size`, which belongs to `count` things in consecutive parts."""
    return -(-size * _shard(count, num_parts) // count)


def _shard(size: int, num_shards: int) -> int:
    return -(-size // num_shards)
