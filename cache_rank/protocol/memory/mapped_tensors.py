# SPDX-License-Identifier: Apache-2.0
"""Named tensors in memory that several processes of one host map.

On a host each tensor is an anonymous file (`host_memory`), which a GPU may use too
(`pinned_memory`). On a GPU it is memory of CUDA's virtual memory management (`gpu_memory`). Either
lives as long as any process has it mapped or holds its descriptor; descriptors travel over a Unix
socket (`descriptor_socket`).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Self

import torch

from tandemkv.cache_rank.protocol.errors import ProtocolError

from .descriptor_messages import Home, TensorSpec, close_all
from .gpu_memory import GpuMemory
from .host_memory import check_memory, create_memory, map_memory
from .pinned_memory import PinnedMemory


@dataclass(frozen=True, kw_only=True)
class Homes:
    """Where mapped tensors lie, as one process sees it.

    Each tensor names its home, and that is all that tells one GPU, two GPUs and a host apart.
    """

    inference: torch.device
    engine: torch.device
    """Of the forward pass, and of the engine; on a CPU all memory is the host's."""
    here: torch.device
    """Whose kernels use them in this process."""
    pools: tuple[torch.device, ...] = ()
    """GPUs of several cache ranks of one inference rank: home ``pool_n`` is the n-th of them."""
    host_engine: bool = False
    """Whether the engine is on the host's CPU and the model on a GPU (`Placement.host_engine`).
    All that both map is the host's memory then: the engine's process maps no GPU's."""

    @classmethod
    def on_host(cls) -> Self:
        """All memory is the host's."""
        cpu = torch.device("cpu")
        return cls(inference=cpu, engine=cpu, here=cpu)

    @classmethod
    def beside_gpu(cls, inference: torch.device, here: torch.device) -> Self:
        """Return them of a model on `inference` and an engine on the CPU; `here` is one of both."""
        return cls(inference=inference, engine=torch.device("cpu"), here=here, host_engine=True)

    @property
    def are_on_gpu(self) -> bool:
        """Whether the forward pass is queued on a GPU, or to be taken for it.

        Its kernels poll and raise flags then, at addresses that outlive an epoch.
        """
        return self.host_engine or self.here.type == "cuda"

    def gpu(self, home: str) -> GpuMemory | PinnedMemory | None:
        """Return what makes memory of `home` and maps it for a GPU; None: it is the host's alone.

        In an engine's process on the CPU all of it is.
        """
        if home == "host" or self.here.type != "cuda":
            return None
        owner = self._owner(home)
        if owner not in self._memory:
            users = (self.inference, self.engine, *self.pools)
            self._memory[owner] = (
                PinnedMemory(self.here) if self.host_engine else GpuMemory(owner, self.here, users)
            )
        return self._memory[owner]

    def with_engine(self, number: int) -> Homes:
        """Return them as the connection to cache rank `number` of several has them."""
        return replace(self, engine=self.pools[number]) if self.pools else self

    def _owner(self, home: str) -> torch.device:
        if self.host_engine:
            return self.engine
        if home in ("inference", "engine"):
            return self.inference if home == "inference" else self.engine
        number = int(home.removeprefix("pool_"))
        if number >= len(self.pools):
            raise ProtocolError(
                f"memory of cache rank {number} is mapped, and there are {len(self.pools)} with a "
                "part of the pool; start all ranks with the same --cache-ranks"
            )
        return self.pools[number]

    @cached_property
    def _memory(self) -> dict[torch.device, GpuMemory | PinnedMemory]:
        return {}


