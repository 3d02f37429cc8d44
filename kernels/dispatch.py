# SPDX-License-Identifier: Apache-2.0
"""Choice of the implementation of an operation by device."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

_REFERENCE = "tandemkv.kernels.reference"
_ON_GPU = "tandemkv.kernels.triton_ops"


@cache
def _resolve(module: str, function: str, device_type: str) -> Callable[..., Any]:
    if device_type == "cuda" and find_spec(f"{_ON_GPU}.{module}") is not None:
        found: Callable[..., Any] | None = getattr(
            import_module(f"{_ON_GPU}.{module}"), function, None
        )
        if found is not None:
            return found
    reference: Callable[..., Any] = getattr(import_module(f"{_REFERENCE}.{module}"), function)
    return reference


def resolve(module: str, function: str, device: torch.device) -> Callable[..., Any]:
    """Return the implementation of an operation for a device.

    ``cuda`` takes ``triton_ops`` where it has the function; everything else takes ``reference``.

    Returns
    -------
    callable
        With the signature of the public function. Its ``__module__`` tells
        which of them it is.

    Raises
    ------
    ImportError
        If ``triton_ops`` has the operation and Triton is not installed: the
        reference is no silent substitute for it.
    AttributeError
        If there is no such operation.
    """
    return _resolve(module, function, device.type)
