# SPDX-License-Identifier: Apache-2.0
"""Small tensors from host values to a device, without waiting for its queue."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def to_device(
    values: Sequence[int] | Sequence[bool],
    device: torch.device,
    dtype: torch.dtype = torch.int64,
) -> torch.Tensor:
    """Return host values as a tensor ``[len(values)]`` on `device`.

    On a GPU the copy goes through pinned memory, behind what the current stream has queued: the
    host does not wait.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
