# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding, NeoX style (the two halves of a head are rotated)."""

import torch

from tandemkv.kernels.check import FLOAT32, FLOATS, INTS, Dims, fail
from tandemkv.kernels.dispatch import resolve


def _check(
    x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float
) -> None:
    dims = Dims()
    dims.check("x", x, "num_tokens num_heads head_dim", FLOATS)
    dims.check("positions", positions, "num_tokens", INTS)
    dims.check("inv_freq", inv_freq, "half_head_dim", FLOAT32)
    if dims["head_dim"] != 2 * dims["half_head_dim"]:
        fail("inv_freq.shape", tuple(inv_freq.shape), f"[head_dim / 2 = {dims['head_dim'] / 2:g}]")
    if scaling <= 0:
        fail("scaling", scaling, "> 0")


def apply_rope(
    x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor, *, scaling: float = 1.0
) -> torch.Tensor:
    """Rotate heads by their positions.

    Parameters
    ----------
    x : torch.Tensor
        ``[num_tokens, num_heads, head_dim]``, float, `head_dim` even.
    positions : torch.Tensor
        ``[num_tokens]``, int32 or int64.
    inv_freq : torch.Tensor
        ``[head_dim / 2]``, float32. Radians per position.
    scaling : float
        Factor of sine and cosine (YaRN's attention factor), ``> 0``; 1 for
        models without one.

    Returns
    -------
    torch.Tensor
        As `x`; computed in float32.
    """
    _check(x, positions, inv_freq, scaling)
    run = resolve("rope", "apply_rope", x.device)
    rotated: torch.Tensor = run(x, positions, inv_freq, scaling=scaling)
    return rotated


def unapply_rope(
    x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor, *, scaling: float = 1.0
) -> torch.Tensor:
    """Undo `apply_rope` with the same arguments.

    Parameters
    ----------
    x, positions, inv_freq, scaling
        As in `apply_rope`.

    Returns
    -------
    torch.Tensor
        As `x`; computed in float32.

    Raises
    ------
    ValueError
        As in `apply_rope`.
    """
    _check(x, positions, inv_freq, scaling)
    run = resolve("rope", "unapply_rope", x.device)
    rotated: torch.Tensor = run(x, positions, inv_freq, scaling=scaling)
    return rotated
