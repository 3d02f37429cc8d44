# SPDX-License-Identifier: Apache-2.0
"""Reference of `tandemkv.kernels.quantize`."""

import torch

_MAX = 127
# The smallest normal float: zero tokens get a scale that divides safely.
_MIN_SCALE = torch.finfo(torch.float32).tiny


def quantize_int8(k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize; see `tandemkv.kernels.quantize.quantize_int8`."""
    wide = k.float()
    scale = (wide.abs().amax(dim=-1) / _MAX).clamp_(min=_MIN_SCALE)
    quantized = torch.round(wide / scale.unsqueeze(-1)).clamp_(-_MAX, _MAX)
    return quantized.to(torch.int8), scale
