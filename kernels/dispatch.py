# SPDX-License-Identifier: Apache-2.0
"""Whether an operation runs in Triton or in plain torch."""

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_is_plain = ContextVar("is_plain", default=False)


def uses_triton(device: torch.device) -> bool:
    """Whether an operation on `device` that `triton_ops` has is launched there.

    If Triton is not installed the import fails: plain torch is no silent substitute.
    """
    return device.type == "cuda" and not _is_plain.get()


def plain(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function` in plain torch wherever its tensors are: what kernels are compared with."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        before = _is_plain.set(True)
        try:
            return function(*args, **kwargs)
        finally:
            _is_plain.reset(before)

    return run
