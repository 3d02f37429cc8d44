# SPDX-License-Identifier: Apache-2.0
"""Work beside the forward pass: forked off, and joined where its result is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from tandemkv.kernels.flags import wait_flags
from tandemkv.kernels.streams import LANE_PRIORITY, shared_stream

from .peer_flags import PeerFlags, Signal

_MOST_DEFERRED = 4


class SideStream:
    """CUDA streams beside the forward pass's, on its GPU or on another one.

    Work of one lane runs in order, work of two lanes beside each other until both are joined.
    Forks and joins are events, so inside a graph capture they become edges of the graph. What
    the side streams read is kept alive until they are joined: the allocator only knows the
    stream that a tensor was made on. Without CUDA everything runs in place.

    Between two GPUs an edge of a graph costs 20 to 35 us, and edges follow one another. There,
    inside a capture, lanes are entered by one edge, whatever their number, and joined by one; in
    between one GPU raises flags in the memory of the other (`tandemkv.kernels.flags`). Deferred
    work that no such fork takes along has an edge of its own. Where one device stands for two GPUs
    (`is_far`), this is done alike: in a capture two branches of the graph wait for each other. A
    CPU, which captures nothing, has flags in every decode step, and one thing runs after the
    other: whoever waits for what was not raised before raises an error.

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
    max_batch : int
        Rows of a step at most.
    is_far : bool
        Whether the side streams are, or are taken for, another GPU's.
    """

    def __init__(
        self,
        device: torch.device,
        cache_device: torch.device,
        num_layers: int,
        num_lanes: int = 1,
        max_batch: int = 1,
        *,
        is_far: bool = False,
    ) -> None:
        is_cuda = cache_device.type == "cuda"
        self._device = device
        lanes = (shared_stream(cache_device, LANE_PRIORITY, n) for n in range(num_lanes))
        self._lanes = [lane for lane in lanes if lane is not None]
        # A graph's private pool belongs to the forward pass's GPU; on another one, what a
        # captured kernel wrote to must not be handed out again either.
        self._pool = self._flags = None
        if is_cuda and cache_device != device:
            with torch.cuda.device(cache_device):
                self._pool = torch.cuda.MemPool()
        if is_far:
            self._flags = PeerFlags(device, cache_device, num_layers, max_batch)
            self._gate = torch.zeros(1, dtype=torch.int32, device=cache_device)
        self._cache_device = cache_device
        self._done = [torch.cuda.Event() if is_cuda else None for _ in range(num_layers)]
        self._pending: dict[int, int] = {}  # flags to wait for
        self._kept: list[torch.Tensor] = []
        self._forked: set[int] = set()
        self._deferred: list[tuple[int, Callable[[], None]]] = []

    @property
    def uses_flags(self) -> bool:
        """Whether flags, and not events, order what is queued now."""
        if self._flags is None:
            return False
        return not self._lanes or torch.cuda.is_current_stream_capturing()

    def begin_step(self) -> None:
        """Forget what a step that failed has left to be waited for, where flags need no capture.

        A captured step either runs as a whole or ends the process.
        """
        if self._flags is not None and not self._lanes:
            self._pending.clear()
            self._flags.take_down()

    def signal(self, layer: int, size: int) -> Signal | None:
        """Return flags to raise when `size` rows for `layer` are written; None: not needed.

        Whoever asks must raise them, and pass them to the fork that reads the rows.
        """
        if self._flags is None or not self.uses_flags:
            return None
        self._enter()
        return self._flags.to_side(layer, size)

    @contextmanager
    def fork(
        self,
        *reads: torch.Tensor | None,
        lane: int = 0,
        signal: Signal | None = None,
        after: int | None = None,
        behind: int | None = None,
    ) -> Iterator[None]:
        """Run the body in a lane beside the forward pass, after what that has queued so far.

        With `signal`: after what was queued before its flags are raised. With `after`: after
        what that lane has queued so far, too. With `behind` instead: after that lane alone, of
        which the last fork was for what the forward pass has just queued; deferred work goes first.
        """
        if not self._lanes:
            if signal is not None:
                wait_flags(signal.waited)
            yield
            return
        self._kept += [t for t in reads if t is not None]
        if behind is not None:
            self._lanes[lane].wait_stream(self._lanes[behind])
            self._forked.add(lane)
            with self._inside(lane):
                self._run_deferred(lane)
        elif signal is None:
            self._lanes[lane].wait_stream(torch.cuda.current_stream(self._device))
            self._forked.add(lane)
        if after is not None:
            self._lanes[lane].wait_stream(self._lanes[after])
        with self._inside(lane):
            if signal is not None:
                wait_flags(signal.waited)
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
        lanes = sorted({lane for lane, _ in self._deferred})
        if not self.uses_flags:
            for lane in lanes:
                with self.fork(lane=lane):
                    pass
            return
        self._cross(lanes)
        for lane in lanes:
            with self._inside(lane):
                self._run_deferred(lane)

    def done_flags(self, layer: int, size: int = 1) -> torch.Tensor | None:
        """Return flags ``[size]`` to raise when all is done for `layer`; None: not needed.

        Where there are any, what is queued before `note_done`, of the same size, must raise them.
        """
        if self._flags is None or not self.uses_flags:
            return None
        return self._flags.to_main(layer, size).raised

    def note_done(self, layer: int, size: int = 1) -> None:
        """Mark, inside a fork, that everything for `layer` has been queued in its lane."""
        event = self._done[layer]
        if not self.uses_flags:
            if event is None:
                return
            event.record(torch.cuda.current_stream(self._cache_device))
        self._pending[layer] = size

    def join(self, layer: int) -> None:
        """Let the forward pass wait for what was queued for `layer`."""
        awaited = self.join_by_flags(layer)
        if awaited is not None:
            wait_flags(awaited)

    def join_by_flags(self, layer: int) -> torch.Tensor | None:
        """Like `join`, but leave it to the caller to wait for flags: those returned, if any."""
        event = self._done[layer]
        size = self._pending.pop(layer, 0)
        if not size:
            return None
        if self._flags is not None and self.uses_flags:
            return self._flags.to_main(layer, size).waited
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        return None

    def join_all(self) -> None:
        """Let the forward pass wait for everything; a step ends with this."""
        for layer in sorted(self._pending):
            self.join(layer)
        self.finish_deferred()
        if self._forked and self.uses_flags:
            self._leave()
        for lane in sorted(self._forked):
            torch.cuda.current_stream(self._device).wait_stream(self._lanes[lane])
        if self._flags is not None and not self._lanes:
            self._flags.require_down()
        self._forked.clear()
        self._kept.clear()

    def _enter(self) -> None:
        """Bring every lane into the capture, by one edge between the GPUs."""
        self._cross(sorted(set(range(len(self._lanes))) - self._forked))

    def _cross(self, lanes: Sequence[int]) -> None:
        """Let lanes wait for what the forward pass has queued, by one edge between the GPUs."""
        if not lanes:
            return
        first, *others = (self._lanes[lane] for lane in lanes)
        first.wait_stream(torch.cuda.current_stream(self._device))
        self._pass_gate(first)
        for lane in others:
            lane.wait_stream(first)
        self._forked.update(lanes)

    def _leave(self) -> None:
        """Let one lane wait for the others: the edge back is its."""
        first, *others = sorted(self._forked)
        for lane in others:
            self._lanes[first].wait_stream(self._lanes[lane])
        self._pass_gate(self._lanes[first])
        self._forked = {first}

    def _pass_gate(self, lane: torch.cuda.Stream) -> None:
        """Queue a kernel: only what waits for one of the same GPU has no edge between them."""
        with torch.cuda.stream(lane):
            self._gate.add_(1)

    @contextmanager
    def _inside(self, lane: int) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.cuda.stream(self._lanes[lane]))
            if self._pool is not None:
                stack.enter_context(torch.cuda.use_mem_pool(self._pool, self._cache_device))
            yield

    def _run_deferred(self, lane: int) -> None:
        # Those of other lanes wait for theirs: the order within a lane is what callers rely on.
        due = [work for at, work in self._deferred if at == lane]
        self._deferred = [item for item in self._deferred if item[0] != lane]
        for work in due:
            work()
