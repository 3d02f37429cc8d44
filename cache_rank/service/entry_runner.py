# SPDX-License-Identifier: Apache-2.0
"""Does what an announced step asks of the engine, flag by flag."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from tandemkv.cache_rank.protocol.engine import Engine
from tandemkv.cache_rank.protocol.engine_program import DecodeKind
from tandemkv.cache_rank.protocol.memory.mapped_tensors import MappedTensors
from tandemkv.cache_rank.protocol.memory.shared_region import FlagIndex, seed_buffer
from tandemkv.cache_rank.protocol.step_flags import StepFlags
from tandemkv.cache_rank.protocol.step_ring import RESIDENT, SLOW, EntryKind, StepEntry, StepRow
from tandemkv.kernels.to_device import to_device

from .row_versions import RowVersions
from .signals import HostSignals, StepAbortedError
from .stream_signals import Lanes, StepGraphs, StreamSignals

_DECODE_KINDS = tuple(DecodeKind)
_KEPT_DELAYS = 4096


class AnnouncementDelays:
    """From the announcement of decode steps until the engine began the latest of them.

    Noted by one thread, read by any. Both processes read the host's monotonic clock, so their times
    can be subtracted. On a GPU a step begins when its graph is launched, on a CPU when its own work
    starts. When the announcement was seen, when it had been taken from the ring, and when the
    launch had returned, which takes long for a graph of many kernels, tell where the time goes.
    """

    def __init__(self) -> None:
        self._delays_ns: deque[tuple[int, int, int, int]] = deque(maxlen=_KEPT_DELAYS)

    def note(self, entry: StepEntry, *, read_ns: int, begun_ns: int) -> None:
        """Note that all of `entry` is queued now; it was read and begun at these times."""
        start = entry.announced_ns
        if start:
            now = time.monotonic_ns()
            seen = entry.seen_ns - start
            self._delays_ns.append((seen, read_ns - start, begun_ns - start, now - start))

    def values(self) -> dict[str, float]:
        """Return medians and a 99th percentile in us by name; nothing before the first step."""
        found = self._delays_ns.copy()
        if not found:
            return {}
        last = len(found) - 1
        seen, read, begun, queued = (sorted(column) for column in zip(*found, strict=True))
        return {
            "announcement_seen_p50_us": seen[last // 2] / 1000,
            "announcement_read_p50_us": read[last // 2] / 1000,
            "announcement_p50_us": begun[last // 2] / 1000,
            "announcement_p99_us": begun[last * 99 // 100] / 1000,
            "announcement_queued_p50_us": queued[last // 2] / 1000,
        }


class EntryRunner:
    """The engine's side of the steps of one epoch. Used by one thread.

    On a GPU all is queued on the thread's current stream and on lanes beside it. A decode step that
    was prepared is replayed as a CUDA graph: it waits for the step to begin, reads its requests
    from the engine's memory, and ends with what the next step waits for. One that nobody may
    capture (`EngineProgram.is_captured`) is queued anew each time, in the order in which a CPU does
    it. This thread may wait for the device in it: for all that was queued the forward pass raises
    its flags without anything that comes later. `versions`, copies of the books, is None if nothing
    is selected. `host` is where the two hosts tell each other what was taken, and what was taken
    up; `warm_up` loads what prompts need, before the first of them.

    Attributes
    ----------
    delays : AnnouncementDelays
        Of the decode steps.
    """

    def __init__(
        self,
        engine: Engine,
        tensors: MappedTensors,
        signals: HostSignals | StreamSignals,
        versions: RowVersions | None,
        *,
        epoch: int,
        num_resident: int,
        is_gone: Callable[[], bool],
        host: StepFlags,
        warm_up: Callable[[], None],
    ) -> None:
        self._engine, self._program, self._signals = engine, engine.program, signals
        self._num_layers, self._num_resident = self._program.num_layers, num_resident
        self._tensors, self._table = tensors, tensors["req_to_token"]
        self._versions, self._epoch = versions, epoch
        self._is_gone, self._warm_up, self._host = is_gone, warm_up, host
        self._device = self._tensors.homes.here
        # Exact layers that attend here have a lane of their own.
        self._far_lane = engine.num_lanes
        num_lanes = engine.num_lanes + int(self._program.is_far)
        self._lanes, self._graphs = Lanes(self._device, num_lanes), StepGraphs(self._device)
        self._unindexed: list[int] = []
        self.num_restored = self.num_reseeded = 0
        self.delays = AnnouncementDelays()

    def run(self, entry: StepEntry) -> None:
        """Do what `entry` asks for; returns when its end is announced, or queued on a GPU.

        Raises `StepAbortedError` if the inference rank is gone.
        """
        read_ns = time.monotonic_ns()
        replay = self._replay_of(entry)
        if replay is not None:
            self._replay(entry, replay, read_ns)
            return
        self._signals.begin(entry.step)
        try:
            if entry.kind is EntryKind.EXTEND:
                self._settle(self._extend(entry))
            elif entry.kind is EntryKind.RESUME:
                self._resume(entry)
                self._settle(None)
            elif entry.kind is EntryKind.DECODE:
                self._decode(entry, read_ns)
            elif entry.kind is EntryKind.GROW:
                self._settle(self._grow(entry))
            else:
                self._prepare(entry)
                self._settle(None)
        except StepAbortedError:
            self._lanes.join()
            if self._is_gone():
                raise
        self._signals.finish()

    def _resume(self, entry: StepEntry) -> None:
        """Take up rows as they were before the first step whose results were not taken."""
        rows, generations = self._name(entry.rows)
        is_resident = [bool(row.flags & RESIDENT) for row in entry.rows]
        if self._versions is None:
            restored = is_resident  # sets that never change
        else:
            first_lost = self._host.value(FlagIndex.CONFIRMED) + 1
            found = self._versions.restore(rows, generations, step=first_lost)
            restored = [a and b for a, b in zip(found, is_resident, strict=True)]
        reseeded = [a and not b for a, b in zip(is_resident, restored, strict=True)]
        self._engine.resume(
            rows,
            [row.length for row in entry.rows],
            [self._table[row.row, : row.length].clone() for row in entry.rows],
            restored=restored,
            reseeded=reseeded,
            moved=self._signals.note_progress,
        )
        self._record(
            self._changed([row for row, is_anew in zip(rows, reseeded, strict=True) if is_anew])
        )
        # What a policy remembered elsewhere is gone, whatever the books say.
        self.num_restored = 0 if self._engine.forgets else sum(restored)
        self.num_reseeded = sum(is_resident) - self.num_restored
        self._host.raise_to(FlagIndex.RESTORED, self.num_restored)
        self._host.raise_to(FlagIndex.RESEEDED, self.num_reseeded)
        self._signals.raise_loaded()
        if isinstance(self._signals, StreamSignals):
            self._signals.confirm_prepared()

    def _name(self, rows: Sequence[StepRow]) -> tuple[list[int], list[int]]:
        """Note, and return, which request is in each of `rows`: its generation."""
        numbers, generations = [row.row for row in rows], [row.generation for row in rows]
        if self._versions is not None and numbers:
            self._versions.name(numbers, generations, epoch=self._epoch)
        return numbers, generations

    def _changed(self, rows: list[int]) -> torch.Tensor | None:
        return to_device(rows, self._device) if rows else None

    def _extend(self, entry: StepEntry) -> torch.Tensor | None:
        """Do a prefill step; returns the rows whose books it has changed."""
        engine, rows = self._engine, entry.rows
        self._name(rows)
        self._signals.await_begin()
        # The radix cache may rewrite a row while its prompt is still being scored.
        tables = [self._table[row.row, : row.length].clone() for row in rows]
        self._signals.raise_loaded()
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
            self._signals.await_input(layer)
            engine.extend(layer, slots)
            self._signals.note_progress()
            if seeds and self._program.is_sparse_layer(layer):
                first, queries = 0, seed_buffer(self._tensors, layer)
                for request, row in seeds:
                    window = queries[first : first + row.window]
                    engine.seed(layer, request, row.row, window)
                    first += row.window
                self._signals.raise_ready(layer)
        return self._changed([row.row for _, row in seeds])

    def _grow(self, entry: StepEntry) -> torch.Tensor:
        """Fill the sets of requests that were dense; returns their rows."""
        numbers, _ = self._name(entry.rows)
        self._signals.await_begin()
        rows = to_device(numbers, self._device)
        # Beside the model the tokens of a row that was dense are in place already.
        tables = None if self._program.is_far else self._table[rows, : self._num_resident]
        self._engine.seed_identity(rows, tables)
        self._signals.raise_loaded()
        return rows

    def _replay_of(self, entry: StepEntry) -> Callable[[], None] | None:
        if entry.kind is not EntryKind.DECODE:
            return None
        return self._graphs.replay_of(str(_DECODE_KINDS[entry.variant]), len(entry.rows))

    def _replay(self, entry: StepEntry, replay: Callable[[], None], read_ns: int) -> None:
        """Queue the graph of a decode step."""
        signals = self._signals
        assert isinstance(signals, StreamSignals)
        signals.begin_counted(entry.step)
        self._engine.set_num_cold(entry.num_cold)
        begun_ns = time.monotonic_ns()
        replay()
        self.delays.note(entry, read_ns=read_ns, begun_ns=begun_ns)
        self._engine.begin_step()  # behind the launch: nobody waits for what it copies
        signals.finish()

    def _decode(self, entry: StepEntry, read_ns: int) -> None:
        """Do a decode step that nobody has captured."""
        self._engine.set_num_cold(entry.num_cold)
        self.delays.note(entry, read_ns=read_ns, begun_ns=time.monotonic_ns())
        self._engine.begin_step()
        self._queue_decode(entry)

    def _queue_counted(self, entry: StepEntry, signals: StreamSignals) -> None:
        signals.count()
        self._queue_decode(entry)

    def _queue_decode(self, entry: StepEntry) -> None:
        """Queue all of a decode step.

        Where it is captured, `entry` tells how many requests there are, and not which.
        """
        kind, size = _DECODE_KINDS[entry.variant], len(entry.rows)
        self._signals.await_begin()
        rows, lengths = self._signals.requests_of(entry)
        is_selecting = kind is DecodeKind.SELECTING
        # Those of the next step may be there before the books are copied.
        changed = rows.clone() if is_selecting and self._versions is not None else None
        if self._program.asks(kind):
            slow = [bool(row.flags & SLOW) for row in entry.rows]
            self._engine.begin_decode(
                rows,
                lengths,
                self._table,
                selects=is_selecting,
                slow=torch.tensor(slow) if self._program.slow_steps else None,
            )
        self._signals.raise_loaded()
        self._select(kind, size)
        self._settle(changed)

    def _prepare(self, entry: StepEntry) -> None:
        """Load the kernels of prompts (no requests), or capture a decode step of so many.

        A step that nobody may capture is rehearsed: its kernels are loaded, and the policy is asked
        about no request.
        """
        signals, kind, size = self._signals, _DECODE_KINDS[entry.variant], len(entry.rows)
        if not isinstance(signals, StreamSignals):
            return
        if not size:
            self._warm_up()
        else:
            with signals.masked():
                if self._program.is_captured:
                    body = partial(self._queue_counted, entry, signals)
                    self._graphs.capture(str(kind), size, body)
                else:
                    self._queue_decode(entry)
        signals.confirm_prepared()

    def _select(self, kind: DecodeKind, size: int) -> None:
        """Queue what a decode step does once its requests are loaded."""
        program = self._program
        self._unindexed = [
            layer
            for layer in range(self._num_layers)
            if program.indexes(kind, layer) and not program.hands_over_later(kind, layer)
        ]
        for layer in range(self._num_layers):
            if kind is DecodeKind.SELECTING and program.reads_stream(layer):
                self._select_ahead(layer, size)
            if program.attends_remotely(kind, layer):
                self._attend_remotely(layer, size)
            if program.attends_in(layer):
                self._attend(layer, size)
            elif program.hands_over_query(kind, layer):
                self._select_now(layer, size)
            elif program.hands_over_later(kind, layer):
                self._select_later(kind, layer, size)
        self._lanes.join()
        if kind is not DecodeKind.DENSE:
            self._signals.await_end()
            self._index_stored(self._num_layers, size)
            self._engine.end_step()

    def _select_ahead(self, layer: int, size: int) -> None:
        program, engine, streams = self._program, self._engine, self._tensors["streams"]
        before: int | None = None
        for target in program.targets_of(layer):
            # Two selections may begin at the first layer; the second cannot be needed before the
            # first has finished, and beside each other they take 274 us instead of 185 (H200).
            lane = engine.lane_of(target)
            with self._lanes.enter(lane, after=before):
                self._signals.await_input(layer, size)
                self._stop_if_lost()
                engine.choose_ahead(target, streams[layer, :size])
                self._fetch(program.fetched_by(target), size)
                self._index_stored(layer, size, lane)
            before = lane
        if layer == program.last_entry:
            for late in program.late_layers:
                lane = engine.lane_of(late)
                # Behind `before`, for which the forward pass has come to this layer.
                with self._lanes.enter(lane, after=before):
                    self._stop_if_lost()
                    self._index_stored(layer, size, lane)  # candidates of the next step
                    engine.choose_late(late, streams[late, :size])
                    self._fetch_for_next(DecodeKind.SELECTING, late, size)
                before = lane

    def _select_now(self, layer: int, size: int) -> None:
        lane = self._engine.lane_of(layer)
        with self._lanes.enter(lane):
            self._signals.await_query(layer, size)
            self._stop_if_lost()
            self._engine.choose(layer, self._tensors["queries"][layer, :size])
            self._fetch(self._program.fetched_by(layer), size)
            self._index_stored(layer, size, lane)

    def _attend(self, layer: int, size: int) -> None:
        self._signals.await_query(layer, size)
        query = self._tensors["queries"][layer, :size]
        self._tensors["outputs"][:size] = self._engine.attend_selected(layer, query)
        self._signals.raise_ready(layer)

    def _attend_remotely(self, layer: int, size: int) -> None:
        """Attend to all tokens in a layer whose K/V are here and not where the model is."""
        with self._lanes.enter(self._far_lane):
            self._signals.await_query(layer, size)
            out = self._engine.attend(layer, self._tensors["queries"][layer, :size])
            self._signals.put_output(layer, out)

    def _select_later(self, kind: DecodeKind, layer: int, size: int) -> None:
        engine = self._engine
        with self._lanes.enter(engine.lane_of(layer)):
            self._signals.await_query(layer, size)
            if self._program.is_source(layer):
                self._stop_if_lost()
                engine.append(layer, size)
                query = self._tensors["queries"][layer, :size]
                if not self._program.selects_later(kind):
                    engine.observe(layer, query)
                    return
                engine.choose(layer, query)
            self._fetch_for_next(kind, layer, size)

    def _stop_if_lost(self) -> None:
        """End a step that is lost before a policy is asked that would keep what it is given."""
        if not self._program.is_captured:
            self._signals.stop_if_lost()

    def _index_stored(self, layer: int, size: int, lane: int | None = None) -> None:
        """Index the newest keys of layers before `layer`, of one lane if given.

        The forward pass has come to `layer`, so it has stored them.
        """
        lane_of = self._engine.lane_of
        due = [x for x in self._unindexed if x < layer and lane in (None, lane_of(x))]
        for stored in due:
            self._unindexed.remove(stored)
            self._engine.append(stored, size)

    def _fetch(self, layers: tuple[int, ...], size: int) -> None:
        for layer in layers:
            self._engine.fetch(layer, size)
            self._signals.raise_ready(layer)

    def _fetch_for_next(self, kind: DecodeKind, layer: int, size: int) -> None:
        self._engine.fetch(layer, size)
        if self._program.tells_of_next(kind, layer):
            self._signals.raise_ready(layer)

    def _settle(self, changed: torch.Tensor | None) -> None:
        """End what the forward pass waits for, and copy the books of the rows that have changed."""
        # What is selected for the next step is waited for by nothing else: the next step must not
        # be done before this one is kept.
        if self._program.selects_for_next_step:
            self._record(changed)
            self._signals.settle()
        else:
            self._signals.settle()
            self._record(changed)

    def _record(self, changed: torch.Tensor | None) -> None:
        if self._versions is not None and changed is not None:
            self._versions.record(changed, step=self._signals.step)
