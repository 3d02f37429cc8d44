# SPDX-License-Identifier: Apache-2.0
"""Which of SGLang's passes are void, because the engine did not do its part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult

from tandemkv.cache_rank.protocol.errors import CacheRankLostError
from tandemkv.inference_rank.attention.backend import ResidentBackend
from tandemkv.inference_rank.counters import Counters
from tandemkv.inference_rank.links.connection import SharedConnection
from tandemkv.inference_rank.links.sharded import ShardedConnection
from tandemkv.inference_rank.links.shared import SharedLink

from .agreement import Agreement


@dataclass(slots=True)
class _Pass:
    """`step` is None if the engine was asked for nothing; `random` is the generator's state."""

    backend: tuple[Any, ...]
    random: torch.Tensor | None
    device: torch.device
    step: int | None = None
    is_void: bool = False


class PassLog:
    """Follows each pass from its launch until its results are taken, or dropped.

    From the first lost pass on all are dropped, until `rewind`: later ones took in its token. Over
    tensor-parallel ranks a pass is lost if the engine of one of them did not do its part. `dropped`
    are the batches whose results were dropped, in order; `num_taken` counts the others.
    """

    def __init__(
        self,
        connection: SharedConnection | ShardedConnection,
        link: SharedLink,
        backend: ResidentBackend,
        counters: Counters,
        agreement: Agreement | None = None,
    ) -> None:
        self._connection, self._link, self._backend = connection, link, backend
        self._counters, self._agreement = counters, agreement or Agreement()
        self._passes: dict[int, _Pass] = {}
        self.dropped: list[Any] = []
        self.num_taken = 0

    def run(
        self, original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a pass (`Scheduler.run_batch`), and note what it asked of the engine."""
        if self.dropped:  # nothing that follows can be used
            scheduler.forward_ct += 1
            batch.forward_iter = scheduler.forward_ct
            return GenerationBatchResult()
        device = torch.device(batch.device)
        found = _Pass(self._backend.snapshot(), _random_state(batch, device), device)
        link = self._link
        link.pass_step, link.is_void = None, False
        # With the overlap scheduler a chunk of a prompt is in the radix tree before its results
        # are looked at, so its K/V have to be computed to the end. And whoever breaks off a pass
        # that tensor-parallel ranks share leaves the others waiting in its exchange of sums.
        is_kept = scheduler.enable_overlap and batch.forward_mode.is_extend()
        link.breaks_off = self._agreement.is_alone and not is_kept
        try:
            result = original(scheduler, batch, *args, **kwargs)
        except CacheRankLostError:
            link.is_void, result = True, GenerationBatchResult()
        found.step, found.is_void = link.pass_step, link.is_void
        self._passes[batch.forward_iter] = found
        return result

    def take(self, original: Callable[..., Any], scheduler: Any, batch: Any, result: Any) -> None:
        """Use the results of a pass (`Scheduler.process_batch_result`), unless it was lost."""
        found = self._passes.get(batch.forward_iter)
        self.await_end(batch, result)
        if self.dropped or not self._agreement.all(self._is_done(found)):
            self.dropped.append(batch)
            self._counters.dropped_passes_total += 1
            return
        original(scheduler, batch, result)
        self.num_taken += 1
        self._passes.pop(batch.forward_iter, None)
        if found is not None and found.step is not None:
            self._connection.confirm(found.step)

    def await_end(self, batch: Any, result: Any) -> None:
        """Wait until the pass of `batch`, whose results nobody has looked at, has ended."""
        found = self._passes.get(batch.forward_iter)
        if found is not None:  # a batch that waits for its results no longer knows its device
            await_end(result, found.device)

    def rewind(self, lost: list[Any]) -> None:
        """Bring what the passes of the `lost` batches have changed back to where it was."""
        numbers = sorted(batch.forward_iter for batch in lost)
        found = [self._passes[number] for number in numbers if number in self._passes]
        if found:
            self._backend.rewind(found[0].backend)
        for each in found:  # a greedy one, which draws nothing, may be before one that draws
            if each.random is not None:
                if each.device.type == "cuda":
                    torch.cuda.set_rng_state(each.random, each.device)
                else:
                    torch.set_rng_state(each.random)
                break
        self._link.rewind()
        self._passes.clear()
        self.dropped.clear()

    def _is_done(self, found: _Pass | None) -> bool:
        """Whether the results may be used: then the engine has kept what it needs to go on."""
        if found is None:
            return True
        if found.is_void:
            return False
        return found.step is None or self._link.is_done(found.step)


def await_end(result: Any, device: torch.device) -> None:
    """Wait until the pass that yields `result` has ended on `device`, void or not.

    Only then a GPU has told which wait it gave up, and has left the pass's tokens where the next
    pass finds its input.
    """
    if result.copy_done is not None:
        result.copy_done.synchronize()
    elif device.type == "cuda":  # without the overlap scheduler: its stream is the current one
        torch.cuda.current_stream(device).synchronize()


def _random_state(batch: Any, device: torch.device) -> torch.Tensor | None:
    """Return the state of the generator that the pass samples with; None if it does not."""
    info = batch.sampling_info
    if info is None or info.is_all_greedy:
        return None
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
