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
from tandemkv.cache_rank.protocol.memory.mapped_tensors import MappedTensors
from tandemkv.cache_rank.protocol.memory.shared_region import RegionSizes
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec, part_of
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings
from tandemkv.cache_rank.protocol.step_ring import StepRow
from tandemkv.inference_rank.counters import Counters

from .connection import HANDSHAKE_TIMEOUT_S, OWN, OpenedEpoch, SharedConnection
from .kept_tensors import make_tensors

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

        Raises `ContractError` if the policy tells two cache ranks different things of itself.
        """
        told = [each.welcome.traits for each in opened.all]
        if any(traits != told[0] for traits in told):
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

    def resume(self, rows: tuple[StepRow, ...]) -> None:
        """See `SharedConnection.resume`."""
        for part in self.parts:
            part.resume(rows)

    def lose_if_stuck(self) -> None:
        """See `SharedConnection.lose_if_stuck`: each engine by its own progress."""
        for part in self.parts:
            part.lose_if_stuck()

    def forget_rows(self) -> None:
        """See `SharedConnection.forget_rows`."""
        for part in self.parts:
            part.forget_rows()

    def has_finished(self, step: int) -> bool:
        """Whether all engines have done all of `step`."""
        return all(part.has_finished(step) for part in self.parts)

    def confirm(self, step: int) -> None:
        """See `SharedConnection.confirm`."""
        for part in self.parts:
            part.confirm(step)


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

    The other arguments are those of `SharedConnection`, for all heads. Raises `SettingsError` if
    there is no memory for what each has of its own.
    """
    parts = []
    for run_dir, shard in zip(run_dirs, parts_of(len(run_dirs), model.num_kv_heads), strict=True):
        own_model, own_sizes = part_of(model, shard), replace(sizes, shard=shard)
        homes = kept.homes.with_engine(shard.index)
        parts.append(
            SharedConnection(
                run_dir=run_dir,
                settings=settings,
                model=own_model,
                sizes=own_sizes,
                kept=kept,
                own=make_tensors(OWN, own_model, settings, own_sizes, homes, run_dir),
                counters=counters,
            )
        )
    return parts[0] if len(parts) == 1 else ShardedConnection(parts)
