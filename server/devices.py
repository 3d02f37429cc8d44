# SPDX-License-Identifier: Apache-2.0
"""Which device each rank is on, and the data plane that follows from it."""

from __future__ import annotations

from collections.abc import Callable, Collection

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
            "the inference rank's process, or --cache-device cpu, which keeps it in host memory"
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


def resolve_cache_device(
    settings: ServeSettings, device: str, progress: Callable[[str], None]
) -> ServeSettings:
    """Fill in `cache_device`, and `cache_ranks` where K/V in host memory leave one choice.

    Raises
    ------
    SettingsError
        If the policy does not run there, or other settings contradict it.
    """
    selection, wanted = settings.selection, settings.cache_device
    devices = policy_devices(selection.policy)
    if wanted == "cuda" and device == "cpu":
        raise SettingsError(
            "cache_device=cuda, but the inference rank is on cpu; use --cache-device cpu, or "
            "--device cuda on a machine with a GPU"
        )
    found = choose_cache_device(wanted, device, devices)
    if found not in devices:
        flag = "--device" if device == "cpu" else "--cache-device"
        raise SettingsError(
            f"policy={selection.policy} does not run on {found}; use {flag} {devices[0]}"
        )
    settings = settings.model_copy(update={"cache_device": found})
    if device == "cpu" or found == "cuda":
        return settings
    reason = "cache_device=cpu" if wanted == "cpu" else f"policy={selection.policy} runs on cpu"
    _check_beside_gpu(settings, reason)
    if settings.cache_ranks is None or wanted == "auto":
        progress(f"cache rank in a process of its own, K/V in host memory: {reason}")
    return settings.model_copy(update={"cache_ranks": 1})


def _check_beside_gpu(settings: ServeSettings, reason: str) -> None:
    """Refuse what contradicts K/V in host memory beside a model on a GPU."""
    exchange = settings.exchange
    if settings.cache_ranks == 0:
        raise SettingsError(
            f"cache_ranks=0 keeps K/V on the inference rank's GPU, but {reason}; use --cache-ranks "
            "1, or leave it out"
        )
    if "transport" in exchange.model_fields_set and exchange.transport != "gloo":
        raise SettingsError(
            f"exchange.transport={exchange.transport} leads to no cache rank on a CPU, but "
            f"{reason}; use --transport gloo, or leave it out"
        )
    if settings.tensor_parallel > 1:
        raise SettingsError(
            f"tensor_parallel={settings.tensor_parallel} needs K/V on the GPUs in this version, "
            f"but {reason}; use --tp 1"
        )


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


def as_pair(settings: ServeSettings) -> ServeSettings:
    """Return the settings of a rank that is started by itself: one of two by default."""
    if settings.cache_ranks is not None:
        return settings
    return settings.model_copy(update={"cache_ranks": 1})


def resolve_transport(settings: ServeSettings, device: str) -> ServeSettings:
    """Decide the data plane between two ranks: as given, else by their devices.

    Parameters
    ----------
    settings : ServeSettings
        With `cache_device` decided; ``auto`` stands for `device`.
    device : {"cpu", "cuda"}
        The inference rank's.

    Raises
    ------
    SettingsError
        If the one that was given does not fit the devices.
    """
    exchange = settings.exchange
    if not settings.cache_ranks or exchange.is_in_process:
        return settings
    cache_device = device if settings.cache_device == "auto" else settings.cache_device
    on_one_kind = device == cache_device
    fitting = "gloo" if not on_one_kind else "nccl" if device == "cuda" else "shared"
    if exchange.is_shared and on_one_kind:
        return settings
    if "transport" not in exchange.model_fields_set:
        changed = exchange.model_copy(update={"transport": fitting})
        return settings.model_copy(update={"exchange": changed})
    is_on_host = device == cache_device == "cpu"
    if exchange.transport != fitting and not (is_on_host and exchange.transport == "gloo"):
        raise SettingsError(
            f"exchange.transport={exchange.transport} is not for an inference rank on {device} and "
            f"a cache rank on {cache_device}; use --transport {fitting}"
            + (", or --cache-device cpu" if fitting == "nccl" else "")
        )
    return settings
