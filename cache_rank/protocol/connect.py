# SPDX-License-Identifier: Apache-2.0
"""Open the data plane that the settings name."""

from __future__ import annotations

from pathlib import Path

import torch

from .errors import SettingsError
from .transport import Transport


def check_transport(transport: str, device: torch.device) -> None:
    """Refuse a data plane that does not move what is on `device`.

    Raises
    ------
    SettingsError
        Saying which one does.
    """
    fitting = {"cpu": "gloo", "cuda": "nccl"}.get(device.type)
    if transport != fitting:
        raise SettingsError(
            f"exchange.transport={transport} does not move tensors between devices of type "
            f"{device.type}; use --transport {fitting}"
        )


def connect_transport(
    transport: str, store_path: Path, *, rank: int, timeout_s: float, device: torch.device
) -> Transport:
    """Meet the other rank; see `gloo_transport.connect_gloo`, `nccl_transport.connect_nccl`.

    Raises
    ------
    SettingsError
        If the data plane does not fit the device.
    CacheRankLostError
        If the other side does not come.
    """
    check_transport(transport, device)
    if device.type == "cuda":
        from .nccl_transport import connect_nccl

        return connect_nccl(store_path, rank=rank, timeout_s=timeout_s)
    from .gloo_transport import connect_gloo

    return connect_gloo(store_path, rank=rank, timeout_s=timeout_s)
