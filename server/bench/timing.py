# SPDX-License-Identifier: Apache-2.0
"""Times of GPU work: CUDA graphs over rotating buffers, CUDA events, medians and percentiles.

A kernel is timed the way decoding runs it, inside a captured graph, so that launch overhead of
Python is not part of the time. Each call of one replay gets another set of buffers, together
larger than the L2 cache, so that nothing is timed from a warm cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tandemkv.cache_rank.protocol.errors import SettingsError

from .measured import percentile
from .report import BenchError, Row

L2_BYTES = 60 << 20
"""Largest L2 cache planned for: 50 MiB on an H200, 60 MiB with some reserve."""
WARM_UP_CALLS = 3
COPY_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Percentiles of `n` samples, microseconds per call."""

    median_us: float
    p10_us: float
    p90_us: float
    n: int

    def row(self, figure: str, *, note: str = "") -> Row:
        """Return a row in microseconds."""
        return Row(
            figure=figure, value=self.median_us, unit="us", p10=self.p10_us, p90=self.p90_us,
            n=self.n, note=note,
        )  # fmt: skip

    def bandwidth_row(self, figure: str, num_bytes: int, *, note: str = "") -> Row:
        """Return a row in GB/s, 1e9 bytes each, for a call that moves `num_bytes`."""
        low, high = num_bytes / self.p90_us / 1e3, num_bytes / self.p10_us / 1e3
        return Row(
            figure=figure, value=num_bytes / self.median_us / 1e3, unit="GB/s", p10=low, p90=high,
            n=self.n, note=note,
        )  # fmt: skip


def summarise(samples_us: Sequence[float]) -> Timing:
    """Return the percentiles of `samples_us`."""
    return Timing(
        median_us=percentile(samples_us, 0.5),
        p10_us=percentile(samples_us, 0.1),
        p90_us=percentile(samples_us, 0.9),
        n=len(samples_us),
    )


def num_rotations(call_bytes: int, *, l2_bytes: int = L2_BYTES, at_most: int = 64) -> int:
    """Return how many sets of buffers keep `l2_bytes` of other data between two uses of one.

    Parameters
    ----------
    call_bytes : int
        Bytes that one call reads and writes.
    l2_bytes : int
        Size of the cache.
    at_most : int
        Bound on the number of sets, which bounds memory for tiny calls.
    """
    if call_bytes < 1:
        raise BenchError(f"call_bytes={call_bytes} must be positive")
    return min(at_most, 1 + -(-l2_bytes // call_bytes))


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


def time_graph(calls: Sequence[Callable[[], Any]], *, repetitions: int = 50) -> Timing:
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
    Timing
        Of one call, i.e. of a replay divided by ``len(calls)``.

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
) -> Timing:
    """Time `call` on the current stream by CUDA events, without a graph of its own.

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
    return summarise([start.elapsed_time(end) * 1e3 / calls_per_sample for start, end in pairs])


def copy_bandwidth(*, num_bytes: int = COPY_BYTES, repetitions: int = 50) -> tuple[Timing, int]:
    """Time a copy within the GPU's memory: the roof that other figures are compared with.

    Returns
    -------
    timing, moved : Timing, int
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
