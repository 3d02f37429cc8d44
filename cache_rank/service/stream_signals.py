# SPDX-License-Identifier: Apache-2.0
"""The engine's side of a step's flags in GPU memory, and the lanes and graphs of its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tandemkv.cache_rank.protocol.engine import PADDING_ROW
from tandemkv.cache_rank.protocol.gpu_flags import GpuFlags, SeldomRaised, word_of
from tandemkv.cache_rank.protocol.memory.mapped_tensors import MappedTensors
from tandemkv.cache_rank.protocol.memory.shared_region import FlagIndex
from tandemkv.cache_rank.protocol.step_flags import StepFlags
from tandemkv.cache_rank.protocol.step_ring import StepEntry
from tandemkv.kernels.step_flags import raise_flags, send_rows, wait_flags
from tandemkv.kernels.streams import LANE_PRIORITY, shared_stream

from .signals import StepAbortedError, WordSignals


class StreamSignals(WordSignals):
    """Flags in GPU memory; waiting and raising are kernels of the current stream.

    `tensors` have those of `gpu_flags.flag_specs` and the staging of a step; of several cache ranks
    of one inference rank this is that with the number `index`. With `is_far` the forward pass is on
    another host, and does not map the flags. `host` tells the other host what has been queued. A
    wait that ends after `timeout_s` without the forward pass masks what is left of the step, and
    all later ones (`tandemkv.kernels.step_flags`).
    """

    def __init__(
        self,
        tensors: MappedTensors,
        host: StepFlags,
        num_layers: int,
        *,
        timeout_s: float,
        index: int = 0,
        is_far: bool = False,
    ) -> None:
        device = tensors.homes.here
        self._words = GpuFlags(tensors, num_layers, index)
        self._host, self._at = host, FlagIndex(1)
        self._rows, self._lengths = tensors["step_rows"], tensors["step_lengths"]
        self._outputs = tensors.get("remote_outputs")
        self._timeout_s = timeout_s
        self._step = torch.zeros(1, dtype=torch.int32, device=device)
        self._lost = torch.zeros(1, dtype=torch.int32, device=device)
        self._beside = shared_stream(device, LANE_PRIORITY, number=7)
        self._number = self._progress = 0
        self._counted: int | None = None
        self._seldom = SeldomRaised((self._words.to_inference,) if is_far else ())
        self._is_masked = False

    def begin(self, step: int) -> None:
        """See `HostSignals.begin`."""
        self._number = self._counted = step
        self._step.fill_(word_of(step))
        self._seldom.keep_up(step, lost=self._lost)

    def begin_counted(self, step: int) -> None:
        """Let what follows be about `step`, which a graph that begins with `count` counts itself.

        The forward pass waits for the graph, and a kernel before it takes 20 us of the host's time.
        """
        if self._counted != step - 1:
            self._step.fill_(word_of(step - 1))
        self._number = self._counted = step
        self._seldom.keep_up(step, lost=self._lost)

    def count(self) -> None:
        """Let what follows be about the step after."""
        self._step.add_(1)

    def requests_of(self, entry: StepEntry) -> tuple[torch.Tensor, torch.Tensor]:
        """See `HostSignals.requests_of`: written by the other process's GPU."""
        size = len(entry.rows)
        return self._rows[:size], self._lengths[:size]

    @property
    def step(self) -> torch.Tensor:
        """See `HostSignals.step`."""
        return self._step

    def stop_if_lost(self) -> None:
        """See `HostSignals.stop_if_lost`: waits for what the current stream has queued."""
        if not self._is_masked and bool(self._lost.any()):
            raise StepAbortedError(f"step {self._number} was lost")

    def raise_ready(self, layer: int) -> None:
        """See `HostSignals.raise_ready`."""
        # Behind a kernel that copies rows: where these are chained this one is in place by then.
        raise_flags(self._words.ready(layer), step=self._step, lost=self._lost, follows=True)

    def put_output(self, layer: int, output: torch.Tensor) -> None:
        """See `HostSignals.put_output`: a flag a row."""
        assert self._outputs is not None
        size, rows = len(output), output.flatten(1)
        out, flags = self._outputs[:size].flatten(1), self._words.ready(layer, size)
        send_rows(rows, out, flags, step=self._step, lost=self._lost)

    def settle(self) -> None:
        """See `HostSignals.settle`: the next step of the forward pass waits for this.

        Copies of books may be made behind it, for no kernel of the forward pass reads or writes
        them, and what a step waits for is behind them in the engine's stream.
        """
        raise_flags(self._words.finished, step=self._step, lost=self._lost)

    def finish(self) -> None:
        """See `HostSignals.finish`; the hosts hear at once that it is queued."""
        self.note_progress()

    def note_progress(self) -> None:
        """See `HostSignals.note_progress`."""
        self._progress += 1
        self._host.raise_to(self._at.PROGRESS, self._progress)

    def confirm_prepared(self) -> None:
        """Tell the other host that a step has been rehearsed, or a graph of it captured."""
        torch.cuda.current_stream(self._step.device).synchronize()
        self._host.raise_to(self._at.FINISHED, self._number)

    @contextmanager
    def masked(self) -> Iterator[None]:
        """Let waits return at once, raises do nothing and requests be padding, for a rehearsal.

        The other process sends the requests of a step anew before it begins.
        """
        self._is_masked, self._counted = True, None
        self._lost.fill_(1)
        self._rows.fill_(PADDING_ROW)
        self._lengths.fill_(1)
        try:
            yield
        finally:
            self._lost.zero_()
            self._step.fill_(word_of(self._number))  # what was rehearsed may count steps
            self._is_masked = False

    def abort(self) -> None:
        """End the waits that are under way, and all later ones. Safe from any thread."""
        if self._beside is None:
            self._lost.fill_(1)
            return
        # A thread begins on the first GPU, which is the model's. Going back to a stream of it would
        # take a context there.
        with torch.cuda.device(self._beside.device), torch.cuda.stream(self._beside):
            self._lost.fill_(1)

    def _await_words(self, flags: torch.Tensor) -> None:
        wait_flags(flags, step=self._step, lost=self._lost, timeout_s=self._timeout_s)


