# SPDX-License-Identifier: Apache-2.0
"""How much memory a launch needs, and how much there is."""

from __future__ import annotations

from pathlib import Path

from tandemkv.cache_rank.protocol.models.architectures import find_architecture
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec, read_config
from tandemkv.cache_rank.protocol.models.weight_formats import read_weight_format
from tandemkv.server.checks.model_files import weight_bytes
from tandemkv.server.settings.launch_settings import ServeSettings

from .footprint import GIB, Footprint, num_states
from .shape import ITEM_BYTES, linear_shape, plain_attention

PROCESS_TREE_BYTES = 3 * GIB
"""SGLang's three processes and the cache rank, without weights and KV (measured 2.9 GB)."""
CACHE_RANK_BYTES = GIB // 2
"""Of each cache rank more, or fewer, than one for each inference rank."""
RANK_BYTES = 1 * GIB
"""Of each tensor-parallel rank beyond the first: SGLang's process and its cache rank, likewise."""


def gib(size: int) -> str:
    """Return `size` in GiB, two digits."""
    return f"{size / GIB:.2f} GiB"


def estimate_memory(
    settings: ServeSettings, spec: ModelSpec, model_dir: Path, *, device: str
) -> Footprint:
    """Return what both ranks need of the host's memory; on cuda the ranks check their GPUs.

    Beside an engine on the host's CPU the K/V of all tokens are the host's.
    """
    tp_size, nodes = settings.tensor_parallel, settings.nnodes  # as much on each of them
    processes = PROCESS_TREE_BYTES + (tp_size // nodes - 1) * RANK_BYTES
    placement = settings.rank_settings.placement
    num_cache_ranks = placement.num_cache_ranks
    extra_ranks = (num_cache_ranks - tp_size) // nodes if num_cache_ranks else 0
    processes += extra_ranks * CACHE_RANK_BYTES
    if device != "cpu" and not placement.host_engine:
        return Footprint(runtime=processes)
    item = ITEM_BYTES.get(spec.dtype, 4)
    kv_item = 1 if settings.cache.stored_dtype else item
    num_heads = max(spec.num_kv_heads, tp_size)  # each rank has one at least
    layer_bytes = 2 * num_heads * spec.head_dim * kv_item
    is_far = settings.cache_rank_address is not None
    stored = spec.num_layers - len(spec.linear_layers)
    cached = 0 if is_far else settings.cache.capacity_tokens * stored * layer_bytes
    if device != "cpu":
        return Footprint(runtime=processes, kv=cached)
    # In memory that two processes map each layer has as many slots.
    is_local = placement.link == "local"
    num_full = spec.num_layers - len(spec.other_layers)
    num_sets = num_full if is_local else spec.num_layers
    selection = settings.selection
    files = weight_bytes(model_dir)
    config = read_config(model_dir)
    saved = str(config.get("dtype") or config.get("torch_dtype"))
    entry = find_architecture(spec.architecture)
    linear = linear_shape(config, entry) if spec.linear_layers else None
    states = 0 if linear is None else len(spec.linear_layers) * linear.state_bytes
    weights = read_weight_format(model_dir, config)
    is_quantised = weights is not None and plain_attention(config, weights) < stored
    is_copied = entry.gates_heads or is_quantised or bool(selection.declared.predictor)
    predicts = selection.declared.predicts_from_hidden and is_copied
    projection = spec.num_qo_heads * spec.head_dim * spec.hidden_size * item
    rows = settings.max_running_requests * selection.row_tokens
    # Keys once more, a byte each, with a scale a token and head.
    is_indexed = selection.index_dtype == "int8" and not selection.declared.attends
    index = num_full * num_heads * (spec.head_dim + 4) if is_indexed else 0
    return Footprint(
        kv=cached // nodes,
        key_index=0 if is_far else settings.cache.capacity_tokens * index // nodes,
        resident_set=rows * num_sets * layer_bytes // nodes,
        states=states * num_states(settings.max_running_requests, "cpu") // nodes,
        runtime=processes,
        weights=files * item // ITEM_BYTES.get(saved, item) // nodes,
        predictor=num_full * projection // nodes if predicts else 0,
    )
