# SPDX-License-Identifier: Apache-2.0
"""Times of GPU work: CUDA graphs over rotating buffers, CUDA events, medians and percentiles.

A kernel is timed the way decoding runs it, inside a captured graph, so that launch overhead of
Python is not part of the time. Each call of one replay gets another set of buffers, together
larger than the L2 cache, so that nothing is timed from a warm cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from tandemkv.cache_rank.protocol.errors import SettingsError

from .provenance import BenchError
from .spread import Spread

L2_BYTES = 60 << 20
"""Largest L2 cache planned for: 50 MiB on an H200, 60 MiB with some reserve."""
MOST_SETS = 64
WARM_UP_CALLS = 3
COPY_BYTES = 1 << 30


def num_rotations(call_bytes: int) -> int:
    """Return how many sets of buffers keep `L2_BYTES` of other data between two uses of one.

    At most `MOST_SETS`, which bounds memory for calls that read and write few `call_bytes`.
    """
    if call_bytes < 1:
        raise BenchError(f"call_bytes={call_bytes} must be positive")
    return min(MOST_SETS, 1 + -(-L2_BYTES // call_bytes))


def require_cuda() -> torch.device:
    """Return the current CUDA device.

    Raises
    ------
    SettingsError
        If there is none.
    """
    if not torch.cuda.is_available():
        raise SettingsError("this benchmark times GPU work and no GPU is visible; run it on one")
    return torch.device("cuda", torch.cuda.current_device())


def time_graph(calls: Sequence[Callable[[], Any]], *, repetitions: int = 50) -> Spread:
    """Time `calls`, captured into one CUDA graph, per call.

    Parameters
    ----------
    calls : sequence of callables
        The same work on different buffers, see `num_rotations`. Each must be capturable: no
        allocation that outlives it, no host synchronisation.
    repetitions : int
        Replays that are timed, one sample each.

    Returns
    -------
    Spread
        Microseconds of one call, i.e. of a replay divided by ``len(calls)``.

    Raises
    ------
    SettingsError
        Without a GPU.
    """
    require_cuda()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compilation and workspaces, outside the capture
        for _ in range(WARM_UP_CALLS):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return time_calls(graph.replay, calls_per_sample=len(calls), repetitions=repetitions)


def time_calls(
    call: Callable[[], Any], *, calls_per_sample: int = 1, repetitions: int = 50
) -> Spread:
    """Return the microseconds of `call` on the current stream, by CUDA events.

    Parameters
    ----------
    call : callable
        Enqueues the work.
    calls_per_sample : int
        What one call counts for.
    repetitions : int
        Samples.
    """
    require_cuda()
    for _ in range(WARM_UP_CALLS):
        call()
    pairs = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repetitions)
    ]
    torch.cuda.synchronize()
    for start, end in pairs:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    times_ms = [start.elapsed_time(end) for start, end in pairs]
    return Spread.of(times_ms, scale=1e3 / calls_per_sample)


def copy_bandwidth(*, num_bytes: int = COPY_BYTES, repetitions: int = 50) -> tuple[Spread, int]:
    """Time a copy within the GPU's memory: the roof that other figures are compared with.

    Returns
    -------
    timing, moved : Spread, int
        `moved` counts each byte twice, read and written.

    Notes
    -----
    Negation, not ``copy_``: a captured copy is a copy engine's, which is slower than the memory.
    """
    device = require_cuda()
    sets = num_rotations(2 * num_bytes)
    sources = torch.zeros(sets, num_bytes // 4, device=device)
    targets = torch.empty_like(sources)
    calls = [
        partial(torch.neg, source, out=target)
        for source, target in zip(sources, targets, strict=True)
    ]
    return time_graph(calls, repetitions=repetitions), 2 * num_bytes
