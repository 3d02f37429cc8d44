# SPDX-License-Identifier: Apache-2.0
"""Argument checks shared by the operations of `tandemkv.kernels`.

Only shapes, dtypes and devices are looked at, never values on a device, so a
check neither synchronises with a GPU nor breaks a graph capture.
"""

from typing import NoReturn

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
KV_FLOATS = (*FLOATS, torch.float8_e4m3fn)
"""What K/V may be kept in: keys and values are read as they are, without a scale."""
FLOAT32 = (torch.float32,)
INTS = (torch.int32, torch.int64)
INT32 = (torch.int32,)
INT64 = (torch.int64,)
INT8 = (torch.int8,)
BOOL = (torch.bool,)


def fail(name: str, value: object, requirement: str) -> NoReturn:
    """Raise the `ValueError` of a bad argument; `requirement` completes "must be ..."."""
    message = f"{name}={value}: must be {requirement}"
    raise ValueError(message)


def check_int(name: str, value: int, *, minimum: int, maximum: int | None = None) -> None:
    """Raise `ValueError` unless a host integer is in ``[minimum, maximum]``, both included."""
    if value < minimum or (maximum is not None and value > maximum):
        upper = "" if maximum is None else f" and <= {maximum}"
        fail(name, value, f">= {minimum}{upper}")


def check_counts(**values: int) -> None:
    """Raise `ValueError` unless no host integer is negative."""
    for name, value in values.items():
        check_int(name, value, minimum=0)


class Dims:
    """Check tensors against symbolic layouts that share dimension names.

    The first tensor that mentions a dimension binds its size, the first tensor
    checked binds the device; later ones must agree.
    """

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._device: torch.device | None = None

    def __getitem__(self, dim: str) -> int:
        """Return the size bound to `dim`."""
        return self._sizes[dim]

    def check(
        self, name: str, tensor: torch.Tensor, layout: str, dtypes: tuple[torch.dtype, ...]
    ) -> None:
        """Raise `ValueError` unless a tensor has a layout, one of `dtypes`, and the common device.

        `layout` names the dimensions, separated by blanks.
        """
        dims = layout.split()
        shape = tensor.shape
        if len(shape) != len(dims) or any(
            self._sizes.setdefault(dim, size) != size for dim, size in zip(dims, shape, strict=True)
        ):
            known = [f"{dim}={self._sizes[dim]}" if dim in self._sizes else dim for dim in dims]
            fail(f"{name}.shape", tuple(shape), f"[{', '.join(known)}]")
        if tensor.dtype not in dtypes:
            fail(f"{name}.dtype", tensor.dtype, f"one of {dtypes}")
        if self._device is None:
            self._device = tensor.device
        elif tensor.device != self._device:
            fail(f"{name}.device", tensor.device, f"{self._device}, as the other arguments")

    def check_groups(self, num_qo_heads: str, num_kv_heads: str) -> None:
        """Raise `ValueError` unless query heads divide evenly among KV heads, both bound."""
        query, key = self[num_qo_heads], self[num_kv_heads]
        if key == 0 or query % key:
            fail("num_qo_heads", query, f"a multiple of num_kv_heads={key} > 0")
