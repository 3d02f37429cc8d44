# SPDX-License-Identifier: Apache-2.0
"""Flags in GPU memory: one GPU tells another that what it wrote there is complete.

A flag lies in the memory of whoever waits for it. It is raised once and taken down by the one
wait that sees it, so a captured graph can be replayed without any state of its own.
"""

import torch

from tandemkv.kernels.check import FLOATS, INT32, Dims, fail
from tandemkv.kernels.dispatch import resolve

TIMEOUT_S = 20.0
"""How long a wait lasts before it stops the GPU with an error: its peer is gone by then."""


def send_rows(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    flags: torch.Tensor,
) -> None:
    """Write ``hidden + residual`` to `out`, and raise the flag of each row.

    Parameters
    ----------
    hidden, residual : torch.Tensor
        ``[num_rows, width]``, float; without `residual`, `hidden` as it is.
    out : torch.Tensor
        ``[num_rows, width]``, dtype of `hidden`; may be another GPU's memory.
    flags : torch.Tensor
        ``[num_rows]`` int32, in the memory of whoever waits. All are down.
    """
    dims = Dims()
    dims.check("hidden", hidden, "num_rows width", FLOATS)
    if residual is not None:
        dims.check("residual", residual, "num_rows width", (hidden.dtype,))
    dims.check("out", out, "num_rows width", (hidden.dtype,))
    dims.check("flags", flags, "num_rows", INT32)
    resolve("flags", "send_rows", hidden.device)(hidden, residual, out, flags)


def raise_flags(flags: torch.Tensor) -> None:
    """Raise `flags` ``[n]`` int32 once everything queued before is complete.

    Raises
    ------
    ValueError
        If `flags` differs from the above.
    """
    Dims().check("flags", flags, "n", INT32)
    resolve("flags", "raise_flags", flags.device)(flags)


def wait_flags(flags: torch.Tensor, *, timeout_s: float = TIMEOUT_S) -> None:
    """Hold back what is queued next until all `flags` are up, and take them down.

    Parameters
    ----------
    flags : torch.Tensor
        ``[n]`` int32, in this device's memory.
    timeout_s : float
        After that the kernel traps: the process's next CUDA call fails, instead of one GPU
        reading what the other never wrote.

    Raises
    ------
    RuntimeError
        On CPU, where nobody else could raise them, if any is down.
    """
    Dims().check("flags", flags, "n", INT32)
    if timeout_s <= 0:
        fail("timeout_s", timeout_s, "> 0")
    resolve("flags", "wait_flags", flags.device)(flags, timeout_s=timeout_s)
