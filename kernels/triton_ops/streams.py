# SPDX-License-Identifier: Apache-2.0
"""A part of an operation on another stream."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run the body on `stream`, between what the current one did before and does after.

    Captured kernels keep the priority of the stream that they were launched on. Without a
    stream the body runs in place.
    """
    if stream is None:
        yield
        return
    with forked(stream):
        yield
    join(stream)


@contextmanager
def forked(stream: torch.cuda.Stream) -> Iterator[None]:
    """Run the body on `stream`, after what the current one did before; `join` ends it."""
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield


def join(stream: torch.cuda.Stream) -> None:
    """Let the current stream wait for what was done on `stream`."""
    torch.cuda.current_stream(stream.device).wait_stream(stream)
