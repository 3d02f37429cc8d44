# SPDX-License-Identifier: Apache-2.0
"""What link ``shared`` needs of the GPUs of a host."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.one_device import ONE_DEVICE_VARIABLE, is_peer_on_one_device
from tandemkv.cache_rank.protocol.placement import Placement

_PIPE_VARIABLE, _PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"  # CUDA's default


def check_shared_gpus(placement: Placement, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse two processes on GPUs where they would not run, or not beside each other.

    Parameters
    ----------
    placement : Placement
        As it was decided.
    environ : Mapping[str, str]
        Of this process.

    Raises
    ------
    SettingsError
        With what to use instead.
    """
    if placement.model_device != "cuda" or not placement.maps_memory:
        return
    if not is_peer_on_one_device():
        raise SettingsError(
            "transport=shared on GPUs has both processes on one GPU in this version, for tests "
            f"({ONE_DEVICE_VARIABLE}=1, under CUDA MPS); add --cache-ranks 0, or --transport peer "
            "on two GPUs"
        )
    pipes = Path(environ.get(_PIPE_VARIABLE, _PIPE_DIRECTORY))
    if not (pipes / "control").exists():
        raise SettingsError(
            f"{ONE_DEVICE_VARIABLE}=1 with transport=shared: two processes take turns of "
            f"milliseconds on a GPU without CUDA MPS, and none answers in {pipes}; start it with "
            f"nvidia-cuda-mps-control -d, or name its directory in {_PIPE_VARIABLE}"
        )
