# SPDX-License-Identifier: Apache-2.0
"""Refuse options that contradict the device, the model or a placement, with what to use instead."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress

from tandemkv.cache_rank.calibration.format import CalibrationError
from tandemkv.cache_rank.policies.composition import check_device, check_placement, check_shards
from tandemkv.cache_rank.policies.registry import find_policy
from tandemkv.cache_rank.protocol.engine import check_dense
from tandemkv.cache_rank.protocol.engine_program import check_other_layers
from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings.placement import Placement
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings
from tandemkv.kernels.mirror import MAX_RESIDENT
from tandemkv.server.settings.launch_settings import ServeSettings

from .pages import PAGE_TOKENS, on_device
from .placement import Placement as GpuPlacement


def check_runs_on(settings: ServeSettings, device: str) -> None:
    """Refuse a policy that cannot be served with a model on `device`; see `check_device`.

    One that attends does so on the host's CPU, in a process of its own.
    """
    selection, link = settings.selection, settings.wished_link
    if device == "cpu" or not selection.declared.attends:
        check_device(find_policy(selection.policy), selection.policy, device)
        if device == "cuda" and selection.num_resident > MAX_RESIDENT:
            raise SettingsError(
                f"budget_tokens={selection.budget_tokens}, resident_factor="
                f"{selection.resident_factor:g}: {selection.num_resident} tokens would be resident "
                f"for a KV head, and kernels on GPUs keep books of {MAX_RESIDENT} at most; use a "
                "smaller --budget-tokens or --resident-factor"
            )
        _check_pages(selection, device)
        return
    check_device(find_policy(selection.policy), selection.policy, "cpu")
    if link in ("local", "message"):
        raise SettingsError(
            f"policy={selection.policy} attends on a CPU. Beside a model on {device} its cache "
            f"rank is a process on this host that maps the same memory, and link={link} has none; "
            "use --cache-ranks 1, or --device cpu"
        )
    if settings.tensor_parallel > 1 or (settings.cache_ranks or 1) > 1:
        raise SettingsError(
            f"policy={selection.policy} attends on the host's CPU, in one cache rank beside one "
            f"GPU; tensor_parallel={settings.tensor_parallel} and "
            f"cache_ranks={settings.cache_ranks} are not available; use --tp 1 --cache-ranks 1"
        )


def _check_pages(selection: SelectionSettings, device: str) -> None:
    """Refuse an index by pages with fewer recent tokens than a page: its last one has no scale."""
    filled = on_device(selection, device)
    if filled.index_dtype == "int4" and filled.num_recent_tokens < PAGE_TOKENS:
        raise SettingsError(
            f"index_dtype=int4, num_recent_tokens={filled.num_recent_tokens}: all tokens of the "
            f"last page have to be recent; use --recent-tokens {PAGE_TOKENS}, or --index-dtype "
            "native"
        )


def check_contradictions(settings: ServeSettings, spec: ModelSpec, placement: Placement) -> None:
    """Refuse options that the placement, or the model, has no use for."""
    if settings.standby and not placement.num_cache_ranks:
        raise SettingsError(
            f"standby needs a cache rank in a process of its own, and link {placement.link} has "
            "none; leave --standby out, or use --transport shared"
        )
    if settings.standby and settings.cache_rank_address is not None:
        raise SettingsError(
            f"standby is for the host of the cache rank, and that at {settings.cache_rank_address} "
            "is not started here; give --standby to `tandemkv cache-rank --address` there"
        )
    if settings.link_keys is not None and settings.cache_rank_address is None:
        raise SettingsError(
            f"link_keys={settings.link_keys} goes with --cache-rank-address, and none is given: "
            "for a cache rank of this host keys are made. Leave --link-keys out, or add "
            "--cache-rank-address"
        )
    if placement.engines_per_rank > 1 and placement.model_device == "cuda":
        raise SettingsError(
            f"cache_ranks={placement.num_cache_ranks} and tensor_parallel={placement.tp_size}: one "
            "cache rank for several tensor-parallel ranks is not available on GPUs, where each "
            f"has a cache GPU of its own; use --cache-ranks {placement.tp_size} or 0"
        )
    check_placement(find_policy(settings.selection.policy), settings.selection.policy, placement)
    _check_shards(settings, spec, placement)
    check_dense(settings.selection, placement)
    check_other_layers(spec, placement)
    most_late = settings.selection.most_late(spec.num_layers, spec.other_layers)
    if settings.selection.num_late > most_late:
        raise SettingsError(
            f"late_layers={settings.selection.num_late}: too many for {spec.num_layers} layers: "
            "all must have attended when a step's last selection begins; use --late-layers "
            f"{most_late}"
        )


def _check_shards(settings: ServeSettings, spec: ModelSpec, placement: Placement) -> None:
    """Refuse several cache ranks of one inference rank where they cannot share the work."""
    count = placement.head_shards
    if count == 1:
        return
    tp_size = placement.tp_size
    heads = max(1, spec.num_kv_heads // tp_size)
    if count > heads:
        of_each = f" that each of {tp_size} processes has" if tp_size > 1 else ""
        raise SettingsError(
            f"cache_ranks={placement.num_cache_ranks} is more than the {heads} KV heads of "
            f"{settings.model}{of_each}, and each cache rank has one at least; use --cache-ranks "
            f"{heads * tp_size} at most, or as many addresses in --cache-rank-address"
        )
    name = settings.selection.policy
    check_shards(find_policy(name), name, count)


def contradiction(settings: ServeSettings, spec: ModelSpec, planned: GpuPlacement) -> str:
    """Return why `settings` contradict `planned`; nothing if they do not."""
    from tandemkv.server.checks.preflight import check_heads

    update = {"cache_ranks": planned.num_cache_gpus, "tensor_parallel": planned.tp_size}
    placed = settings.model_copy(update=update)
    try:
        check_contradictions(placed, spec, placed.placement_on("cuda"))
        with suppress(CalibrationError):  # there is none, which is refused for all
            check_heads(placed, spec)
    except SettingsError as error:
        return str(error)
    return ""


def choosable(
    settings: ServeSettings,
    spec: ModelSpec,
    possible: Iterable[GpuPlacement],
    tell: Callable[[str], None],
) -> set[str]:
    """Return the names of those of `possible` that `settings` allow, and tell why not the others.

    All, if they allow none: the one that is chosen is refused then.
    """
    found = {planned.name: contradiction(settings, spec, planned) for planned in possible}
    taken = {name for name, why in found.items() if not why}
    for name, why in found.items():
        if why and taken:
            tell(f"{name} is not chosen from, because serve would refuse it: {why}")
    return taken or set(found)


def check_without_gpus(settings: ServeSettings) -> None:
    """Refuse what takes GPUs, for a model on the CPU."""
    tp_size = settings.tensor_parallel
    num_cores, nodes = len(os.sched_getaffinity(0)), settings.nnodes
    if tp_size > num_cores * nodes:
        raise SettingsError(
            f"tensor_parallel={tp_size} on cpu takes a core for each of the {tp_size // nodes} "
            f"processes here, and this one may use {num_cores}; use --tp {num_cores * nodes} or "
            "less"
        )
    if settings.selection.index_dtype == "int4":
        raise SettingsError(
            "index_dtype=int4 takes pages of many tokens, which SGLang has on GPUs only, and the "
            "model is on cpu; use --index-dtype int8, or --device cuda on a machine with GPUs"
        )
