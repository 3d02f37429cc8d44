# SPDX-License-Identifier: Apache-2.0
"""Work beside the forward pass: forked off, and joined where its result is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


class SideStream:
    """CUDA streams beside the forward pass's, on its GPU or on another one.

    Work of one lane runs in order, work of two lanes beside each other until both are joined.
    Forks and joins are events, so inside a graph capture they become edges of the graph, across
    GPUs too. What the side stream reads is kept alive until it is joined: the allocator only
    knows the stream that a tensor was made on. Without CUDA everything runs in place.

    Parameters
    ----------
    device : torch.device
        Of the forward pass.
    cache_device : torch.device
        Of the side streams.
    num_layers : int
        Layers that can be joined one by one.
    num_lanes : int
        Streams.
    """

    def __init__(
        self,
        device: torch.device,
        cache_device: torch.device,
        num_layers: int,
        num_lanes: int = 1,
    ) -> None:
        is_cuda = cache_device.type == "cuda"
        self._device = device
        self._lanes = [
            torch.cuda.Stream(device=cache_device) for _ in range(num_lanes if is_cuda else 0)
        ]
        # A graph's private pool belongs to the forward pass's GPU; on another one, what a
        # captured kernel wrote to must not be handed out again either.
        self._pool = None
        if is_cuda and cache_device != device:
            with torch.cuda.device(cache_device):
                self._pool = torch.cuda.MemPool()
        self._cache_device = cache_device
        self._done = [torch.cuda.Event() if is_cuda else None for _ in range(num_layers)]
        self._pending: set[int] = set()
        self._kept: list[torch.Tensor] = []
        self._forked: set[int] = set()

    @contextmanager
    def fork(self, *reads: torch.Tensor | None, lane: int = 0) -> Iterator[None]:
        """Run the body in a lane beside the forward pass, after what that has queued so far."""
        if not self._lanes:
            yield
            return
        stream = self._lanes[lane]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        self._kept += [t for t in reads if t is not None]
        self._forked.add(lane)
        with ExitStack() as stack:
            stack.enter_context(torch.cuda.stream(stream))
            if self._pool is not None:
                stack.enter_context(torch.cuda.use_mem_pool(self._pool, self._cache_device))
            yield

    def note_done(self, layer: int) -> None:
        """Mark, inside a fork, that everything for `layer` has been queued in its lane."""
        event = self._done[layer]
        if event is not None:
            event.record(torch.cuda.current_stream(self._cache_device))
            self._pending.add(layer)

    def join(self, layer: int) -> None:
        """Let the forward pass wait for what was queued for `layer`."""
        event = self._done[layer]
        if event is not None and layer in self._pending:
            torch.cuda.current_stream(self._device).wait_event(event)
            self._pending.discard(layer)

    def join_all(self) -> None:
        """Let the forward pass wait for everything; a step ends with this."""
        for lane in sorted(self._forked):
            torch.cuda.current_stream(self._device).wait_stream(self._lanes[lane])
        self._forked.clear()
        self._pending.clear()
        self._kept.clear()
