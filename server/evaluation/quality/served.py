# SPDX-License-Identifier: Apache-2.0
"""What ``tandemkv serve`` would choose here, and settings of a grid that leave the rest to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tandemkv.cache_rank.policies.registry import read_by, resolve_selection
from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.models.index_channels import num_index_channels
from tandemkv.server.evaluation.grid import describe_setting, read_grid, setting_name
from tandemkv.server.evaluation.provenance import without_paths
from tandemkv.server.settings.launch_settings import ServeSettings

from .configurations import Configuration, Setting, configuration_of

AS_SERVED = "as served"
"""Budget of the configuration that `serve` chooses."""

_AS_THEY_ARE = {
    *("policy", "budget_tokens", "resident_factor", "index_dtype", "num_sink_tokens"),
    *("num_recent_tokens", "refresh_every", "dense_tokens", "dense_batch_tokens", "seed_window"),
    *("pooling", "pool_before", "pool_after", "share_layers"),
}
Resolve = Callable[[ServeSettings], ServeSettings]
"""Decides what is open, by the function that `serve` calls."""


def grid_configurations(
    path: Path, base: ServeSettings, device: str, num_layers: int, resolve: Resolve
) -> list[Configuration]:
    """Return a configuration for each setting of a grid, named by its settings.

    Raises `SettingsError` if the file or one of its settings is wrong.
    """
    own = base.selection.model_dump(exclude_unset=True, exclude={"declared"})
    found: dict[str, Configuration] = {}
    for values in read_grid(path, device, own).values():
        resolved = resolve(with_open_selection(base, values))
        name = describe_setting(setting_name(resolved.selection))
        found[name] = open_configuration(resolved, name, values, num_layers)
    return list(found.values())


def with_open_selection(base: ServeSettings, values: Mapping[str, Any]) -> ServeSettings:
    """Return `base` with `values` in the group ``selection``; what neither sets stays open."""
    own = base.selection.model_dump(exclude_unset=True, exclude={"declared"})
    if "policy" in values and values["policy"] != base.selection.policy:
        own.pop("options", None)
    policy = values.get("policy", base.selection.policy)
    return base.model_copy(update={"selection": resolve_selection(read_by(policy, own, values))})


def open_configuration(
    resolved: ServeSettings, budget: str, values: Mapping[str, Any], num_layers: int
) -> Configuration:
    """Return the configuration that leaves everything to `serve` but `values`.

    `resolved` are the settings as `serve` decides them.
    """
    return configuration_of(
        resolved.selection,
        budget,
        num_layers,
        selection=msgspec.to_builtins(dict(values)),
        is_open=True,
        resolved=named(resolved),
    )


def named(settings: ServeSettings) -> dict[str, Setting]:
    """Return every setting that matters to a result, as `serve` would start with it.

    Of files the names, without folders. Nothing of `settings` is open.
    """
    selection, placement = settings.selection, settings.rank_settings.placement
    channels = num_index_channels(selection)
    return {
        "setting": setting_name(selection),
        **selection.model_dump(mode="json", include=_AS_THEY_ARE),
        "fetch_cap": selection.fetch_cap_tokens,
        "sample_tokens": selection.num_samples,
        # Only where they are given: reports of before are read on.
        **({} if channels is None else {"index_channels": channels}),
        **({"anchors": list(selection.anchors)} if selection.anchors else {}),
        **({"calibration": Path(selection.calibration).name} if selection.calibration else {}),
        "predictor_dtype": selection.predictor_dtype_of(on_second_gpu=placement.has_far_pool),
        "exact_layers": list(selection.exact_layer_ids),
        "late_layers": selection.num_late,
        "attended_tokens": selection.row_tokens,
        "options": {
            key: without_paths([value])[0] if isinstance(value, str) else value
            for key, value in msgspec.to_builtins(dict(selection.options)).items()
        },
        "link": placement.link,
        "tensor_parallel": settings.tensor_parallel,
        "max_running_requests": settings.max_running_requests,
        "capacity_tokens": settings.cache.capacity_tokens,
        "kv_dtype": settings.cache.kv_dtype,
    }


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, with both values; the name that sums them up is left out."""
    names = [name for name in (*one, *other) if name != "setting"]
    return {
        name: (one.get(name), other.get(name))
        for name in dict.fromkeys(names)
        if one.get(name) != other.get(name)
    }


def check_prompts_fit(settings: ServeSettings, longest: int) -> None:
    """Refuse prompts that the server as served could not hold.

    Raises `SettingsError`, saying which setting to give.
    """
    capacity = settings.cache.capacity_tokens
    if longest > capacity:
        raise SettingsError(
            f"the longest request has {longest} tokens, and `serve` would have a cache of "
            f"{capacity}; add --set cache.capacity_tokens={-(-longest // 256) * 256}, or lower "
            "--context-tokens"
        )


def dense_note(resolved: Mapping[str, Any], longest: int, concurrency: int) -> str | None:
    """Return what to say where `serve` would attend to everything for prompts of this campaign.

    It does so for a request by its own length, and for a step by the tokens of all its requests, of
    which there are up to `concurrency`.
    """
    remedy = "add --set selection.dense_tokens=0 to measure the selection"
    dense, together = resolved.get("dense_tokens"), resolved.get("dense_batch_tokens")
    if isinstance(dense, int) and longest <= dense:
        return (
            f"as served, requests of up to {dense} tokens attend to everything, and no prompt here "
            f"is longer: this measures dense against dense; {remedy}"
        )
    if not isinstance(together, int) or longest > together:
        return None
    count = together // longest
    if count >= concurrency:
        measured = f"no step of {concurrency} prompts has more: this measures dense against dense"
    else:
        measured = f"steps of up to {count} of these prompts have no more: they are measured dense"
    return (
        f"as served, steps of up to {together} tokens in all attend to everything, and {measured}; "
        f"{remedy}"
    )
