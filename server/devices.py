# SPDX-License-Identifier: Apache-2.0
"""Which device each rank is on."""

from __future__ import annotations

from collections.abc import Collection

import torch

from tandemkv.cache_rank.protocol.errors import SettingsError

from .settings import ServeSettings


def resolve_device(
    device: str,
    *,
    cache_ranks: int | None = None,
    num_ranks_here: int = 2,
    cache_device: str = "auto",
) -> str:
    """Decide the inference rank's device. A cache rank that was asked for may need a GPU too.

    Parameters
    ----------
    device : {"auto", "cpu", "cuda"}
        As given.
    cache_ranks : int, optional
        As given.
    num_ranks_here : int
        Processes with a GPU of their own that this launch starts, if there is a cache rank.
    cache_device : {"auto", "cpu", "cuda"}
        On ``cpu`` the cache rank needs no GPU.

    Raises
    ------
    SettingsError
        If cuda is asked for and cannot be used.
    """
    if device == "cpu":
        return "cpu"
    has_cuda = torch.cuda.is_available()
    num_needed = num_ranks_here if cache_ranks and cache_device != "cpu" else 1
    num_gpus = torch.cuda.device_count() if has_cuda else 0
    if device == "auto":
        return "cuda" if num_gpus >= num_needed else "cpu"
    if not has_cuda:
        raise SettingsError("device=cuda: torch sees no CUDA device; use --device cpu")
    if num_gpus < num_needed:
        raise SettingsError(
            f"device=cuda with cache_ranks={cache_ranks} needs {num_needed} GPUs, {num_gpus} seen "
            "(CUDA_VISIBLE_DEVICES counts); add --cache-ranks 0, which keeps the cache rank inside "
            "the inference rank's process"
        )
    return "cuda"


def policy_devices(policy: str) -> tuple[str, ...]:
    """Return the device types that a policy, which must be known, runs on."""
    from tandemkv.cache_rank.policies.registry import find_policy

    return find_policy(policy).capabilities.devices


def choose_cache_device(wanted: str, device: str, devices: Collection[str]) -> str:
    """Decide ``auto``: the inference rank's device, but cpu for what runs on no GPU.

    Parameters
    ----------
    wanted : {"auto", "cpu", "cuda"}
        The setting.
    device : {"auto", "cpu", "cuda"}
        The inference rank's; ``auto`` if that is not known yet, and may be returned then.
    devices : collection of str
        Where the policy runs.
    """
    if wanted != "auto":
        return wanted
    return "cpu" if "cuda" not in devices else device


def resolve_cache_device(settings: ServeSettings, device: str) -> ServeSettings:
    """Fill in `cache_device`.

    Raises
    ------
    SettingsError
        If the policy does not run there, or it is not the kind of device that the model is on.
    """
    policy, wanted = settings.selection.policy, settings.cache_device
    devices = policy_devices(policy)
    if wanted == "cuda" and device == "cpu":
        raise SettingsError(
            "cache_device=cuda, but the inference rank is on cpu; use --cache-device cpu, or "
            "--device cuda on a machine with a GPU"
        )
    found = choose_cache_device(wanted, device, devices)
    if found not in devices:
        flag = "--device" if device == "cpu" else "--cache-device"
        raise SettingsError(f"policy={policy} does not run on {found}; use {flag} {devices[0]}")
    if device != "cpu" and found == "cpu":
        reason = "cache_device=cpu" if wanted == "cpu" else f"policy={policy} runs on a CPU only"
        raise SettingsError(
            f"{reason}, and a cache rank on the host's CPU beside a model on a GPU is not "
            "available in this version; use --device cpu for both, or another --policy"
        )
    return settings.model_copy(update={"cache_device": found})


def cache_rank_device(settings: ServeSettings) -> str:
    """Return the device of a cache rank that is started by itself: its GPU, if any, is here.

    Raises
    ------
    SettingsError
        If it is to be on a GPU and there is none.
    """
    found = choose_cache_device(
        settings.cache_device, settings.device, policy_devices(settings.selection.policy)
    )
    return resolve_device(found, num_ranks_here=1)


def placed_alone(settings: ServeSettings, device: str) -> ServeSettings:
    """Return the settings of a cache rank on `device`, with its placement.

    `serve` hands it over; a cache rank that was started by itself is one of two processes.
    """
    settings = as_pair(settings.model_copy(update={"cache_device": device}))
    if settings.placement is not None:
        return settings
    check_one_cache_rank(settings)
    placement = settings.placement_on(
        settings.device_or(device), "the cache rank was started by itself"
    )
    return settings.model_copy(update={"placement": placement})


def check_one_cache_rank(settings: ServeSettings) -> None:
    """Refuse several cache ranks for a rank that is started by itself.

    Raises
    ------
    SettingsError
        With what starts as many.
    """
    if settings.tensor_parallel > 1 or settings.head_shards > 1:
        raise SettingsError(
            f"tensor_parallel={settings.tensor_parallel}, cache_ranks={settings.cache_ranks}: of "
            "several cache ranks only `tandemkv serve` starts as many; use it, or --cache-ranks 1 "
            "and --tp 1"
        )


def as_pair(settings: ServeSettings) -> ServeSettings:
    """Return the settings of a rank that is started by itself: one of two by default."""
    if settings.cache_ranks is not None:
        return settings
    return settings.model_copy(update={"cache_ranks": 1})
