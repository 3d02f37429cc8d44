# SPDX-License-Identifier: Apache-2.0
"""The engine's side of a step's flags where the model is on a GPU, and the engine on this CPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from tandemkv.cache_rank.protocol.gpu_flags import GpuFlags, word_of
from tandemkv.cache_rank.protocol.memory.mapped_tensors import MappedTensors
from tandemkv.cache_rank.protocol.progress import BusyClock
from tandemkv.cache_rank.protocol.step_flags import StepFlags
from tandemkv.cache_rank.protocol.step_ring import StepEntry

from .signals import HostSignals, StepAbortedError, WordSignals

_SPINS = 1000
"""Looks before the first sleep: about 2 ms, longer than a layer takes on a GPU."""
_PAUSE_S = 50e-6


class PolledSignals(WordSignals, HostSignals):
    """Flags in host memory that kernels of the model's GPU raise and poll over PCIe.

    A GPU wakes nobody up, so this thread looks for itself. Its stores reach the GPU in their order
    on x86-64; elsewhere the system call that notes the progress is the barrier before a flag. The
    GPU's stores before a release at system scope are in place once the flag is. A wait has no limit
    of its own: it ends with the inference rank, which gives a step up at its limit and hangs up.

    `tensors` have those of `gpu_flags.flag_specs` and rows and lengths of a step. `flags`, those of
    the two hosts, and the others are as for `HostSignals`.
    """

    def __init__(
        self,
        tensors: MappedTensors,
        flags: StepFlags,
        num_layers: int,
        *,
        is_gone: Callable[[], bool],
        clock: BusyClock,
    ) -> None:
        super().__init__(flags, num_layers, is_gone=is_gone, clock=clock)
        self._words = GpuFlags(tensors, num_layers)
        self._rows, self._lengths = tensors["step_rows"], tensors["step_lengths"]

    def requests_of(self, entry: StepEntry) -> tuple[torch.Tensor, torch.Tensor]:
        """See `HostSignals.requests_of`: written by the model's GPU, of graphs with padding."""
        size = len(entry.rows)
        return self._rows[:size].clone(), self._lengths[:size].clone()

    def raise_ready(self, layer: int) -> None:
        """See `HostSignals.raise_ready`."""
        self.note_progress()
        self._raise(self._words.ready(layer))

    def settle(self) -> None:
        """See `HostSignals.settle`: the next step of the forward pass waits for this."""
        self.note_progress()
        self._raise(self._words.finished)

    def _raise(self, words: torch.Tensor) -> None:
        words.numpy()[:] = word_of(self._step)

    def _await_words(self, flags: torch.Tensor) -> None:
        words, wanted = flags.numpy(), np.int32(word_of(self._step))
        if _is_raised(words, wanted):
            return
        with self._clock.waiting():  # for the forward pass, however long it takes
            if any(_is_raised(words, wanted) for _ in range(_SPINS)):
                return
            while not _is_raised(words, wanted):
                if self._is_over():
                    raise StepAbortedError(f"step {self._step} was given up")
                time.sleep(_PAUSE_S)


def _is_raised(words: np.ndarray[tuple[int], np.dtype[np.int32]], wanted: np.int32) -> bool:
    return not bool((words - wanted < 0).any())
