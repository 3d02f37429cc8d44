# SPDX-License-Identifier: Apache-2.0
"""Sets of positions as text, for what probes of both ranks write."""

from __future__ import annotations

import base64

import numpy as np
import torch


def position_bits(positions: torch.Tensor, length: int) -> str:
    """Return `positions` ``[n]`` below `length` as base64; negative ones stand for none.

    Position p is bit ``p % 8`` of byte ``p // 8``.
    """
    is_in = np.zeros(length, dtype=bool)
    is_in[positions[positions >= 0].cpu().numpy()] = True
    return base64.b64encode(np.packbits(is_in, bitorder="little").tobytes()).decode("ascii")
