# SPDX-License-Identifier: Apache-2.0
"""Launches that compile for a GPU which is not here instead of running.

Tensors are torch's fake ones, of the device ``cuda:<capability>``: the product's own code takes the
path of a GPU, and Triton's own launcher makes signature and constants of what it is handed. Only
the last step is left out. For a process of its own (`own_process`), which sees no GPU.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction, MockTensor

from tandemkv.kernels.streams import let_chain

_OPERATIONS = Path(__file__).resolve().parents[2] / "kernels/triton_ops"


class Target(NamedTuple):
    """Compute capability, and what a GPU of it has.

    `shared_bytes` is what one program may have of shared memory (CUDA C++ Programming Guide,
    technical specifications per compute capability), `num_sms` the number of multiprocessors.
    """

    name: str
    capability: int
    shared_bytes: int
    num_sms: int

    @property
    def device(self) -> torch.device:
        """The device that stands for it."""
        return torch.device("cuda", self.capability)


TARGETS = (
    Target("A100", 80, 163 << 10, 108),
    Target("L40S", 89, 99 << 10, 142),
    Target("H100", 90, 227 << 10, 132),
)


class Compiled(NamedTuple):
    """A kernel's name (`name_of`) and what Triton made of it; nothing where that was not wanted."""

    name: str
    kernel: Any


class _Driver:
    """What Triton asks a driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)


def name_of(kernel: JITFunction) -> str:
    """Return a kernel's module and name."""
    return f"{kernel.module.rpartition('.')[2]}.{kernel.fn.__name__}"


def _sliced(tensor: FakeTensor, index: Any) -> torch.Tensor:
    """Slice as ``tensor[index]``, which asks for CUDA where torch was built without."""
    parts = index if isinstance(index, tuple) else (index,)
    first = 0
    if parts[0] is Ellipsis:
        parts, first = parts[1:], tensor.dim() - len(parts) + 1
    found: torch.Tensor = tensor
    for dim, part in enumerate(parts, first):
        found = torch.ops.aten.slice(found, dim, part.start, part.stop, part.step or 1)
    return found


@contextmanager
def compiling_for(target: Target, *, compiles: bool = True) -> Iterator[list[Compiled]]:
    """Within it launches compile for `target`, and are listed; without `compiles` only listed."""
    found: list[Compiled] = []
    launch = JITFunction.run

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        del warmup
        # Memory of GPUs begins at multiples of more bytes than Triton distinguishes.
        arguments = [MockTensor(x.dtype) if isinstance(x, torch.Tensor) else x for x in args]
        kernel = launch(self, *arguments, grid=grid, warmup=True, **options) if compiles else None
        found.append(Compiled(name_of(self), kernel))

    gpu = SimpleNamespace(
        multi_processor_count=target.num_sms,
        shared_memory_per_multiprocessor=target.shared_bytes + 1024,
    )
    let_chain(target.device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        patch.setattr(FakeTensor, "__getitem__", _sliced)
        patch.setattr(driver, "_active", _Driver(target.capability))
        patch.setattr(torch.cuda, "get_device_properties", lambda _device: gpu)
        patch.setattr(torch.cuda, "get_device_capability", lambda index: divmod(index, 10))
        with FakeTensorMode():
            yield found


def check_launch(launch: Callable[[torch.device], object], target: Target) -> None:
    """Compile what `launch` launches; fail unless that works and fits into shared memory."""
    with compiling_for(target) as compiled:
        launch(target.device)
    assert compiled
    for name, kernel in compiled:
        assert kernel.metadata.target.arch == target.capability
        assert len(kernel.asm["cubin"]) > 0
        assert kernel.metadata.shared <= target.shared_bytes, name
        # Kernels wait for one another's end by instructions that only Hopper and later have.
        assert ("griddepcontrol" in kernel.asm["ptx"]) <= (target.capability >= 90), name


def launched_kernels() -> set[str]:
    """Return the names of all kernels that the product has a launch of, ``kernel[grid](...)``."""
    found = set()
    for path in _OPERATIONS.glob("[!_]*.py"):
        module = import_module(f"tandemkv.kernels.triton_ops.{path.stem}")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
                kernel = getattr(module, node.value.id, None)
                if isinstance(kernel, JITFunction):
                    found.add(name_of(kernel))
    return found
