# SPDX-License-Identifier: Apache-2.0
"""Work beside the forward pass: forked off, and joined where its result is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """One CUDA stream beside the current one; without CUDA everything runs in place.

    Forks and joins are events, so inside a graph capture they become edges of the graph. What
    the side stream reads is kept alive until it is joined: the allocator only knows the
    stream that a tensor was made on.
    """

    def __init__(self, is_cuda: bool, num_layers: int) -> None:
        self._stream = torch.cuda.Stream() if is_cuda else None
        self._done = [torch.cuda.Event() if is_cuda else None for _ in range(num_layers)]
        self._pending: set[int] = set()
        self._kept: list[torch.Tensor] = []
        self._is_forked = False

    @contextmanager
    def fork(self, *reads: torch.Tensor | None) -> Iterator[None]:
        """Run the body beside the current stream, after what that has queued so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        self._kept += [t for t in reads if t is not None]
        self._is_forked = True
        with torch.cuda.stream(self._stream):
            yield

    def note_done(self, layer: int) -> None:
        """Mark, inside a fork, that everything for `layer` has been queued."""
        event = self._done[layer]
        if event is not None:
            event.record()
            self._pending.add(layer)

    def join(self, layer: int) -> None:
        """Let the current stream wait for what was queued for `layer`."""
        event = self._done[layer]
        if event is not None and layer in self._pending:
            torch.cuda.current_stream().wait_event(event)
            self._pending.discard(layer)

    def join_all(self) -> None:
        """Let the current stream wait for everything; a step ends with this."""
        if self._stream is not None and self._is_forked:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._is_forked = False
        self._pending.clear()
        self._kept.clear()
