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
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)
