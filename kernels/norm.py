# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square normalisation, for predicted queries on the cache rank."""

import torch

from tandemkv.kernels.check import FLOATS, Dims, fail
from tandemkv.kernels.dispatch import resolve


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide by the root mean square over the last dimension, then weigh.

    Parameters
    ----------
    x : torch.Tensor
        ``[..., dim]``, float: hidden states, or heads for a query norm.
    weight : torch.Tensor
        ``[dim]``, float.
    eps : float
        Added to the mean square, ``>= 0``.

    Returns
    -------
    torch.Tensor
        As `x`; computed in float32 including the weight, then rounded once.
    """
    dims = Dims()
    if x.dim() == 0:
        fail("x.shape", (), "[..., dim]")
    leading = [f"leading_{i}" for i in range(x.dim() - 1)]
    dims.check("x", x, " ".join([*leading, "dim"]), FLOATS)
    dims.check("weight", weight, "dim", FLOATS)
    if eps < 0:
        fail("eps", eps, ">= 0")
    normed: torch.Tensor = resolve("norm", "rms_norm", x.device)(x, weight, eps)
    return normed
