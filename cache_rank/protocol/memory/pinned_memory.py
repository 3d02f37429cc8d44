# SPDX-License-Identifier: Apache-2.0
"""Host memory that several processes map, and that kernels of one GPU use as well.

The memory is that of `host_memory`. The process of the GPU registers its mapping with CUDA, through
`cuda-bindings`: the pages are locked, and kernels read and write them over PCIe. That needs no
limit of locked memory (``ulimit -l``): the driver locks them, not ``mlock``. Where CUDA cannot, the
ranks do not start.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from tandemkv.cache_rank.protocol.errors import SettingsError

from .host_memory import create_memory, map_memory

_GIB = 1 << 30


class PinnedMemory:
    """Makes host memory, and maps it for the GPU `here`; see `GpuMemory`, whose part it takes.

    Raises `SettingsError` if `cuda-bindings` is not installed.
    """

    def __init__(self, here: torch.device) -> None:
        self._here = here
        try:
            self._cuda: Any = import_module("cuda.bindings.runtime")
        except ImportError as error:
            raise SettingsError(
                "host memory beside a GPU needs cuda-bindings: pip install 'tandemkv[gpu]'"
            ) from error
        self._mapped: dict[int, torch.Tensor] = {}

    def create(self, name: str, nbytes: int) -> int:
        """Return the descriptor of new memory of zeros.

        Raises `SettingsError` if the host has not as much.
        """
        return create_memory(name, nbytes)

    def map(self, name: str, descriptor: int, nbytes: int) -> tuple[torch.Tensor, int]:
        """Map what a descriptor names, as `GpuMemory.map` does.

        Raises `SettingsError` if the process may not map as much, or CUDA cannot lock it.
        """
        on_host, runtime = map_memory(name, descriptor, nbytes), self._cuda
        address = on_host.data_ptr()
        flags = runtime.cudaHostRegisterPortable | runtime.cudaHostRegisterMapped
        with torch.cuda.device(self._here):
            (result,) = runtime.cudaHostRegister(address, nbytes, flags)
            if result != runtime.cudaError_t.cudaSuccess:
                raise SettingsError(
                    f"host memory of {name} ({nbytes / _GIB:.2f} GiB) cannot be locked for "
                    f"{self._here}: {result.name}; lower --cache-tokens, or serve with --device cpu"
                )
            self._mapped[address] = on_host
            try:
                # The same address, unless a GPU is seen that cannot use it.
                found = int(self._call(runtime.cudaHostGetDevicePointer, address, 0))
            except RuntimeError as error:
                self.unmap(address, nbytes)
                raise SettingsError(
                    f"{self._here} cannot use host memory of {name}: {error}; serve with "
                    "--device cpu"
                ) from error
        storage = torch._C._construct_storage_from_data_pointer(found, self._here, nbytes)
        memory = torch.empty(0, dtype=torch.uint8, device=self._here)
        return memory.set_(storage, 0, (nbytes,), (1,)), address

    def unmap(self, address: int, nbytes: int) -> None:
        """Take back what `map` did, once nothing that was queued uses it."""
        del nbytes
        torch.cuda.synchronize(self._here)
        self._call(self._cuda.cudaHostUnregister, address)
        del self._mapped[address]

    def _call(self, function: Any, *arguments: Any) -> Any:
        result, *values = function(*arguments)
        if result != self._cuda.cudaError_t.cudaSuccess:
            raise RuntimeError(f"{function.__name__}: {result.name}")
        return values[0] if values else None
