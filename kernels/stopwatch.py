# SPDX-License-Identifier: Apache-2.0
"""How long a piece of work takes on its device, the way decoding runs it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from tandemkv.kernels.streams import LANE_PRIORITY, shared_stream

_MOST_RUNS = 7


def _nothing() -> None:
    pass


def median_us(
    run: Callable[[], object],
    device: torch.device,
    *,
    prepare: Callable[[], object] = _nothing,
    budget_s: float = 0.4,
    is_captured: bool = True,
) -> float:
    """Return the median time of `run`, in us.

    On a GPU it is captured as a CUDA graph and the replays are timed with events, so that the
    host's launches are not part of it.

    Parameters
    ----------
    run : Callable
        On a GPU, work of fixed shape on `device`'s current stream that never waits for it, if it
        `is_captured`.
    device : torch.device
        Where the work is done.
    prepare : Callable
        Called before each run, not timed and not captured.
    budget_s : float
        No further run is begun after so long. On a CPU the first run does not count, unless it
        used the budget up.
    is_captured : bool
        Whether a GPU may capture `run`; else its launches are part of its time.
    """
    if device.type == "cuda":
        return _on_gpu(run, device, prepare, budget_s, is_captured)
    samples: list[float] = []
    end = time.perf_counter() + budget_s
    while len(samples) < _MOST_RUNS and (not samples or time.perf_counter() < end):
        prepare()
        begin = time.perf_counter()
        run()
        samples.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(samples[1:] or samples)


def _on_gpu(
    run: Callable[[], object],
    device: torch.device,
    prepare: Callable[[], object],
    budget_s: float,
    is_captured: bool,
) -> float:
    stream = shared_stream(device, LANE_PRIORITY)  # a lane of selection: scans fork from it
    assert stream is not None
    with torch.cuda.device(device):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # kernels are compiled here
                prepare()
                run()
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph() if is_captured else None
        again: Callable[[], object] = run if graph is None else graph.replay
        if graph is not None:
            # Other threads of the process (status, metrics) must not break the capture.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                run()
        samples: list[float] = []
        end = time.perf_counter() + budget_s
        while len(samples) < _MOST_RUNS and (not samples or time.perf_counter() < end):
            prepare()
            samples.append(event_us(again, device))
        if graph is not None:
            graph.reset()
    return statistics.median(samples)


def event_us(run: Callable[[], object], device: torch.device) -> float:
    """Return the time between the events of a GPU before and behind `run`, in us; waits for it."""
    with torch.cuda.device(device):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        run()
        after.record()
        torch.cuda.synchronize(device)
    return 1e3 * float(before.elapsed_time(after))