class MappedTensors:
    """The mapped tensors of one process, by name. Used by one thread.

    Without `homes` all lie on the host.
    """

    def __init__(self, homes: Homes | None = None) -> None:
        self.homes = homes or Homes.on_host()
        self._tensors: dict[str, torch.Tensor] = {}
        self._addresses: dict[str, int] = {}
        self._descriptors: dict[str, int] = {}
        self._specs: dict[str, TensorSpec] = {}
        # Who is gone cannot `close`; what it had mapped may still be in use.
        last = weakref.finalize(self, lambda left: close_all(left.values()), self._descriptors)
        last.atexit = False

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """What there is, in the order in which it was made."""
        return tuple(self._specs.values())

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors of `specs`, in their order; this object keeps them open."""
        return tuple(self._descriptors[name] for name in self._specs)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.specs)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def get(self, name: str) -> torch.Tensor | None:
        """Return the tensor `name`, None if there is none."""
        return self._tensors.get(name)

    def allocate(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | str, home: Home = "engine"
    ) -> torch.Tensor:
        """Return the tensor `name`, made of zeros if there is none yet.

        `name` is unique in this process, `dtype` one of `ITEM_BYTES`. Raises `SettingsError` if the
        host or the GPU lacks memory, or a limit of the process is in the way; `ProtocolError` if
        there is one of another shape or dtype.
        """
        spec = TensorSpec(name, tuple(shape), str(dtype).removeprefix("torch."), home)
        known = self._specs.get(name)
        if known is not None and known != spec:
            raise ProtocolError(
                f"mapped tensor {name!r} is {known.dtype}{list(known.shape)}, "
                f"{spec.dtype}{list(spec.shape)} was asked for; start both ranks with the same "
                "settings"
            )
        if known is not None:
            return self._tensors[name]
        gpu = self.homes.gpu(home)
        if gpu is None:
            return self._keep(spec, create_memory(name, spec.nbytes))
        made = self._keep(spec, gpu.create(name, spec.nbytes))
        return made.zero_() if isinstance(gpu, GpuMemory) else made

    def allocate_all(self, specs: Iterable[TensorSpec]) -> None:
        """`allocate` a tensor for each of `specs`."""
        for spec in specs:
            self.allocate(spec.name, spec.shape, spec.dtype, spec.home)

    def allocate_sparse(self, spec: TensorSpec) -> torch.Tensor:
        """Make a tensor on the host that takes memory only where it was written.

        For what is given back in parts. Where the host has none left, writing ends the process.
        """
        return self._keep(spec, create_memory(spec.name, spec.nbytes, is_sparse=True))

    def attach(self, spec: TensorSpec, descriptor: int) -> torch.Tensor:
        """Map what another process made; the descriptor is ours from now on, even on an error.

        Raises `ProtocolError` if the file is not a sealed one of exactly the bytes that `spec`
        needs.
        """
        try:
            if spec.name in self._specs:
                raise ProtocolError(f"mapped tensor {spec.name!r} came twice")
            if not isinstance(self.homes.gpu(spec.home), GpuMemory):
                check_memory(spec, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return self._keep(spec, descriptor)

    def hand_over(self, names: Iterable[str], to: MappedTensors) -> None:
        """Let `to`, of the same homes, have the tensors `names` instead of this object."""
        for name in names:
            to._tensors[name] = self._tensors.pop(name)
            to._descriptors[name] = self._descriptors.pop(name)
            to._specs[name] = self._specs.pop(name)
            if name in self._addresses:
                to._addresses[name] = self._addresses.pop(name)

    def borrow(self, *others: MappedTensors) -> None:
        """Show the tensors of `others`, which keep them and their descriptors."""
        for other in others:
            self._tensors.update(other._tensors)

    def forget(self, name: str) -> None:
        """Close the descriptor of `name`, and unmap it once its tensor is used no more."""
        os.close(self._descriptors.pop(name))
        spec = self._specs.pop(name)
        del self._tensors[name]
        gpu, address = self.homes.gpu(spec.home), self._addresses.pop(name, None)
        if gpu is not None and address is not None:
            gpu.unmap(address, spec.nbytes)

    def close(self) -> None:
        """`forget` all. Idempotent."""
        for name in list(self._specs):
            self.forget(name)

    def _keep(self, spec: TensorSpec, descriptor: int) -> torch.Tensor:
        gpu = self.homes.gpu(spec.home)
        try:
            if gpu is None:
                whole = map_memory(spec.name, descriptor, spec.nbytes)
            else:
                whole, address = gpu.map(spec.name, descriptor, spec.nbytes)
                self._addresses[spec.name] = address
        except BaseException:
            os.close(descriptor)
            raise
        self._specs[spec.name], self._descriptors[spec.name] = spec, descriptor
        tensor = whole.view(getattr(torch, spec.dtype))[: prod(spec.shape)].view(spec.shape)
        self._tensors[spec.name] = tensor
        return tensor
