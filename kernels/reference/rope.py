# SPDX-License-Identifier: Apache-2.0
"""Reference of `tandemkv.kernels.rope`."""

import torch


def _rotate(x: torch.Tensor, angle: torch.Tensor, factor: float) -> torch.Tensor:
    cos = (angle.cos() * factor).unsqueeze(1)  # [n, 1, D / 2]
    sin = (angle.sin() * factor).unsqueeze(1)
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x.dtype)


def apply_rope(
    x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor, *, scaling: float = 1.0
) -> torch.Tensor:
    """Rotate; see `tandemkv.kernels.rope.apply_rope`."""
    return _rotate(x, torch.outer(positions.float(), inv_freq), scaling)


def unapply_rope(
    x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor, *, scaling: float = 1.0
) -> torch.Tensor:
    """Rotate back; see `tandemkv.kernels.rope.unapply_rope`."""
    return _rotate(x, -torch.outer(positions.float(), inv_freq), 1.0 / scaling)
