# SPDX-License-Identifier: Apache-2.0
"""Which flag in GPU memory means what, where two processes with captured graphs meet.

See `tandemkv.kernels.step_flags` for what a flag is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandemkv.cache_rank.protocol.memory.descriptor_messages import TensorSpec
from tandemkv.cache_rank.protocol.memory.mapped_tensors import MappedTensors

_LINE = 32
"""int32 words of a cache line of 128 bytes: two flags that are polled share none."""

_MOST_BEHIND = 2**30
"""Steps. By signed difference a flag of 2**31 steps ago counts as raised."""


def word_of(step: int) -> int:
    """Return a step's number as a flag holds it: it wraps around, and is compared by difference."""
    return (step + 2**31) % 2**32 - 2**31


def flag_specs(
    num_layers: int, max_batch: int, num_engines: int = 1
) -> tuple[TensorSpec, TensorSpec]:
    """Return the tensors that the flags of either side lie in, beside the side that waits.

    The second is that of all `num_engines` cache ranks of one inference rank: what the forward pass
    waits for is raised by each of them, and one kernel polls it all.
    """
    width, wide = (-(-size // _LINE) * _LINE for size in (max_batch, num_engines * max_batch))
    return (
        TensorSpec("to_engine", (2 + 2 * num_layers, width), "int32", "engine"),
        TensorSpec("to_inference", (1 + num_layers, wide), "int32", "inference"),
    )


class GpuFlags:
    """Views of the flags, each ``[n]`` int32.

    Raised by the forward pass, waited for by the engine: `begin`, once the request table is
    complete; `input`, once a layer's residual stream (decode, a flag a row) or K/V and prompt
    queries (prefill, one flag) are in place; `query`, once a layer's query is, a flag a row; `end`,
    once all tokens of the step are stored. Raised by the engine: `ready`, once a layer's resident
    set may be attended to, or is filled, or has what is selected for the next step, where that goes
    to another host (`EngineProgram.tells_of_next`), or once rows of its output are there, a flag
    a row; `finished`, once nothing that both sides use is read or written for the step any more.

    Between two GPUs each flag is memory of the GPU that waits for it: it polls nothing over NVLink.
    `tensors` have those of `flag_specs`. Of several cache ranks this is the one with the number
    `index`. Flags that each raises lie side by side, in their order, so that the forward pass waits
    for one slice (`all_ready`, `all_finished`).

    Attributes
    ----------
    to_engine, to_inference : torch.Tensor
        All of `flag_specs`, of either direction.
    """

    def __init__(self, tensors: MappedTensors, num_layers: int, index: int = 0) -> None:
        self.to_engine, self.to_inference = tensors["to_engine"], tensors["to_inference"]
        self._num_layers, self._index = num_layers, index
        self.begin, self.end = self.to_engine[0, :1], self.to_engine[1, :1]
        self.finished = self.to_inference[0, index : index + 1]

    def input(self, layer: int, size: int = 1) -> torch.Tensor:
        """See the class."""
        return self.to_engine[2 + layer, :size]

    def query(self, layer: int, size: int) -> torch.Tensor:
        """See the class."""
        return self.to_engine[2 + self._num_layers + layer, :size]

    def ready(self, layer: int, size: int = 1) -> torch.Tensor:
        """See the class."""
        first = self._index * size
        return self.to_inference[1 + layer, first : first + size]

    def all_ready(self, layer: int, count: int, size: int = 1) -> torch.Tensor:
        """Return `ready` of all `count` cache ranks, ``[count * size]``."""
        return self.to_inference[1 + layer, : count * size]

    def all_finished(self, count: int) -> torch.Tensor:
        """Return `finished` of all `count` cache ranks."""
        return self.to_inference[0, :count]


class SeldomRaised:
    """Keeps flags that are raised seldom, as those of a large batch, from counting as raised.

    `words` are theirs, of any shape. Whoever alone raises them keeps them up, where a step begins.
    Words of `to_inference` are shared by several cache ranks: the forward pass keeps them up where
    it maps them. It has seen all cache ranks finish the step before by then, and none begins the
    next before it says so.
    """

    def __init__(self, words: Sequence[torch.Tensor]) -> None:
        self._words = tuple(words)
        self._period: int | None = None

    def keep_up(self, step: int, *, lost: torch.Tensor) -> None:
        """Let no flag be further behind `step` than it may; queued in the current stream.

        All raises for earlier steps come before. Once ``lost [1]`` int32 is set nothing is done, as
        by a raise: what was not raised for the step before is to be waited for in vain.
        """
        period = step // _MOST_BEHIND
        if period == self._period:
            return
        # The first step, too: memory may be new, and what this needs is loaded then.
        self._period = period
        for words in self._words:
            words.masked_fill_(lost == 0, word_of(step - 1))

    def forget(self) -> None:
        """Let the next step do it anew: what was asked for may have been masked."""
        self._period = None