class Lanes:
    """Streams in which work of two layers goes on beside each other; on a CPU it runs in place."""

    def __init__(self, device: torch.device, num_lanes: int) -> None:
        lanes = (shared_stream(device, LANE_PRIORITY, n) for n in range(num_lanes))
        self._lanes = [lane for lane in lanes if lane is not None]
        self._device = device
        self._forked: set[int] = set()

    @contextmanager
    def enter(self, lane: int, *, after: int | None = None) -> Iterator[None]:
        """Run the body in a lane, behind what was queued there, and behind lane `after`."""
        if not self._lanes:
            yield
            return
        stream = self._lanes[lane]
        if lane not in self._forked:
            stream.wait_stream(torch.cuda.current_stream(self._device))
            self._forked.add(lane)
        if after is not None and after != lane:
            stream.wait_stream(self._lanes[after])
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """Let the current stream wait for all lanes."""
        for lane in sorted(self._forked):
            torch.cuda.current_stream(self._device).wait_stream(self._lanes[lane])
        self._forked.clear()


class StepGraphs:
    """CUDA graphs of decode steps, by what is captured; none on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[tuple[str, int], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def capture(self, kind: str, size: int, body: Callable[[], None]) -> None:
        """Run `body` once, so that its kernels are loaded, and capture it."""
        if self._pool is None:
            return
        body()
        stream = torch.cuda.current_stream(self._device)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Threads that answer the heartbeat may use the GPU meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
        ):
            body()
        self._graphs[kind, size] = graph

    def replay_of(self, kind: str, size: int) -> Callable[[], None] | None:
        """Return what queues that which was captured; None if nothing was."""
        graph = self._graphs.get((kind, size))
        return None if graph is None else graph.replay
