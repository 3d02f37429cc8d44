# SPDX-License-Identifier: Apache-2.0
"""The latest queries of each request, for policies that predict from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tandemkv.kernels.to_device import to_device

from .base import Owner


@dataclass(slots=True)
class _Window:
    queries: torch.Tensor  # [size, Hq, D], newest last
    count: int


@dataclass(slots=True)
class QueryWindows:
    """Windows of `size` queries ``[Hq, D]`` per request and layer, newest last."""

    size: int
    _windows: dict[Owner, dict[int, _Window]] = field(default_factory=dict)

    def push(self, layer: int, owner: Owner, queries: torch.Tensor) -> None:
        """Append queries ``[n, Hq, D]``, oldest first."""
        layers = self._windows.setdefault(owner, {})
        window = layers.get(layer)
        if window is None:
            empty = queries.new_zeros((self.size, *queries.shape[1:]))
            window = layers[layer] = _Window(empty, 0)
        window.queries = torch.cat([window.queries, queries])[-self.size :]
        window.count = min(self.size, window.count + len(queries))

    def stack(self, layer: int, owners: Sequence[Owner]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the windows ``[S, size, Hq, D]`` and their counts ``[S]`` int64.

        Raises `KeyError` if nothing was pushed for one of `owners`.
        """
        found = [self._windows[owner][layer] for owner in owners]
        counts = to_device([window.count for window in found], found[0].queries.device)
        return torch.stack([window.queries for window in found]), counts

    def release(self, owner: Owner) -> None:
        """Forget a request."""
        self._windows.pop(owner, None)

    def __len__(self) -> int:
        return len(self._windows)
