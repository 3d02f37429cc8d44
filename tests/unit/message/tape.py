# SPDX-License-Identifier: Apache-2.0
"""Plays a CUDA graph on a CPU: what was called is called again on the same tensors, without Python.

So what is captured must not depend on numbers that Python reads, nor on tensors that are new in
each step: both would be those of the capture, as on a GPU. What CUDA would not capture is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from inspect import isfunction
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tandemkv.cache_rank.pump.captured_steps import CapturedSteps

_aten = torch.ops.aten
_REFUSED = {
    _aten._local_scalar_dense: "reads a number of the device",
    _aten.equal: "reads whether tensors are equal",
    _aten.nonzero: "has as many results as it finds",
    _aten.masked_select: "has as many results as it finds",
    _aten._unique2: "has as many results as it finds",
}
_CALLS = {
    torch.Tensor.tolist: "reads numbers of the device",
    torch.Tensor.numpy: "reads numbers of the device",
    torch.Tensor.cpu: "waits for a copy",
    torch.tensor: "copies numbers of Python from memory that is not pinned",
    torch.as_tensor: "copies numbers of Python from memory that is not pinned",
    torch.from_numpy: "copies numbers of Python from memory that is not pinned",
}
_INDEXED = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}
_NO_KERNELS = {_aten.empty, _aten._unsafe_view}
_MASKS = (torch.bool, torch.uint8)


class NotCapturedError(Exception):
    """A call that CUDA refuses in a capture, or that would not be repeated by the graph."""


class _Calls(TorchFunctionMode):
    """Refuses what on a CPU asks no operation of torch."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if Tape.active is not None and func in _CALLS:
            raise NotCapturedError(f"{func.__name__} {_CALLS[func]}")
        return func(*args, **(kwargs or {}))


class Tape(TorchDispatchMode):
    """Records calls of torch, and of kernels as a whole.

    Nothing of a graph runs while it is captured. Here calls of torch do, for what they return, and
    with `runs_kernels` those of kernels.
    """

    active: Tape | None = None

    def __init__(self, *, runs_kernels: bool = False) -> None:
        super().__init__()
        self._calls: list[Callable[[], None]] = []
        self.num_kernels = 0
        """How many calls do something on a GPU; a kernel of ours counts as one."""
        self._runs_kernels = runs_kernels

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if Tape.active is None:  # in a kernel
            return func(*args, **kwargs)
        _check(func, args)
        out = func(*args, **kwargs)
        self.num_kernels += not func.is_view and func.overloadpacket not in _NO_KERNELS
        self._calls.append(lambda: _again(func, args, kwargs, out))
        return out

    def record(self, body: Callable[[], None]) -> Tape:
        """Record what `body` calls; returns itself."""
        Tape.active = self
        try:
            with self, _Calls():
                body()
        finally:
            Tape.active = None
        return self

    def call(self, kernel: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Record a call of a kernel; returns what it does, if it is run."""
        out = None
        if self._runs_kernels:
            Tape.active = None  # one that it calls is a part of it
            out = kernel(*args, **kwargs)
            Tape.active = self
        self.num_kernels += 1
        self._calls.append(lambda: _again(kernel, args, kwargs, out))
        return out

    def play(self) -> None:
        """Do what was recorded."""
        for call in self._calls:
            call()


def _check(func: Any, args: Any) -> None:
    operation = func.overloadpacket
    why = _REFUSED.get(operation)
    if operation in _INDEXED and any(x is not None and x.dtype in _MASKS for x in args[1]):
        why = "has as many results as its mask has"
    if why is not None:
        raise NotCapturedError(f"{operation} {why}")


def _again(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
    found = func(*args, **kwargs)
    for old, new in zip(tree_leaves(out), tree_leaves(found), strict=True):
        is_new = isinstance(new, torch.Tensor) and new.data_ptr() != old.data_ptr()
        if is_new:  # else it is a view, or was written in place
            old.copy_(new)


def play_graphs(patch: pytest.MonkeyPatch) -> None:
    """Let lanes capture and replay as they do on a GPU."""

    def capture(self: CapturedSteps, key: Any, messages: Any, body: Callable[[], None]) -> None:
        self._messages[key], self._replays[key] = messages, Tape().record(body).play

    patch.setattr(CapturedSteps, "capture", capture)
    record_kernels(patch)


def record_kernels(patch: pytest.MonkeyPatch) -> None:
    """Let tapes have kernels as a whole, whatever calls them."""
    for module in [x for name, x in sys.modules.items() if name.startswith("tandemkv.")]:
        for name, found in list(vars(module).items()):
            if isfunction(found) and "uses_triton" in found.__code__.co_names:
                patch.setattr(module, name, _recorded(found))


def _recorded(kernel: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        if Tape.active is None:
            return kernel(*args, **kwargs)
        return Tape.active.call(kernel, args, kwargs)

    return run
