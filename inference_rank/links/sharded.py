# SPDX-License-Identifier: Apache-2.0
"""Several cache ranks of one inference rank, each with a part of its KV heads.

To the link they are one: it announces each step to all of them, hands each the queries of its
heads, and goes on once all have answered. If one is lost so is the epoch: the others are told, and
all take up the requests again as they were before the lost step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tandemkv.cache_rank.protocol.engine_program import EngineProgram
from tandemkv.cache_rank.protocol.errors import ContractError
from tandemkv.cache_rank.protocol.head_shard import parts_of
from tandemkv.cache_rank.protocol.mapped_tensors import MappedTensors
from tandemkv.cache_rank.protocol.model_spec import ModelSpec, shard_of
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings import RankSettings
from tandemkv.cache_rank.protocol.shared_region import RegionSizes
from tandemkv.cache_rank.protocol.step_ring import StepEntry, StepRow
from tandemkv.inference_rank.counters import Counters
from tandemkv.kernels.step_flags import StepWait

from .base import DecodeRows
from .connection import HANDSHAKE_TIMEOUT_S, OpenedEpoch, SharedConnection
from .signals import HostSignals, LinkSignals

_LEFT = "another cache rank of the same requests was lost"


@dataclass(frozen=True, slots=True)
class OpenedEpochs:
    """See `OpenedEpoch`: of each cache rank, in their order."""

    all: tuple[OpenedEpoch, ...]

    @property
    def is_gone(self) -> bool:
        """Whether one of them has ended the epoch already, or itself."""
        return any(each.is_gone for each in self.all)

    @property
    def has_lost_memory(self) -> bool:
        """Whether K/V of one of them are gone."""
        return any(each.has_lost_memory for each in self.all)

    def close(self) -> None:
        """Release all of them unused."""
        for each in self.all:
            each.close()


class ShardedConnection:
    """Connections to several cache ranks; see `SharedConnection`, whose part it takes.

    `parts` are in the order of their KV heads, and all count the same steps.
    """

    def __init__(self, parts: Sequence[SharedConnection]) -> None:
        self.parts = tuple(parts)

    # -- epochs --------------------------------------------------------------------------

    @property
    def lost_reason(self) -> str | None:
        """Why there is no epoch, by the first cache rank that was lost; None while connected."""
        lost = [(n, part) for n, part in enumerate(self.parts) if part.lost_reason is not None]
        if not lost:
            return None
        number, part = min(lost, key=lambda found: found[1].has_left)
        return f"cache rank {number}: {part.lost_reason}"

    @property
    def epoch(self) -> int:
        """Number of the epoch with the first cache rank; each counts its own."""
        return self.parts[0].epoch

    @property
    def program(self) -> EngineProgram:
        """See `SharedConnection`; all do the same for their heads."""
        return self.parts[0].program

    def connect(self, *, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> None:
        """See `SharedConnection.connect`."""
        for part in self.parts:
            part.take_books()
        self.adopt(self.open_connection(timeout_s=timeout_s))

    def open_connection(self, *, timeout_s: float) -> OpenedEpochs:
        """Meet all cache ranks; see `SharedConnection.open_connection`.

        Those that were lost come first: one that lives need not wait for one that starts. Each has
        `timeout_s`, for to one on another host it may take seconds to send what predicts queries.
        """
        opened: dict[SharedConnection, OpenedEpoch] = {}
        try:
            for part in sorted(self.parts, key=lambda part: part.has_left):
                opened[part] = part.open_connection(timeout_s=timeout_s)
        except BaseException:
            OpenedEpochs(tuple(opened.values())).close()
            raise
        return OpenedEpochs(tuple(opened[part] for part in self.parts))

    def adopt(self, opened: OpenedEpochs) -> None:
        """See `SharedConnection.adopt`.

        Raises
        ------
        ContractError
            If the policy tells two cache ranks different things of itself.
        """
        told = [
            (x.timing, x.traits, x.all_exact, x.keeps_queries, x.index_interval)
            for x in (each.welcome for each in opened.all)
        ]
        if any(found != told[0] for found in told):
            opened.close()
            raise ContractError(
                "the policy does another thing for some KV heads than for others, and several "
                "cache ranks have to do the same; use --cache-ranks 1"
            )
        for number, (part, each) in enumerate(zip(self.parts, opened.all, strict=True)):
            try:
                part.adopt(each)
            except BaseException:
                OpenedEpochs(opened.all[number + 1 :]).close()
                raise

    def mark_lost(self, reason: str) -> None:
        """End the epoch for want of those that have not finished the latest step, or of all."""
        late = [part for part in self.parts if not part.has_finished(self.step)]
        for part in late or self.parts:
            part.mark_lost(reason)
        self.leave(_LEFT)

    def leave(self, reason: str) -> None:
        """End the epoch of all engines that live; see `SharedConnection.leave`."""
        for part in self.parts:
            part.leave(reason)

    def close(self) -> None:
        """See `SharedConnection.close`."""
        for part in self.parts:
            part.close()

    # -- steps ---------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Number of the step that was announced last."""
        return self.parts[0].step

    @step.setter
    def step(self, step: int) -> None:
        for part in self.parts:
            part.step = step

    @property
    def confirmed(self) -> int:
        """Latest step whose results were taken."""
        return self.parts[0].confirmed

    @property
    def epoch_bytes(self) -> int:
        """Bytes of mapped memory that belong to the epoch."""
        return sum(part.epoch_bytes for part in self.parts)

    @property
    def resumed_rows(self) -> tuple[int, int]:
        """Rows that all engines took up in this epoch, and rows that one of them seeded anew."""
        restored, reseeded = zip(*(part.resumed_rows for part in self.parts), strict=True)
        return min(restored), max(reseeded)

    def handed_over(self, name: str, size: int) -> torch.Tensor:
        """See `SharedConnection.handed_over`: of all heads, a copy."""
        return torch.cat([part.handed_over(name, size) for part in self.parts], dim=1)

    def resident_positions(self, book: int) -> torch.Tensor:
        """See `SharedConnection.resident_positions`: of all heads, a copy."""
        return torch.cat([part.resident_positions(book) for part in self.parts], dim=1)

    def prepare(self, *, variant: int, num_cold: int, size: int) -> None:
        """See `SharedConnection.prepare`."""
        for part in self.parts:
            part.prepare(variant=variant, num_cold=num_cold, size=size)

    def resume(self, rows: tuple[StepRow, ...]) -> None:
        """See `SharedConnection.resume`."""
        for part in self.parts:
            part.resume(rows)

    def forget_rows(self) -> None:
        """See `SharedConnection.forget_rows`."""
        for part in self.parts:
            part.forget_rows()

    def has_finished(self, step: int) -> bool:
        """Whether all engines have done all of `step`."""
        return all(part.has_finished(step) for part in self.parts)

    def await_finish(self, step: int) -> bool:
        """See `SharedConnection.await_finish`."""
        return all(part.await_finish(step) for part in self.parts)

    def confirm(self, step: int) -> None:
        """See `SharedConnection.confirm`."""
        for part in self.parts:
            part.confirm(step)


