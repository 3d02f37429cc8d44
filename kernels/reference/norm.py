# SPDX-License-Identifier: Apache-2.0
"""Reference of `tandemkv.kernels.norm`."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise; see `tandemkv.kernels.norm.rms_norm`."""
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * inverse * weight.float()).to(x.dtype)
