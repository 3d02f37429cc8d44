# SPDX-License-Identifier: Apache-2.0
"""Decide where the cache rank goes, if the user leaves it open."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.model_spec import ModelSpec, read_config

from .plan.choose import choose_placement
from .plan.placement import PlacementKind
from .plan.shape import shape_of_config
from .plan.workload import Workload
from .settings import ServeSettings

IN_PROCESS_POLICIES = frozenset(
    {"look_ahead", "oracle", "streaming", "exact", "async_spade", "mean_query", "last_query"}
)
"""Policies that need no more than queries and scores; the others have a cache rank of their own."""


def resolve_placement(
    settings: ServeSettings,
    spec: ModelSpec,
    model_dir: Path,
    *,
    device: str,
    progress: Callable[[str], None],
) -> ServeSettings:
    """Fill in `cache_ranks` and `tensor_parallel`, with the reason told to `progress`.

    On a CPU one cache rank process; on GPUs what `tandemkv plan` predicts to be fastest for
    `max_running_requests` requests that share the cache.

    Raises
    ------
    SettingsError
        If nothing fits these GPUs, with the numbers.
    """
    if settings.cache_ranks is not None:
        return settings
    if device == "cpu" or "transport" in settings.exchange.model_fields_set:
        return settings.model_copy(update={"cache_ranks": 1})
    selection, num_gpus = settings.selection, torch.cuda.device_count()
    if (
        selection.policy not in IN_PROCESS_POLICIES
        or selection.share_layers
        or selection.gate_cosine
    ):
        progress(f"cache rank in a process of its own: policy {selection.policy} needs one")
        return settings.model_copy(update={"cache_ranks": 1})
    concurrency = settings.max_running_requests
    capacity = settings.cache.capacity_tokens
    choice = choose_placement(
        shape_of_config(read_config(model_dir), name=settings.model, dtype=spec.dtype),
        Workload.from_selection(
            selection,
            context_tokens=min(spec.max_context, max(1, capacity // concurrency)),
            concurrency=concurrency,
            capacity_tokens=capacity,
        ),
        num_gpus=num_gpus,
        gpu_bytes=min(torch.cuda.get_device_properties(i).total_memory for i in range(num_gpus)),
        available={"in-process-tp1", f"in-process-tp{num_gpus}", "1+1"},
    )
    if choice.chosen is None:
        raise SettingsError(f"{choice.reason}; `tandemkv plan` shows every placement")
    placement = choice.chosen.placement
    progress(f"placement {placement.name}: {choice.reason}")
    update: dict[str, object] = {"tensor_parallel": placement.tp_size}
    if placement.kind is PlacementKind.IN_PROCESS:
        update["cache_ranks"] = 0
    else:
        exchange = settings.exchange.model_copy(update={"transport": "peer"})
        update |= {"cache_ranks": 1, "exchange": exchange}
    return settings.model_copy(update=update)
