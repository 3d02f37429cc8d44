# SPDX-License-Identifier: Apache-2.0
"""Reference of `tandemkv.kernels.position_pooling`."""

import math

import torch
import torch.nn.functional as F


def pool_positions(scores: torch.Tensor, before: int, after: int) -> torch.Tensor:
    """Pool; see `tandemkv.kernels.position_pooling.pool_positions`."""
    is_candidate = scores > -math.inf
    own = torch.where(is_candidate, scores, -math.inf)
    padded = F.pad(own, (before, after), value=-math.inf)
    pooled = F.max_pool1d(padded, kernel_size=before + 1 + after, stride=1)
    return torch.where(is_candidate, pooled, -math.inf)
