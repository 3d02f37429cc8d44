# SPDX-License-Identifier: Apache-2.0
"""Tensors of another GPU of this machine, used as if they were on one's own.

Over NVLink a kernel may read and write another GPU's memory by plain addresses. PyTorch refuses
to mix devices in one operation, so such memory gets a second tensor that carries the device of
the kernels that use it. Both tensors name the same bytes. Where one device stands for both, one
tensor does, too.
"""

from __future__ import annotations

import torch

from tandemkv.cache_rank.protocol.errors import SettingsError


def with_index(device: torch.device) -> torch.device:
    """Return `device` with the index of the current GPU if it has none."""
    index: int | None = device.index  # the stubs have it as int
    if device.type != "cuda" or index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def enable_peer_access(first: torch.device, second: torch.device) -> None:
    """Let kernels on either GPU use the memory of the other; on one device they can.

    Raises
    ------
    SettingsError
        If the two GPUs cannot.
    """
    if first == second:
        return
    for here, there in ((first, second), (second, first)):
        if not torch.cuda.can_device_access_peer(here, there):
            raise SettingsError(
                f"{here} cannot access the memory of {there}; transport=peer needs GPUs that are "
                "joined by NVLink (or PCIe peer access): use --cache-ranks 0"
            )
        # The first copy between two devices makes PyTorch enable access between them.
        torch.zeros(1, device=here).copy_(torch.zeros(1, device=there))
    torch.cuda.synchronize(first)
    torch.cuda.synchronize(second)


def seen_from(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, which may be on another GPU, as a tensor for kernels on `device`.

    It does not own the memory: keep `tensor` alive at least as long. What is on `device` is
    returned itself.
    """
    if tensor.device == device:
        return tensor
    storage = torch._C._construct_storage_from_data_pointer(
        tensor.data_ptr(), device, tensor.numel() * tensor.element_size()
    )
    if not tensor.is_contiguous():
        raise ValueError(f"tensor of shape {tuple(tensor.shape)} must be contiguous")
    return torch.empty(0, dtype=tensor.dtype, device=device).set_(
        storage, 0, tensor.shape, tensor.stride()
    )
