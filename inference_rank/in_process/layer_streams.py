# SPDX-License-Identifier: Apache-2.0
"""Residual streams, and queries, on their way to the cache rank."""

from __future__ import annotations

import torch

from tandemkv.kernels.flags import send_rows

from .peer_flags import Signal
from .peer_memory import seen_from


class LayerStreams:
    """A buffer per layer on the cache rank's device, written by the forward pass.

    The decoder layer adds and normalises its inputs in place, so what the cache rank reads
    beside it must be a copy. On another GPU the sum is written there directly.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        max_batch: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        cache_device: torch.device,
    ) -> None:
        shape = (num_layers, max_batch, width)
        self._there = torch.zeros(shape, dtype=dtype, device=cache_device)
        is_far = device != cache_device
        self._here = seen_from(device, self._there) if is_far and num_layers else self._there

    def put(
        self,
        layer: int,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        signal: Signal | None = None,
    ) -> torch.Tensor:
        """Write ``hidden_states + residual`` ``[B, hidden]``, and raise the flags of `signal`.

        Returns it on the cache device.
        """
        size = len(hidden_states)
        out = self._here[layer, :size]
        if signal is not None:
            send_rows(hidden_states, residual, out, signal.raised)
        elif residual is None:
            out.copy_(hidden_states)
        else:
            torch.add(hidden_states, residual, out=out)
        return self.last(layer, size)

    def last(self, layer: int, size: int) -> torch.Tensor:
        """Return what was last written for `layer`, ``[size, hidden]`` on the cache device."""
        return self._there[layer, :size]
