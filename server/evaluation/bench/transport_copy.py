# SPDX-License-Identifier: Apache-2.0
"""Bandwidth of plain copies: pinned host memory to and from the GPU, and GPU to GPU."""

from __future__ import annotations

import torch

from tandemkv.server.evaluation.spread import Spread
from tandemkv.server.evaluation.timing import require_cuda, time_calls

from .report import Row

SIZES = (("64kib", 64 << 10), ("4mib", 4 << 20), ("64mib", 64 << 20))


def rows() -> list[Row]:
    """Time copies of 64 KiB, 4 MiB and 64 MiB; to a second GPU if one is visible."""
    device = require_cuda()
    found: list[Row] = []
    for label, size in SIZES:
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        near = torch.empty(size, dtype=torch.uint8, device=device)
        found += _pair(f"copy_host_to_device_{label}", size, _time_copy(host, near))
        found += _pair(f"copy_device_to_host_{label}", size, _time_copy(near, host))
        if torch.cuda.device_count() > 1:
            far = torch.empty(size, dtype=torch.uint8, device="cuda:1")
            found += _pair(f"copy_device_to_peer_{label}", size, _time_copy(near, far))
    return found


def _time_copy(source: torch.Tensor, target: torch.Tensor) -> Spread:
    return time_calls(lambda: target.copy_(source, non_blocking=True))


def _pair(figure: str, size: int, timing: Spread) -> list[Row]:
    note = "eager, one copy at a time; of small ones the launch is the time"
    return [
        Row.of(f"{figure}_us", timing, "us", note=note),
        Row.bandwidth(f"{figure}_bandwidth", timing, size, note=note),
    ]
