# SPDX-License-Identifier: Apache-2.0
"""CUDA streams beside the forward pass, shared by their users, and how kernels follow one another.

A stream is asked for by what it is for, and made once in a process. Once a process has used a few
more streams, every kernel of a captured graph begins 0.3 us later (H200, decision record 14).
"""

from __future__ import annotations

import functools

import torch

FORWARD_PRIORITY, LANE_PRIORITY, LOWEST_PRIORITY = -2, -1, 0
"""The forward pass goes before lanes of selection, and these before scans of all keys."""


def shared_stream(
    device: torch.device, priority: int = LOWEST_PRIORITY, number: int = 0
) -> torch.cuda.Stream | None:
    """Return this process's stream of a GPU, priority and number; None on a CPU.

    To be asked for at start, by one thread.

    Parameters
    ----------
    device : torch.device
        Where its work is done; without an index the current GPU.
    priority : int
        As CUDA has it: lower goes first, 0 is the lowest.
    number : int
        Streams of different numbers run beside each other.
    """
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return _stream(index, priority, number)


@functools.cache
def _stream(index: int, priority: int, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device=torch.device("cuda", index), priority=priority)


_chained: set[int] = set()


def let_chain(device: torch.device) -> None:
    """Let kernels of a selection on a GPU be launched while the one before them still runs.

    From then on, in this process. For a GPU that does nothing but select: programs that are in
    place before it is their turn take room from what else would run. Without effect on a CPU, and
    on GPUs before Hopper.

    Parameters
    ----------
    device : torch.device
        Without an index the current GPU.
    """
    if device.type == "cuda":
        _chained.add(torch.cuda.current_device() if device.index is None else device.index)


def may_chain(device: torch.device) -> bool:
    """Whether `let_chain` was called for a GPU."""
    if device.type != "cuda" or not _chained:
        return False
    return (torch.cuda.current_device() if device.index is None else device.index) in _chained
