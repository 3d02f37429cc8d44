# SPDX-License-Identifier: Apache-2.0
"""CUDA's virtual memory management, played on a host: handles are anonymous files."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandemkv.cache_rank.protocol.memory import gpu_memory

GRANULARITY = 1 << 16


class Result(Enum):
    """What calls return."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_VALUE = 1


@dataclass
class FakeDriver:
    """Notes which GPU is asked for memory, and which may use a mapping.

    Attributes
    ----------
    peers : set of (int, int)
        Who may use whose memory; everybody its own.
    free : int
        Bytes that each GPU has.
    contexts : set of int
        GPUs that the process works on.
    """

    peers: set[tuple[int, int]] = field(default_factory=lambda: {(0, 1), (1, 0)})
    free: int = 1 << 30
    contexts: set[int] = field(default_factory=set)
    created: list[tuple[int, int]] = field(default_factory=list)
    opened: dict[int, list[int]] = field(default_factory=dict)
    owners: dict[int, int] = field(default_factory=dict)
    _owner_of_file: dict[int, int] = field(default_factory=dict)
    _maps: dict[int, tuple[mmap.mmap, torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Give names to what the bindings have as enumerations."""
        names = {
            "CUmemAllocationHandleType": "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR",
            "CUmemAllocationType": "CU_MEM_ALLOCATION_TYPE_PINNED",
            "CUmemLocationType": "CU_MEM_LOCATION_TYPE_DEVICE",
            "CUmemAllocationGranularity_flags": "CU_MEM_ALLOC_GRANULARITY_MINIMUM",
            "CUmemAccess_flags": "CU_MEM_ACCESS_FLAGS_PROT_READWRITE",
        }
        for kind, name in names.items():
            setattr(self, kind, SimpleNamespace(**{name: name}))
        self.CUresult = Result

    @staticmethod
    def _described() -> Any:
        return SimpleNamespace(location=SimpleNamespace())

    CUmemAllocationProp = CUmemAccessDesc = _described

    def cuMemGetAllocationGranularity(self, _properties: Any, _kind: Any) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, GRANULARITY

    def cuMemCreate(self, size: int, properties: Any, _flags: int) -> tuple[Result, int]:
        assert size % GRANULARITY == 0
        gpu = properties.location.id
        if size > self.free:
            return Result.CUDA_ERROR_OUT_OF_MEMORY, 0
        self.created.append((gpu, size))
        handle = os.memfd_create("fake")
        os.truncate(handle, size)
        self._owner_of_file[os.fstat(handle).st_ino] = gpu
        return Result.CUDA_SUCCESS, handle

    def cuMemExportToShareableHandle(self, handle: int, *_: Any) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, os.dup(handle)

    def cuMemImportFromShareableHandle(self, fd: int, _kind: Any) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, os.dup(fd)

    def cuMemRelease(self, handle: int) -> tuple[Result]:
        os.close(handle)
        return (Result.CUDA_SUCCESS,)

    def cuMemAddressReserve(self, size: int, *_: Any) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, (len(self.owners) + 1) * (1 << 40) + size

    def cuMemMap(self, address: int, size: int, _offset: int, handle: int, _: int) -> tuple[Result]:
        if os.fstat(handle).st_size != size:
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        mapped = mmap.mmap(handle, size)
        self._maps[address] = mapped, torch.frombuffer(mapped, dtype=torch.uint8)
        self.owners[address] = self._owner_of_file[os.fstat(handle).st_ino]
        return (Result.CUDA_SUCCESS,)

    def cuMemSetAccess(self, address: int, _size: int, access: Any, count: int) -> tuple[Result]:
        users = [each.location.id for each in access]
        assert len(users) == count
        owner = self.owners[address]
        if any(user != owner and (user, owner) not in self.peers for user in users):
            return (Result.CUDA_ERROR_INVALID_DEVICE,)
        self.opened[address] = users
        return (Result.CUDA_SUCCESS,)

    def cuDeviceGet(self, ordinal: int) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, ordinal

    def cuDevicePrimaryCtxGetState(self, device: int) -> tuple[Result, int, int]:
        return Result.CUDA_SUCCESS, 0, int(device in self.contexts)

    def cuMemUnmap(self, address: int, _size: int) -> tuple[Result]:
        del self._maps[address]
        return (Result.CUDA_SUCCESS,)

    def cuMemAddressFree(self, *_: Any) -> tuple[Result]:
        return (Result.CUDA_SUCCESS,)

    def storage(self, address: int, _device: torch.device, _nbytes: int) -> Any:
        """Play torch's construction of a storage over an address."""
        return self._maps[address][1].untyped_storage()

    @property
    def num_mapped(self) -> int:
        """Mappings that there are."""
        return len(self._maps)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let `gpu_memory` use this driver, and a torch that has such GPUs."""
        cuda = SimpleNamespace(
            mem_get_info=lambda _gpu: (self.free, self.free), synchronize=lambda _gpu: None
        )
        fake = SimpleNamespace(
            zeros=lambda *_, **__: None,
            empty=lambda size, dtype, device: torch.empty(size, dtype=dtype),
            uint8=torch.uint8,
            cuda=cuda,
            _C=SimpleNamespace(_construct_storage_from_data_pointer=self.storage),
        )
        monkeypatch.setattr(gpu_memory, "torch", fake)
        monkeypatch.setattr(gpu_memory, "import_module", lambda _name: self)
