# SPDX-License-Identifier: Apache-2.0
"""Kernels that are launched while the one before them in their stream still runs.

A selection is a chain of small kernels, a program for each head, in which nothing waits but the
next one. With programmatic dependent launch, of Hopper and later GPUs, a kernel of the chain has
its programs in place, and has read what does not depend on the one before it, when that one ends.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandemkv.kernels.streams import may_chain

_INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.jit
def lead(CHAINED: tl.constexpr):
    """Let the next kernel of a chain be launched, as soon as all programs of this one have begun.

    For the first of a chain, which was launched when all before it had ended.
    """
    if CHAINED:
        gdc_launch_dependents()


@triton.jit
def follow(CHAINED: tl.constexpr):
    """Wait until the kernel before this one has ended, and do as `lead` does.

    Every program has to call this, before it writes anything, or reads what any kernel of the chain
    has written: so whoever is behind it, in whatever stream, is behind the whole chain. Before it
    may be read what was written by kernels that are not chained, ahead of the one that leads. And
    what no kernel but this one uses may be written, where another one is between its calls: a
    program begins when all of the kernel before its own have come past this, and so when the one
    before that has ended.
    """
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()


@functools.cache
def _is_supported(index: int) -> bool:
    return torch.cuda.get_device_capability(index)[0] >= 9


def is_chained(device: torch.device) -> bool:
    """Whether kernels on `device` are chained; to be passed to them as CHAINED."""
    if _INTERPRETED or not may_chain(device):
        return False
    return _is_supported(torch.cuda.current_device() if device.index is None else device.index)
