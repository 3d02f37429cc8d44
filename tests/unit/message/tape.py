# SPDX-License-Identifier: Apache-2.0
"""Plays a CUDA graph on a CPU: what was called is called again on the same tensors, without Python.

So what is captured must not depend on numbers that Python reads, nor on tensors that are new in
each step: both would be those of the capture, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tandemkv.cache_rank.pump import contents, stream_lanes
from tandemkv.cache_rank.pump.captured_steps import CapturedSteps

_KERNELS = (
    (contents, "take_changed_rows"),
    (contents, "put_changed_rows"),
    (stream_lanes, "wait_flags"),
    (stream_lanes, "raise_flags"),
)


class Tape(TorchDispatchMode):
    """Records calls of torch, and of kernels as a whole."""

    active: Tape | None = None

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Callable[[], None]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._calls.append(lambda: _again(func, args, kwargs, out))
        return out

    def call(self, kernel: Callable[..., None], args: Any, kwargs: dict[str, Any]) -> None:
        self._calls.append(lambda: kernel(*args, **kwargs))

    def play(self) -> None:
        for call in self._calls:
            call()


def _again(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
    found = func(*args, **kwargs)
    for old, new in zip(tree_leaves(out), tree_leaves(found), strict=True):
        is_new = isinstance(new, torch.Tensor) and new.data_ptr() != old.data_ptr()
        if is_new:  # else it is a view, or was written in place
            old.copy_(new)


def play_graphs(patch: pytest.MonkeyPatch) -> None:
    """Let lanes capture and replay as they do on a GPU."""

    def capture(self: CapturedSteps, key: Any, messages: Any, body: Callable[[], None]) -> None:
        tape = Tape.active = Tape()
        try:
            with tape:
                body()
        finally:
            Tape.active = None
        self._messages[key], self._replays[key] = messages, tape.play

    patch.setattr(CapturedSteps, "capture", capture)
    for module, name in _KERNELS:
        patch.setattr(module, name, _recorded(getattr(module, name)))


def _recorded(kernel: Callable[..., None]) -> Callable[..., None]:
    @wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> None:
        if Tape.active is None:
            kernel(*args, **kwargs)
        else:
            Tape.active.call(kernel, args, kwargs)

    return run
