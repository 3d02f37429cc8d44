# SPDX-License-Identifier: Apache-2.0
"""Choice of the implementation of an operation by device."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

_REFERENCE = "tandemkv.kernels.reference"
# On a GPU, in this order.
_ON_GPU = ("tandemkv.kernels.triton_ops", "tandemkv.kernels.library_ops")


@cache
def _resolve(module: str, function: str, device_type: str) -> Callable[..., Any]:
    for package in _ON_GPU if device_type == "cuda" else ():
        if find_spec(f"{package}.{module}") is None:
            continue
        found: Callable[..., Any] | None = getattr(
            import_module(f"{package}.{module}"), function, None
        )
        if found is not None:
            return found
    reference: Callable[..., Any] = getattr(import_module(f"{_REFERENCE}.{module}"), function)
    return reference


def resolve(module: str, function: str, device: torch.device) -> Callable[..., Any]:
    """Return the implementation of an operation for a device.

    Parameters
    ----------
    module, function : str
        The operation, for example ``"pack"``, ``"gather_pack"``.
    device : torch.device
        Where its tensors are. ``cuda`` takes ``triton_ops`` or else ``library_ops``
        where they have the function; everything else takes ``reference``.

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
