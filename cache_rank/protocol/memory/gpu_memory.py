# SPDX-License-Identifier: Apache-2.0
"""GPU memory that several processes of one host map, named by file descriptors.

It is made with CUDA's virtual memory management (``cuMemCreate``), through `cuda-bindings`. The
memory lives as long as any process has it mapped or holds its descriptor, so it outlives its maker.
A handle that was imported cannot be exported again: whoever is to pass memory on keeps the
descriptor. Memory of this kind cannot be passed with ``cudaIpc``.

Memory of either GPU is made by either process: making and mapping it takes no context on its owner.
A mapping is opened to every GPU of the two that the process works on, its own at least: so each
GPU reaches the memory of both. Where they have no peer access CUDA refuses that, when ranks start
and not in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from tandemkv.cache_rank.protocol.errors import ProtocolError, SettingsError

_GIB = 1 << 30


class GpuMemory:
    """Makes and maps memory of one GPU.

    `owner` has the memory. Kernels of `here` use it in this process: `owner`, or a GPU with peer
    access to it. `users` are all GPUs that may use what this process maps, those of them that it
    has a context on. Raises `SettingsError` if `cuda-bindings` is not installed.
    """

    def __init__(
        self, owner: torch.device, here: torch.device, users: Sequence[torch.device]
    ) -> None:
        self._owner, self._here = owner, here
        self._users = tuple(dict.fromkeys((here, *users)))
        try:
            self._cuda: Any = import_module("cuda.bindings.driver")
        except ImportError as error:
            raise SettingsError(
                "transport=shared on GPUs needs cuda-bindings: pip install 'tandemkv[gpu]'"
            ) from error
        torch.zeros(1, device=here)  # a context
        self._fd = self._cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        properties = self._properties = self._cuda.CUmemAllocationProp()
        properties.type = self._cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = owner.index
        properties.requestedHandleTypes = self._fd
        minimum = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self._granularity = int(
            self._call(self._cuda.cuMemGetAllocationGranularity, properties, minimum)
        )

    def create(self, name: str, nbytes: int) -> int:
        """Return the descriptor of new memory, whose content is undefined.

        Raises `SettingsError` if the GPU has not as much.
        """
        size = self._rounded(nbytes)
        result, handle = self._cuda.cuMemCreate(size, self._properties, 0)
        if result == self._cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            free, _ = torch.cuda.mem_get_info(self._owner)
            raise SettingsError(
                f"GPU memory of {name} needs {size / _GIB:.2f} GiB, {self._owner} has "
                f"{free / _GIB:.2f} GiB free; lower --cache-tokens or --max-running-requests"
            )
        if result != self._cuda.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"cuMemCreate on {self._owner}: {result.name}")
        try:
            return int(self._call(self._cuda.cuMemExportToShareableHandle, handle, self._fd, 0))
        finally:
            self._call(self._cuda.cuMemRelease, handle)

    def map(self, name: str, descriptor: int, nbytes: int) -> tuple[torch.Tensor, int]:
        """Map what a descriptor names; the descriptor stays the caller's.

        Returns ``[nbytes]`` uint8 on this process's GPU, which does not own the memory, and the
        address for `unmap`. Raises `ProtocolError` if the descriptor names no GPU memory of that
        size.
        """
        size, cuda = self._rounded(nbytes), self._cuda
        try:
            handle = self._call(cuda.cuMemImportFromShareableHandle, descriptor, self._fd)
        except RuntimeError as error:
            raise ProtocolError(f"mapped tensor {name!r} is no GPU memory: {error}") from error
        try:
            address = int(self._call(cuda.cuMemAddressReserve, size, 0, 0, 0))
            try:
                self._call(cuda.cuMemMap, address, size, 0, handle, 0)
            except RuntimeError as error:
                self._call(cuda.cuMemAddressFree, address, size)
                raise ProtocolError(
                    f"mapped tensor {name!r} is not of {size} bytes of GPU memory: {error}; start "
                    "both ranks with the same settings"
                ) from error
        finally:
            self._call(cuda.cuMemRelease, handle)  # the mapping holds the memory
        users = [gpu for gpu in self._users if gpu == self._here or self._has_context(gpu)]
        access = [self._access_of(user) for user in users]
        try:
            self._call(cuda.cuMemSetAccess, address, size, access, len(access))
        except RuntimeError as error:
            self.unmap(address, nbytes)
            raise SettingsError(
                f"{' and '.join(map(str, users))} cannot use the memory of {self._owner}: {error}; "
                "transport=shared needs two GPUs with peer access to each other: use "
                "--cache-ranks 0"
            ) from error
        storage = torch._C._construct_storage_from_data_pointer(address, self._here, nbytes)
        memory = torch.empty(0, dtype=torch.uint8, device=self._here)
        return memory.set_(storage, 0, (nbytes,), (1,)), address

    def unmap(self, address: int, nbytes: int) -> None:
        """Take back what `map` did, once nothing that was queued uses it."""
        torch.cuda.synchronize(self._here)
        size = self._rounded(nbytes)
        self._call(self._cuda.cuMemUnmap, address, size)
        self._call(self._cuda.cuMemAddressFree, address, size)

    def _has_context(self, gpu: torch.device) -> bool:
        """Whether this process works on `gpu`: to a GPU without a context nothing can be opened."""
        device = self._call(self._cuda.cuDeviceGet, gpu.index)
        result, _, is_active = self._cuda.cuDevicePrimaryCtxGetState(device)
        if result != self._cuda.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"cuDevicePrimaryCtxGetState of {gpu}: {result.name}")
        return bool(is_active)

    def _access_of(self, user: torch.device) -> Any:
        access = self._cuda.CUmemAccessDesc()
        access.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = user.index
        access.flags = self._cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access

    def _rounded(self, nbytes: int) -> int:
        return -(-max(1, nbytes) // self._granularity) * self._granularity

    def _call(self, function: Any, *arguments: Any) -> Any:
        result, *values = function(*arguments)
        if result != self._cuda.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{function.__name__}: {result.name}")
        return values[0] if values else None
