# SPDX-License-Identifier: Apache-2.0
"""Residual streams, and queries, on their way to the cache rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandemkv.kernels.flags import raise_flags, send_rows
from tandemkv.kernels.streams import FORWARD_PRIORITY, LOWEST_PRIORITY, shared_stream

from .peer_flags import Signal
from .peer_memory import seen_from


class LayerStreams:
    """A buffer per layer on the cache rank's device, written by the forward pass.

    The decoder layer adds and normalises its inputs in place, so what the cache rank reads
    beside it must be a copy. On another GPU the sum is written there directly.

    Parameters
    ----------
    num_layers, max_batch, width : int
        Of the buffers.
    dtype : torch.dtype
        Of what is written.
    device, cache_device : torch.device
        Of the forward pass and of the cache rank.
    is_far : bool
        Whether the cache rank works as on another GPU; only then anything is put beside.
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
        is_far: bool,
    ) -> None:
        self._device, self._is_beside = device, False
        self._beside = stream_beside(device, cache_device) if is_far else None
        shape = (num_layers, max_batch, width)
        self._there = torch.zeros(shape, dtype=dtype, device=cache_device)
        self._here = seen_from(device, self._there) if num_layers else self._there

    def put(
        self,
        layer: int,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        signals: Sequence[Signal | None] = (),
    ) -> torch.Tensor:
        """Write ``hidden_states + residual`` ``[B, hidden]``, and raise the flags of `signals`.

        Returns it on the cache device.
        """
        size, given = len(hidden_states), [signal for signal in signals if signal is not None]
        out = self._here[layer, :size]
        if given:
            send_rows(hidden_states, residual, out, given[0].raised)
        elif residual is None:
            out.copy_(hidden_states)
        else:
            torch.add(hidden_states, residual, out=out)
        for signal in given[1:]:
            raise_flags(signal.raised)
        return self.last(layer, size)

    def put_beside(
        self,
        layer: int,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        signals: Sequence[Signal | None] = (),
    ) -> torch.Tensor:
        """`put` on a stream beside the current one, for another GPU.

        Until `join` is called the inputs must not change.
        """
        if self._beside is None:
            return self.put(layer, hidden_states, residual, signals)
        self._beside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._beside):
            found = self.put(layer, hidden_states, residual, signals)
        self._is_beside = True
        return found

    def join(self) -> None:
        """Let the current stream wait for what was put beside it."""
        if self._is_beside and self._beside is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._beside)
            self._is_beside = False

    def forget(self) -> None:
        """Wait for nothing that was put beside an earlier step."""
        self._is_beside = False

    def last(self, layer: int, size: int) -> torch.Tensor:
        """Return what was last written for `layer`, ``[size, hidden]`` on the cache device."""
        return self._there[layer, :size]


def stream_beside(device: torch.device, cache_device: torch.device) -> torch.cuda.Stream | None:
    """Return the stream for what is sent beside the forward pass; None on a CPU.

    On the cache rank's own GPU, whose lanes spin until it has arrived, it must not come to lie
    behind them in a queue of the GPU: it is none of theirs, and of the forward pass's priority.
    """
    if device != cache_device:
        return shared_stream(device, LOWEST_PRIORITY)
    return shared_stream(device, FORWARD_PRIORITY, number=1)
