# SPDX-License-Identifier: Apache-2.0
"""Which device each rank is on."""

from __future__ import annotations

import torch

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.settings.launch_settings import ServeSettings


def resolve_device(device: str) -> str:
    """Decide ``auto``: the CPU only where there is no GPU at all. Too few are refused later.

    Raises `SettingsError` if cuda cannot be used.
    """
    if device == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if device == "cuda":
        raise SettingsError("device=cuda: torch sees no CUDA device; use --device cpu")
    return "cpu"


def smallest_gpu(num_gpus: int) -> int:
    """Return the bytes of the smallest of the first GPUs."""
    return min(int(torch.cuda.get_device_properties(i).total_memory) for i in range(num_gpus))


def cache_rank_device(settings: ServeSettings) -> str:
    """Return the device of a cache rank that is started by itself: its GPU, if any, is here.

    The CPU for a policy that attends, whatever the model is on.

    Raises `SettingsError` if it is to be on a GPU, and there is none or the link has none.
    """
    from tandemkv.cache_rank.policies.registry import find_policy

    if "cuda" not in find_policy(settings.selection.policy).capabilities.devices:
        return "cpu"
    return resolve_device(settings.device)


def placed_alone(settings: ServeSettings, device: str) -> ServeSettings:
    """Return the settings of a cache rank on `device`, with its placement.

    `serve` hands it over; a cache rank that was started by itself is one of two processes.
    """
    settings = as_pair(settings)
    if settings.placement is not None:
        return settings
    if settings.wished_link != "message":  # by which each is started by itself
        check_one_cache_rank(settings)
    model_device = settings.device_or(device)
    if settings.selection.declared.attends and settings.wished_link != "message":
        model_device = settings.device_or(resolve_device("auto"))  # it is on the CPU beside both
    placement = settings.placement_on(model_device, "the cache rank was started by itself")
    return settings.model_copy(update={"placement": placement})


def check_one_cache_rank(settings: ServeSettings) -> None:
    """Refuse several engines for a rank that is started by itself.

    Raises `SettingsError`, with what starts as many.
    """
    if settings.tensor_parallel > 1 or settings.head_shards > 1:
        raise SettingsError(
            f"tensor_parallel={settings.tensor_parallel}, cache_ranks={settings.cache_ranks}: of "
            "several cache ranks or tensor-parallel ranks only `tandemkv serve` starts as many; "
            "use it, or --cache-ranks 1 and --tp 1"
        )


def as_pair(settings: ServeSettings) -> ServeSettings:
    """Return the settings of a rank that is started by itself: one of two by default."""
    if settings.cache_ranks is not None:
        return settings
    return settings.model_copy(update={"cache_ranks": 1})
