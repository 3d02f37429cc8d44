# SPDX-License-Identifier: Apache-2.0
"""Does what an announced step asks of the engine, flag by flag."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tandemkv.cache_rank.counters import BusyClock
from tandemkv.cache_rank.protocol.engine_program import DecodeKind, EngineProgram
from tandemkv.cache_rank.protocol.errors import CacheRankError
from tandemkv.cache_rank.protocol.fault_points import reach
from tandemkv.cache_rank.protocol.local import LocalCacheRank
from tandemkv.cache_rank.protocol.mapped_tensors import MappedTensors
from tandemkv.cache_rank.protocol.shared_region import FlagIndex, seed_buffer
from tandemkv.cache_rank.protocol.step_flags import StepFlags
from tandemkv.cache_rank.protocol.step_ring import GROWN, SLOW, EntryKind, StepEntry

from .row_versions import RowVersions

_DECODE_KINDS = tuple(DecodeKind)
_LONGEST_WAIT_S = 3600.0
"""Nobody waits for so long: `is_over` ends a wait as soon as the other side is gone."""


class StepAbortedError(CacheRankError):
    """The inference rank gave the step up, or is gone."""


class EntryRunner:
    """The engine's side of the steps of one epoch. Used by one thread.

    Parameters
    ----------
    engine : LocalCacheRank
        On the mapped pools.
    tensors : MappedTensors
        What the inference rank made (`shared_region`).
    flags : StepFlags
        Of the epoch.
    versions : RowVersions or None
        Copies of the books; None if nothing is selected.
    epoch, num_resident : int
        Number of the epoch, and R.
    is_over : Callable
        Whether the inference rank is gone.
    clock : BusyClock
        Told when the engine waits for the forward pass.
    """

    def __init__(
        self,
        engine: LocalCacheRank,
        tensors: MappedTensors,
        flags: StepFlags,
        versions: RowVersions | None,
        *,
        epoch: int,
        num_layers: int,
        num_resident: int,
        is_over: Callable[[], bool],
        clock: BusyClock,
    ) -> None:
        self._engine, self._program = engine, engine.program
        self._flags, self._at = flags, FlagIndex(num_layers)
        self._num_layers, self._num_resident = num_layers, num_resident
        self._tensors, self._table = tensors, tensors["req_to_token"]
        self._versions, self._epoch = versions, epoch
        self._is_gone, self._clock = is_over, clock
        self._step = self._progress = 0

    def run(self, entry: StepEntry) -> None:
        """Do what `entry` asks for; returns when its end is announced.

        Raises
        ------
        StepAbortedError
            If the inference rank is gone.
        """
        self._step = entry.step
        try:
            if entry.kind is EntryKind.EXTEND:
                self._extend(entry)
            else:
                self._decode(entry)
        except StepAbortedError:
            if self._is_gone():
                raise
        self._flags.raise_to(self._at.FINISHED, entry.step)

    def _extend(self, entry: StepEntry) -> None:
        engine, rows = self._engine, entry.rows
        # The radix cache may rewrite a row while its prompt is still being scored.
        tables = [self._table[row.row, : row.length].clone() for row in rows]
        self._flags.raise_to(self._at.LOADED, entry.step)
        engine.begin_extend(
            [row.row for row in rows],
            [row.prefix_len for row in rows],
            [row.length for row in rows],
            tables,
        )
        slots = torch.cat([t[r.prefix_len :] for t, r in zip(tables, rows, strict=True)]).long()
        seeds = [(i, row) for i, row in enumerate(rows) if row.window]
        for layer in range(self._num_layers):
            if not self._program.extends(layer, seeds=bool(seeds)):
                continue
            self._wait(self._at.input(layer))
            engine.extend(layer, slots)
            if seeds and self._program.is_sparse_layer(layer):
                first, queries = 0, seed_buffer(self._tensors, layer)
                for request, row in seeds:
                    window = queries[first : first + row.window]
                    engine.seed(layer, request, row.row, window)
                    first += row.window
                self._raise(self._at.ready(layer))
        self._record([row.row for _, row in seeds], [row.generation for _, row in seeds])

    def _decode(self, entry: StepEntry) -> None:
        engine, kind = self._engine, _DECODE_KINDS[entry.variant]
        grown = [row.row for row in entry.rows if row.flags & GROWN]
        if grown:
            index = torch.tensor(grown)
            engine.seed_identity(index, self._table[index, : self._num_resident])
        engine.begin_step()
        program = self._program
        if kind is not DecodeKind.DENSE or program.attends:
            slow = torch.tensor([bool(row.flags & SLOW) for row in entry.rows])
            engine.begin_decode(
                torch.tensor([row.row for row in entry.rows]),
                torch.tensor([row.length for row in entry.rows]),
                self._table,
                selects=kind is DecodeKind.SELECTING,
                num_cold=entry.num_cold,
                slow=slow if program.slow_steps else None,
            )
        self._flags.raise_to(self._at.LOADED, entry.step)
        size = len(entry.rows)
        for layer in range(self._num_layers):
            if kind is DecodeKind.SELECTING and self._program.reads_stream(layer):
                self._wait(self._at.input(layer))
                self._select_ahead(layer, size)
            if program.attends_in(layer):
                self._attend(layer, size)
            elif program.hands_over_query(kind, layer):
                self._wait(self._at.query(layer))
                engine.choose(layer, self._tensors["queries"][layer, :size])
                self._fetch(self._program.fetched_by(layer), size)
            elif self._program.hands_over_later(kind, layer):
                self._wait(self._at.query(layer))
                self._select_later(kind, layer, size)
        if kind is not DecodeKind.DENSE:
            self._wait(self._at.input(self._at.end))  # all tokens of the step are stored
            self._append(kind, size)
            engine.end_step()
        changed = entry.rows if kind is DecodeKind.SELECTING else ()
        changed = tuple(r for r in entry.rows if r.row and (r in changed or r.flags & GROWN))
        self._record([row.row for row in changed], [row.generation for row in changed])

    def _select_ahead(self, layer: int, size: int) -> None:
        program, streams = self._program, self._tensors["streams"]
        for target in program.targets_of(layer):
            self._engine.choose_ahead(target, streams[layer, :size])
            self._fetch(program.fetched_by(target), size)
        if layer == program.last_entry:
            for late in program.late_layers:
                self._engine.choose_late(late, streams[late, :size])
                self._engine.fetch(late, size)

    def _attend(self, layer: int, size: int) -> None:
        self._wait(self._at.query(layer))
        query = self._tensors["queries"][layer, :size]
        self._tensors["outputs"][:size] = self._engine.attend_selected(layer, query)
        self._raise(self._at.ready(layer))

    def _select_later(self, kind: DecodeKind, layer: int, size: int) -> None:
        engine = self._engine
        if self._program.is_source(layer):
            engine.append(layer, size)
            query = self._tensors["queries"][layer, :size]
            if kind is not DecodeKind.SELECTING:
                engine.observe(layer, query)
                return
            engine.choose(layer, query)
        engine.fetch(layer, size)

    def _append(self, kind: DecodeKind, size: int) -> None:
        program: EngineProgram = self._program
        for layer in range(self._num_layers):
            if program.indexes(kind, layer) and not program.hands_over_later(kind, layer):
                self._engine.append(layer, size)

    def _fetch(self, layers: tuple[int, ...], size: int) -> None:
        for layer in layers:
            self._engine.fetch(layer, size)
            self._raise(self._at.ready(layer))

    def _record(self, rows: list[int], generations: list[int]) -> None:
        if self._versions is not None:
            self._versions.record(rows, generations, epoch=self._epoch, step=self._step + 1)

    def _raise(self, flag: int) -> None:
        reach("cache_rank.layer")
        self._progress += 1
        self._flags.raise_to(self._at.PROGRESS, self._progress)
        self._flags.raise_to(flag, self._step)

    def _wait(self, flag: int) -> None:
        with self._clock.waiting():  # for the forward pass, however long it takes
            found = self._flags.wait(
                flag, self._step, timeout_s=_LONGEST_WAIT_S, is_over=self._is_over
            )
        if not found:
            raise StepAbortedError(f"step {self._step} was given up")

    def _is_over(self) -> bool:
        return self._flags.value(self._at.ABORTED) - self._step >= 0 or self._is_gone()
