# SPDX-License-Identifier: Apache-2.0
"""What recurs in every decode step of a lane, captured once as a CUDA graph.

A message takes some thirty calls of CUDA, and a step of 36 layers a hundred messages. Queued one by
one by two threads that share an interpreter they take about 48 ms; captured, a step of 8 x 32K
takes 9.6 ms in all (two H200s, decision 30).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module

import torch

from .plan import Message

_Key = tuple[int, int]
_CAPTURES = threading.Lock()
"""torch has one capture at a time in a process."""


class CapturedSteps:
    """The messages of decode steps that one call queues, by variant and size of the step.

    Captured while nothing is under way: giving a graph its memory may wait for all that runs. On a
    CPU, where `stream` is None, the same calls are made again.
    """

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._pool = None if stream is None else torch.cuda.graph_pool_handle()
        self._messages: dict[_Key, tuple[Message, ...]] = {}
        self._replays: dict[_Key, Callable[[], None]] = {}

    def capture(self, key: _Key, messages: tuple[Message, ...], body: Callable[[], None]) -> None:
        """Keep what `body` queues on the present stream for `messages`; it is not run on a GPU."""
        if self._stream is None:
            self._messages[key], self._replays[key] = messages, body
            return
        graph = torch.cuda.CUDAGraph()
        with _CAPTURES, self._captured(graph, self._stream):
            body()
        _upload(graph, self._stream)
        self._messages[key], self._replays[key] = messages, graph.replay

    @contextmanager
    def _captured(self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
        """Capture what the body queues.

        `torch.cuda.graph` would wait for the device, where the other lane may wait for this one,
        and give back all memory that is not in use, which lanes have for what is made on the way.
        """
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                yield
            finally:
                graph.capture_end()

    def part_of(self, key: _Key, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Return those at the end of a step's `messages` that were captured, or nothing."""
        known = self._messages.get(key, ())
        return known if messages[len(messages) - len(known) :] == known else ()

    def replay(self, key: _Key) -> None:
        """Queue what was captured."""
        self._replays[key]()

    def close(self) -> None:
        """Let go of all graphs: a communicator ends when none of them can use it any more."""
        self._messages.clear()
        self._replays.clear()


def _upload(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
    """Give a graph the memory that it has on the GPU, else with its first replay.

    Beside a lane that waits that would not come. Raises `RuntimeError` if CUDA fails.
    """
    driver = import_module("cuda.bindings.driver")  # what ranks share is made with it as well
    (result,) = driver.cuGraphUpload(
        driver.CUgraphExec(graph.raw_cuda_graph_exec()), driver.CUstream(stream.cuda_stream)
    )
    if result != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA cannot upload a graph: {result.name}")
