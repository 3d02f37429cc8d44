# SPDX-License-Identifier: Apache-2.0
"""What links ``shared`` and ``message`` need of the GPUs of a host."""

from __future__ import annotations

import os
from itertools import combinations
from pathlib import Path

import torch

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.memory.one_device import ONE_DEVICE_VARIABLE, is_on_one_device
from tandemkv.cache_rank.protocol.settings.placement import Placement

_PIPE_VARIABLE, _PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"  # CUDA's default


def check_shared_gpus(placement: Placement) -> None:
    """Refuse two processes on GPUs where they would not run, or not beside each other.

    The GPUs of a tensor-parallel rank and of its engines need peer access to each other, and
    nothing else. One GPU for both is for tests, and needs CUDA MPS. So does link ``message``, where
    a rank and its pump are on one GPU. That there are enough GPUs `resolve_placement` has checked.
    Raises `SettingsError`, with what to use instead.
    """
    if placement.engine_device != "cuda" or not placement.maps_memory:
        return
    if placement.has_far_host:
        _check_mps("transport=message, whose pump is on the GPU of its rank")
        return
    if is_on_one_device():
        _check_mps(f"{ONE_DEVICE_VARIABLE} with transport=shared")
        return
    num_models, count = placement.tp_per_node, placement.head_shards
    for model in range(num_models):
        first = num_models + model * count
        # Of several engines each reads what the others' GPUs have of the pool.
        for one, other in combinations((model, *range(first, first + count)), 2):
            if not are_peers(one, other):
                raise SettingsError(
                    f"transport=shared: cuda:{one} and cuda:{other} cannot access the memory of "
                    "each other, which takes NVLink or PCIe peer access; add --cache-ranks 0, or "
                    "name GPUs that can in CUDA_VISIBLE_DEVICES (nvidia-smi topo -p2p rw lists "
                    "them)"
                )


def are_peers(one: int, other: int) -> bool:
    """Whether two GPUs can access the memory of each other."""
    return all(
        torch.cuda.can_device_access_peer(here, there)
        for here, there in ((one, other), (other, one))
    )


def mps_directory() -> Path:
    """Return where CUDA MPS answers, if it runs."""
    return Path(os.environ.get(_PIPE_VARIABLE, _PIPE_DIRECTORY))


def runs_mps() -> bool:
    """Whether CUDA MPS runs."""
    return (mps_directory() / "control").exists()


def _check_mps(what: str) -> None:
    if not runs_mps():
        raise SettingsError(
            f"{what}: two processes take turns of milliseconds on a GPU without CUDA MPS, and none "
            f"answers in {mps_directory()}; start it with nvidia-cuda-mps-control -d, or name its "
            f"directory in {_PIPE_VARIABLE}"
        )
