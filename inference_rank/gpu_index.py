# SPDX-License-Identifier: Apache-2.0
"""Devices with the index of their GPU."""

from __future__ import annotations

import torch


def with_index(device: torch.device) -> torch.device:
    """Return `device` with the index of the current GPU if it has none."""
    index: int | None = device.index  # the stubs have it as int
    if device.type != "cuda" or index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())
