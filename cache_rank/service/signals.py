# SPDX-License-Identifier: Apache-2.0
"""How the engine's side of a step waits for the forward pass, and tells it what is done."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tandemkv.cache_rank.protocol.errors import CacheRankError
from tandemkv.cache_rank.protocol.fault_points import reach
from tandemkv.cache_rank.protocol.gpu_flags import GpuFlags
from tandemkv.cache_rank.protocol.memory.shared_region import FlagIndex
from tandemkv.cache_rank.protocol.progress import BusyClock
from tandemkv.cache_rank.protocol.step_flags import StepFlags
from tandemkv.cache_rank.protocol.step_ring import StepEntry

_LONGEST_WAIT_S = 3600.0
"""Nobody waits for so long: `is_over` ends a wait as soon as the other side is gone."""


class StepAbortedError(CacheRankError):
    """The inference rank gave the step up, or is gone."""


class HostSignals:
    """The engine's side of a step's flags in host memory: both processes compute on CPUs.

    Used by the thread that runs the steps, which waits; where a GPU waits (`StreamSignals`), it
    holds up what is queued next.

    `is_gone` tells whether the inference rank is; `clock` is told when the engine waits for the
    forward pass, and a wait raises `StepAbortedError`. Outputs of exact layers go to
    ``remote_outputs [max_batch, Hq, D]``, if there are any.
    """

    def __init__(
        self,
        flags: StepFlags,
        num_layers: int,
        *,
        is_gone: Callable[[], bool],
        clock: BusyClock,
        remote_outputs: torch.Tensor | None = None,
    ) -> None:
        self._outputs = remote_outputs
        self._flags, self._at = flags, FlagIndex(num_layers)
        self._is_gone, self._clock = is_gone, clock
        self._step = self._progress = 0

    def begin(self, step: int) -> None:
        """Let what follows be about `step`."""
        self._step = step

    def requests_of(self, entry: StepEntry) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows and lengths ``[B]`` of a decode step, on the engine's device.

        They are those of the step between `await_begin` and `settle`; a graph that reads them finds
        those of the step that it is replayed for.
        """
        rows = torch.tensor([row.row for row in entry.rows])
        return rows, torch.tensor([row.length for row in entry.rows])

    @property
    def step(self) -> torch.Tensor:
        """``[1]`` integer on the engine's device: the present step, for a graph likewise."""
        return torch.tensor([self._step])

    def await_begin(self) -> None:
        """Wait until request table, rows and lengths are complete: here it is announced then."""

    def await_input(self, layer: int, size: int = 1) -> None:
        """Wait for the stream of `size` requests (decode), or for K/V (prefill), of `layer`."""
        del size
        self._wait(self._at.input(layer))

    def await_query(self, layer: int, size: int) -> None:
        """Wait for the query of `size` requests in `layer`."""
        del size
        self._wait(self._at.query(layer))

    def await_end(self) -> None:
        """Wait until all tokens of the step are stored."""
        self._wait(self._at.input(self._at.end))

    def stop_if_lost(self) -> None:
        """Raise `StepAbortedError` if a wait of this step was given up; here the wait does so."""

    def raise_loaded(self) -> None:
        """Tell that the request table of the step has been read."""
        self._flags.raise_to(self._at.LOADED, self._step)

    def raise_ready(self, layer: int) -> None:
        """Tell that the resident set of `layer` may be attended to, in this step or the next."""
        reach("cache_rank.layer")
        self.note_progress()
        self._flags.raise_to(self._at.ready(layer), self._step)

    def put_output(self, layer: int, output: torch.Tensor) -> None:
        """Hand over the output ``[B, Hq, D]`` of a layer that attends here, and tell of it."""
        assert self._outputs is not None
        self._outputs[: len(output)].copy_(output)
        self.raise_ready(layer)

    def settle(self) -> None:
        """Tell that nothing shared is read or written for the step any more; here `finish` does."""

    def finish(self) -> None:
        """Tell that all work of the step has ended, and can be done again from its copies."""
        self._flags.raise_to(self._at.FINISHED, self._step)

    def note_progress(self) -> None:
        """Tell both hosts that work which takes long goes on."""
        self._progress += 1
        self._clock.progress.advance()
        self._flags.raise_to(self._at.PROGRESS, self._progress)

    def _wait(self, flag: int) -> None:
        with self._clock.waiting():  # for the forward pass, however long it takes
            found = self._flags.wait(
                flag, self._step, timeout_s=_LONGEST_WAIT_S, is_over=self._is_over
            )
        if not found:
            raise StepAbortedError(f"step {self._step} was given up")

    def _is_over(self) -> bool:
        return self._flags.value(self._at.ABORTED) - self._step >= 0 or self._is_gone()


class WordSignals:
    """What waits for flags that the model's GPU raises: words in GPU memory, or in the host's."""

    _words: GpuFlags

    def await_begin(self) -> None:
        """See `HostSignals.await_begin`."""
        self._await_words(self._words.begin)

    def await_input(self, layer: int, size: int = 1) -> None:
        """See `HostSignals.await_input`."""
        self._await_words(self._words.input(layer, size))

    def await_query(self, layer: int, size: int) -> None:
        """See `HostSignals.await_query`."""
        self._await_words(self._words.query(layer, size))

    def await_end(self) -> None:
        """See `HostSignals.await_end`."""
        self._await_words(self._words.end)

    def raise_loaded(self) -> None:
        """See `HostSignals.raise_loaded`: the GPU waits for the step's end instead."""

    def _await_words(self, flags: torch.Tensor) -> None:
        raise NotImplementedError
