# SPDX-License-Identifier: Apache-2.0
"""Sets of positions as text, for what probes of both ranks write."""

from __future__ import annotations

import base64

import torch


def position_bits(positions: torch.Tensor, length: int) -> str:
    """Return `positions` ``[n]`` below `length` as base64; negative ones stand for none.

    Position p is bit ``p % 8`` of byte ``p // 8``.
    """
    is_in = torch.zeros(-(-length // 8) * 8, dtype=torch.uint8)
    is_in[positions[positions >= 0].long().cpu()] = 1
    packed = (is_in.view(-1, 8) << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.int32)
    return base64.b64encode(bytes(packed.tolist())).decode("ascii")
