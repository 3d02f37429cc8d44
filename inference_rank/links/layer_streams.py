# SPDX-License-Identifier: Apache-2.0
"""Copies of the residual stream that the cache rank reads beside the forward pass."""

from __future__ import annotations

import torch


class LayerStreams:
    """A buffer per layer, written by the forward pass.

    The decoder layer adds and normalises its inputs in place, so what the cache rank reads
    beside it must be a copy.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        max_batch: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._copies = torch.zeros((num_layers, max_batch, width), dtype=dtype, device=device)

    def put(
        self, layer: int, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """Write ``hidden_states + residual`` ``[B, hidden]``; returns the copy."""
        out = self.last(layer, len(hidden_states))
        if residual is None:
            out.copy_(hidden_states)
        else:
            torch.add(hidden_states, residual, out=out)
        return out

    def last(self, layer: int, size: int) -> torch.Tensor:
        """Return what was last written for `layer`, ``[size, hidden]``."""
        return self._copies[layer, :size]
