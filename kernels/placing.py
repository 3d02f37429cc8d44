# SPDX-License-Identifier: Apache-2.0
"""Small tensors from host values to a device and back, without waiting for its queue."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def place(
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


class SideReader:
    """Reads tensors that are complete already, past what the current stream has queued."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` on the host: itself if it is there, else a copy.

        Its content must be in place: the copy waits for no stream.
        """
        if self._stream is None:
            return tensor
        with torch.cuda.stream(self._stream):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copy.copy_(tensor, non_blocking=True)
        self._stream.synchronize()
        return copy
