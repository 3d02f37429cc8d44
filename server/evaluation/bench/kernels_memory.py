# SPDX-License-Identifier: Apache-2.0
"""Bandwidth of the GPU's own memory, the roof of every kernel's figure."""

from __future__ import annotations

from tandemkv.server.evaluation.timing import copy_bandwidth

from .report import Row


def rows() -> list[Row]:
    """Time a copy of 1 GiB and of 64 MiB within the GPU's memory."""
    found = []
    for label, size in (("1gib", 1 << 30), ("64mib", 64 << 20)):
        timing, moved = copy_bandwidth(num_bytes=size)
        note = "read and written bytes together"
        found.append(Row.bandwidth(f"copy_device_{label}", timing, moved, note=note))
    return found