class ShardedSignals:
    """Flags and staging of several cache ranks on the host; see `LinkSignals`.

    Parameters
    ----------
    parts : Sequence[LinkSignals]
        Of each cache rank, in the order of their KV heads.
    """

    is_captured = sends_beside = False

    def __init__(self, parts: Sequence[LinkSignals]) -> None:
        self._parts, self._shards = tuple(parts), parts_of(len(parts))

    def begin(self, entry: StepEntry, step: DecodeRows | None) -> bool:
        """See `LinkSignals.begin`: nobody hears of a step unless all have done the one before."""
        if not self.await_finished(entry.step - 1):
            return False
        # One that is lost by now answers no wait, and the others have heard of the step.
        heard = [part.begin(entry, step) for part in self._parts]
        return any(heard)

    def await_finished(self, step: int) -> bool:
        """See `LinkSignals.await_finished`."""
        return all(part.await_finished(step) for part in self._parts)

    def mask(self) -> None:
        """See `LinkSignals.mask`."""
        for part in self._parts:
            part.mask()

    def forget_lost(self) -> None:
        """See `LinkSignals.forget_lost`."""
        for part in self._parts:
            part.forget_lost()

    def put_stream(
        self, layer: int, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> None:
        """See `LinkSignals.put_stream`: each predicts the queries of its heads from all of it."""
        for part in self._parts:
            part.put_stream(layer, hidden_states, residual)

    def put_stream_beside(self, layer: int, stream: torch.Tensor) -> None:
        """See `LinkSignals.put_stream_beside`."""
        self.put_stream(layer, stream, None)

    def join_sent(self) -> None:
        """See `LinkSignals.join_sent`: nothing is beside the forward pass."""

    def put_query(self, layer: int, query: torch.Tensor) -> None:
        """See `LinkSignals.put_query`: to each the query heads of its KV heads."""
        for part, shard in zip(self._parts, self._shards, strict=True):
            part.put_query(layer, shard.of(query, 1))

    def put_windows(self, layer: int, windows: Sequence[torch.Tensor]) -> None:
        """See `LinkSignals.put_windows`."""
        for part, shard in zip(self._parts, self._shards, strict=True):
            part.put_windows(layer, [shard.of(window, 1) for window in windows])

    def raise_input(self, layer: int) -> None:
        """See `LinkSignals.raise_input`."""
        for part in self._parts:
            part.raise_input(layer)

    def raise_end(self) -> None:
        """See `LinkSignals.raise_end`."""
        for part in self._parts:
            part.raise_end()

    def await_ready(self, layer: int) -> bool:
        """See `LinkSignals.await_ready`: attention needs all heads."""
        return all(part.await_ready(layer) for part in self._parts)

    def ready_wait(self, layer: int) -> StepWait | None:
        """See `LinkSignals.ready_wait`: the host waits."""
        del layer
        return None

    def await_output(self, layer: int, size: int) -> bool:
        """See `LinkSignals.await_output`."""
        return all(part.await_output(layer, size) for part in self._parts)

    def end(self) -> bool:
        """See `LinkSignals.end`."""
        return all(part.end() for part in self._parts)

    def is_done(self, step: int) -> bool:
        """See `LinkSignals.is_done`."""
        return all(part.is_done(step) for part in self._parts)

    def give_up(self) -> None:
        """See `LinkSignals.give_up`."""
        for part in self._parts:
            part.give_up()


def make_connection(
    *,
    run_dirs: Sequence[RunDir],
    settings: RankSettings,
    model: ModelSpec,
    sizes: RegionSizes,
    kept: MappedTensors,
    counters: Counters,
) -> SharedConnection | ShardedConnection:
    """Return what leads to the cache rank in each of `run_dirs`, in the order of their KV heads.

    The other arguments are those of `SharedConnection`, for all heads.
    """
    parts = [
        SharedConnection(
            run_dir=run_dir,
            settings=settings,
            model=shard_of(model, shard.count),
            sizes=replace(sizes, shard=shard),
            kept=kept,
            counters=counters,
        )
        for run_dir, shard in zip(run_dirs, parts_of(len(run_dirs)), strict=True)
    ]
    return parts[0] if len(parts) == 1 else ShardedConnection(parts)


def host_signals(
    connection: SharedConnection | ShardedConnection,
    num_layers: int,
    *,
    sends_beside: bool = False,
) -> LinkSignals:
    """Return flags and staging on the host, of all cache ranks of `connection`."""
    if isinstance(connection, ShardedConnection):
        return ShardedSignals([HostSignals(part, num_layers) for part in connection.parts])
    return HostSignals(connection, num_layers, sends_beside=sends_beside)
