# SPDX-License-Identifier: Apache-2.0
"""Work beside the forward pass: forked off, and joined where its result is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tandemkv.kernels.streams import LANE_PRIORITY, shared_stream

_MOST_DEFERRED = 4


class SideStream:
    """CUDA streams beside the forward pass's, on its GPU.

    Work of one lane runs in order, work of two lanes beside each other until both are joined.
    Forks and joins are events, so inside a graph capture they become edges of the graph. What
    the side streams read is kept alive until they are joined: the allocator only knows the
    stream that a tensor was made on. Without CUDA everything runs in place.
    """

    def __init__(
        self,
        device: torch.device,
        num_layers: int,
        num_lanes: int = 1,
        priority: int = LANE_PRIORITY,
    ) -> None:
        self._device = device
        lanes = (shared_stream(device, priority, n) for n in range(num_lanes))
        self._lanes = [lane for lane in lanes if lane is not None]
        is_cuda = device.type == "cuda"
        self._done = [torch.cuda.Event() if is_cuda else None for _ in range(num_layers)]
        self._pending: set[int] = set()  # layers whose events are to be waited for
        self._read = torch.cuda.Event() if is_cuda else None
        self._is_reading = False
        self._kept: list[torch.Tensor] = []
        self._forked: set[int] = set()
        self._deferred: list[tuple[int, Callable[[], None]]] = []

    @contextmanager
    def fork(
        self,
        *reads: torch.Tensor | None,
        lane: int = 0,
        after: int | None = None,
        behind: int | None = None,
    ) -> Iterator[None]:
        """Run the body in a lane beside the forward pass, after what that has queued so far.

        With `after`: after what that lane has queued so far, too. With `behind` instead: after that
        lane alone, of which the last fork was for what the forward pass has just queued; deferred
        work goes first.
        """
        if not self._lanes:
            yield
            return
        self._kept += [t for t in reads if t is not None]
        own = self._lanes[lane]
        self._forked.add(lane)
        if behind is not None:
            own.wait_stream(self._lanes[behind])
            with torch.cuda.stream(own):
                self._run_deferred(lane)
        else:
            own.wait_stream(torch.cuda.current_stream(self._device))
        if after is not None:
            own.wait_stream(self._lanes[after])
        with torch.cuda.stream(own):
            yield
            self._run_deferred(lane)

    def defer(self, lane: int, work: Callable[[], None]) -> None:
        """Run `work` in a lane, after what the forward pass has queued, when it next forks there.

        For what nobody waits for within the step: few of them have an edge of their own.
        """
        if not self._lanes:
            work()
            return
        self._deferred.append((lane, work))
        if sum(at == lane for at, _ in self._deferred) >= _MOST_DEFERRED:
            with self.fork(lane=lane):
                pass

    def finish_deferred(self) -> None:
        """Run what is still deferred, after what the forward pass has queued."""
        for lane in sorted({lane for lane, _ in self._deferred}):
            with self.fork(lane=lane):
                pass

    def note_done(self, layer: int) -> None:
        """Mark, inside a fork, that everything for `layer` has been queued in its lane."""
        event = self._done[layer]
        if event is not None:
            event.record(torch.cuda.current_stream(self._device))
            self._pending.add(layer)

    def note_read(self) -> None:
        """Mark, inside a fork, that what the forward pass will write to again has been read."""
        if self._read is not None:
            self._read.record(torch.cuda.current_stream(self._device))
            self._is_reading = True

    def await_read(self) -> None:
        """Let the forward pass wait for `note_read`."""
        if self._read is not None and self._is_reading:
            torch.cuda.current_stream(self._device).wait_event(self._read)
        self._is_reading = False

    def join(self, layer: int) -> None:
        """Let the forward pass wait for what was queued for `layer`."""
        event = self._done[layer]
        if event is not None and layer in self._pending:
            self._pending.remove(layer)
            torch.cuda.current_stream(self._device).wait_event(event)

    def join_all(self) -> None:
        """Let the forward pass wait for everything; a step ends with this."""
        for layer in sorted(self._pending):
            self.join(layer)
        self.finish_deferred()
        for lane in sorted(self._forked):
            torch.cuda.current_stream(self._device).wait_stream(self._lanes[lane])
        self._forked.clear()
        self._kept.clear()
        self._is_reading = False

    def _run_deferred(self, lane: int) -> None:
        # Those of other lanes wait for theirs: the order within a lane is what callers rely on.
        due = [work for at, work in self._deferred if at == lane]
        self._deferred = [item for item in self._deferred if item[0] != lane]
        for work in due:
            work()
