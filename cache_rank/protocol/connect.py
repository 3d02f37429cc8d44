# SPDX-License-Identifier: Apache-2.0
"""Open the data plane that the settings name."""

from __future__ import annotations

from pathlib import Path

import torch

from .errors import SettingsError
from .transport import Transport

_DATA_PLANES = {"cpu": ("gloo",), "cuda": ("nccl", "gloo")}


def check_transport(transport: str, device: torch.device) -> None:
    """Refuse a data plane that does not move what is on `device`.

    Raises
    ------
    SettingsError
        Saying which one does.
    """
    fitting = _DATA_PLANES.get(device.type, ())
    if transport not in fitting:
        raise SettingsError(
            f"exchange.transport={transport} does not move tensors on a device of type "
            f"{device.type}; use --transport {' or '.join(fitting)}"
        )


def connect_transport(
    transport: str,
    store_path: Path,
    *,
    rank: int,
    timeout_s: float,
    device: torch.device,
    connect_timeout_s: float = 60.0,
) -> Transport:
    """Meet the other rank; see `gloo_transport.connect_gloo`, `nccl_transport.connect_nccl`.

    gloo moves host memory: tensors on a GPU pass through `host_staged.HostStagedTransport`.

    Raises
    ------
    SettingsError
        If the data plane does not fit the device.
    CacheRankLostError
        If the other side does not come.
    """
    check_transport(transport, device)
    if transport == "nccl":
        from .nccl_transport import connect_nccl

        return connect_nccl(
            store_path, rank=rank, timeout_s=timeout_s, connect_timeout_s=connect_timeout_s
        )
    from .gloo_transport import connect_gloo

    gloo = connect_gloo(
        store_path, rank=rank, timeout_s=timeout_s, connect_timeout_s=connect_timeout_s
    )
    if device.type == "cpu":
        return gloo
    from .host_staged import HostStagedTransport

    return HostStagedTransport(gloo, device)
