# SPDX-License-Identifier: Apache-2.0
"""What is in the resident slots, kept by the engine because it alone decides that.

A book per layer, row, KV head and slot: the logical position (``-1`` empty) and when it was
last selected.
"""

from __future__ import annotations

import torch

from tandemkv.cache_rank.protocol.engine import Allocate


class ResidentMirror:
    """Books of one `shape`, ``[num_layers, num_rows, num_kv_heads, num_resident]``, int32.

    `last_used` counts the steps of the epoch from 1; what a seed put there counts down from 0,
    best first, so that it is evicted worst first.

    `allocate` makes both; without it they are memory of this process.
    """

    def __init__(
        self, shape: tuple[int, int, int, int], *, device: torch.device, allocate: Allocate | None
    ) -> None:
        # On a GPU memory is committed at once anyway, and a graph's warm-up reads all of it.
        make = torch.empty if device.type == "cpu" else torch.zeros
        if allocate is None:
            self.positions = make(shape, dtype=torch.int32, device=device)
            self.last_used = make(shape, dtype=torch.int32, device=device)
        else:
            self.positions = allocate("resident_positions", shape, torch.int32)
            self.last_used = allocate("resident_last_used", shape, torch.int32)
        self._identity = torch.arange(shape[-1], dtype=torch.int32, device=device)

    @property
    def num_resident(self) -> int:
        """R: slots per KV head."""
        return len(self._identity)

    def fill_identity(self, rows: int | torch.Tensor) -> None:
        """Enter that slot i of `rows`, one or ``[n]``, holds position i, the last most recent."""
        self.positions[:, rows] = self._identity
        self.last_used[:, rows] = self._identity - self.num_resident

    def seed(self, layer: int, row: int, positions: torch.Tensor) -> None:
        """Enter the positions ``[H, R]`` of one layer, best first behind the sink."""
        self.positions[layer, row] = positions
        self.last_used[layer, row] = -self._identity
