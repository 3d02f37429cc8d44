# SPDX-License-Identifier: Apache-2.0
"""Link ``shared``: the engine in another process of this host, in memory that both map.

What the forward pass has is written into staging that the engine reads, and a flag is raised; what
the engine has done is written into the resident sets directly, and a flag is waited for. The engine
derives from the announcement which flags come in which order (`engine_program`). On a GPU all of
that is queued, or captured, with the forward pass (`signals`).

Between two GPUs the same calls are made; what differs is where tensors lie (`shared_region`), that
exact layers attend where the K/V are, and that the residual stream is sent beside the product with
the layer's queries, keys and values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tandemkv.cache_rank.protocol.engine import PADDING_ROW
from tandemkv.cache_rank.protocol.engine_program import DecodeKind, EngineProgram
from tandemkv.cache_rank.protocol.errors import CacheRankLostError
from tandemkv.cache_rank.protocol.memory.shared_region import SEED_BUFFERS
from tandemkv.cache_rank.protocol.step_ring import SLOW, EntryKind, StepEntry, StepRow
from tandemkv.inference_rank.sglang.pool import store_tokens
from tandemkv.inference_rank.sglang.residual_hooks import check_whole, install_residual_hooks
from tandemkv.kernels.step_flags import StepWait

from .base import DecodeRows, ExtendRow, StepLostError
from .connection import SharedConnection
from .sharded import ShardedConnection
from .signals import HostSignals

_DECODE_KINDS = tuple(DecodeKind)
_PROMPTS = DecodeKind.DENSE, 0
"""What an engine is asked for to load the kernels of prompts."""


class SharedLink:
    """See `Link`.

    `connection` has an open epoch. `generation_of` returns the identity of the present tenant of a
    row, `rows_on_host` the rows of the pass that is being made, if they are known without waiting
    for the device. `pool` is SGLang's, where the engine attends to exact layers.

    `pass_step` was announced for the pass under way, or the latest; None: it asked for nothing.
    With `is_void` the engine did not do its part of that pass. With `breaks_off` such a pass ends
    at once, with `StepLostError`; else it runs through, as it does on a GPU.
    """

    def __init__(
        self,
        connection: SharedConnection | ShardedConnection,
        signals: HostSignals,
        *,
        generation_of: Callable[[int], int],
        rows_on_host: Callable[[], list[int] | None],
        pool: Any = None,
    ) -> None:
        self._connection, self._signals = connection, signals
        self._generation_of, self._rows_on_host = generation_of, rows_on_host
        self._pool, self._size = pool, 0
        self._kind = DecodeKind.DENSE
        self._is_decode = self._is_open = False
        self._is_settled = True
        self._grown: frozenset[int] = frozenset()
        self.pass_step: int | None = None
        self.is_void, self.breaks_off = False, True
        self._has_seeds = False
        self._seeded: dict[int, int] = {}
        # In the order of the captures: a graph takes memory that those before it have.
        self._captured: list[tuple[DecodeKind, int]] = []
        self._ready: set[tuple[DecodeKind, int]] = set()

    @property
    def program(self) -> EngineProgram:
        """See `Link`; that of the present epoch."""
        return self._connection.program

    def hook(self, model: Any) -> None:
        """Read the residual stream of SGLang's `model`, if the policy predicts queries from it."""
        if self.program.needs_hidden:
            install_residual_hooks(model, self._on_stream)

    # -- prefill -------------------------------------------------------------------------

    def begin_extend(self, requests: Sequence[ExtendRow]) -> None:
        """See `Link.begin_extend`."""
        self._is_decode = False
        self._seeded = {}
        self._has_seeds = any(request.window is not None for request in requests)
        rows = [
            StepRow(
                row=request.row,
                generation=self._generation_of(request.row),
                length=request.length,
                prefix_len=request.prefix_len,
                window=0 if request.window is None else request.window[1] - request.window[0],
            )
            for request in requests
        ]
        self._announce(EntryKind.EXTEND, rows)
        if self._is_open and self.program.tells_all:  # prefixes that are not here come back first
            self._check(self._signals.end())

    def extend(self, layer: int, slots: torch.Tensor, windows: Sequence[torch.Tensor]) -> None:
        """See `Link.extend`."""
        if not self._is_open or not self.program.extends(layer, seeds=self._has_seeds):
            return
        if not self._signals.is_captured and self._connection.lost_reason is not None:
            self._lose()
            return
        if windows:
            # The buffer is another layer's until the engine has seeded that.
            before = self._seeded.get(layer % SEED_BUFFERS)
            if before is not None:
                self._check(self._signals.await_ready(before))
            self._seeded[layer % SEED_BUFFERS] = layer
            self._signals.put_windows(layer, windows)
        self._signals.raise_input(layer)

    def end_extend(self) -> None:
        """See `Link.end_extend`."""
        if self._is_open and self.program.tells_all:
            self._signals.raise_end()
        self._end()

    def seed_identity(self, rows: torch.Tensor, tables: torch.Tensor | None) -> None:
        """See `Link.seed_identity`; announced before the step that follows."""
        del tables
        self._grown = self._grown.union(row for row in rows.tolist() if row != PADDING_ROW)

    # -- decode --------------------------------------------------------------------------

    def begin_decode(self, kind: DecodeKind, step: DecodeRows) -> None:
        """See `Link.begin_decode`."""
        self._is_decode, self._kind = True, kind
        self._size = len(step.rows)
        is_asked = self.program.asks(kind)
        if step.is_rehearsal:
            self._signals.mask()
            self._is_open = is_asked
            if is_asked and (kind, self._size) not in self._captured:
                self._captured.append((kind, self._size))
                self._make_ready(_PROMPTS, self._captured[-1])
            return
        self._grow()
        if not is_asked:
            self._is_open = False
            self._settle()
            return  # nothing is asked of the engine
        slow = [False] * self._size if step.slow is None else step.slow.tolist()
        rows = [
            StepRow(
                row=row,
                generation=self._generation_of(row),
                length=length,
                prefix_len=max(0, length - 1),
                flags=SLOW if is_slow else 0,
            )
            for row, length, is_slow in zip(
                self._host_rows(step.rows), step.lengths_on_host.tolist(), slow, strict=True
            )
        ]
        variant = _DECODE_KINDS.index(kind)
        self._announce(EntryKind.DECODE, rows, variant=variant, num_cold=step.num_cold, step=step)

    def enter_attention(self, layer: int) -> None:
        """See `Link.enter_attention`."""
        del layer
        self._signals.join_sent()

    def select_with_query(
        self, layer: int, query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, owner: Any,
        forward_batch: Any, save_kv_cache: bool,
    ) -> None:  # fmt: skip
        """See `Link.select_with_query`."""
        program = self.program
        is_remote = program.attends_remotely(self._kind, layer)
        if is_remote and save_kv_cache:
            store_tokens(self._pool, owner, forward_batch, k, v)
        if self._is_open and (is_remote or program.hands_over_query(self._kind, layer)):
            self._signals.put_query(layer, query)

    def remote_output(self, layer: int) -> torch.Tensor | None:
        """See `Link.remote_output`; of no use in a pass that is void."""
        if not self.program.attends_remotely(self._kind, layer):
            return None
        if not self._is_open or not self._signals.await_output(layer, self._size):
            self._lose()
        return self._connection.handed_over("remote_outputs", self._size).flatten(1)

    def attend_selected(self, layer: int, query: torch.Tensor) -> torch.Tensor | None:
        """See `Link.attend_selected`."""
        if not self.program.attends_in(layer):
            return None
        if self._is_open:
            self._signals.put_query(layer, query)
            if self._signals.await_ready(layer):
                return self._connection.handed_over("outputs", len(query))
            self._lose()
        nothing = query.new_zeros((*query.shape[:2], query.shape[2] + 1), dtype=torch.float32)
        nothing[..., -1] = float("-inf")  # the log of no weight at all
        return nothing

    def await_set(self, layer: int) -> StepWait | None:
        """See `Link.await_set`."""
        if not self._is_open or not self.program.awaits(self._kind, layer):
            return None
        wait = self._signals.ready_wait(layer)
        if wait is None:
            self._check(self._signals.await_ready(layer))
        return wait

    def resident_positions(self, layer: int) -> torch.Tensor | None:
        """See `Link.resident_positions`: the engine's books are mapped here, too."""
        book = self.program.book_of(layer)
        return None if book is None else self._connection.resident_positions(book)

    def attended(self, layer: int, query: torch.Tensor, batch_size: int) -> None:
        """See `Link.attended`."""
        program, kind = self.program, self._kind
        if program.attends_remotely(kind, layer):
            return  # the engine has the query already
        if self._is_open and program.hands_over_later(kind, layer):
            self._signals.put_query(layer, query)

    def end_step(self) -> None:
        """See `Link.end_step`."""
        if self._is_open:
            self._signals.raise_end()
        self._end()

    def recover(self) -> None:
        """See `Link.recover`."""
        if self._is_open:
            self._signals.give_up()
            self._is_open = False

    def rewind(self) -> None:
        """Forget the pass that was lost, and what was to be asked for with it.

        All passes of its epoch have ended.
        """
        self.recover()
        self._signals.forget_lost()
        self._grown, self.pass_step, self.is_void = frozenset(), None, False
        self._ready.clear()  # the engine of the next epoch is another

    # -- inside --------------------------------------------------------------------------

    def _announce(
        self, kind: EntryKind, rows: list[StepRow], *, variant: int = 0, num_cold: int = 0,
        step: DecodeRows | None = None,
    ) -> None:  # fmt: skip
        """Begin a step, once the engine has done with all that earlier ones have asked for."""
        self.recover()
        connection = self._connection
        self.pass_step, self.is_void = None, False
        if self._signals.is_captured:
            with contextlib.suppress(CacheRankLostError):  # `begin` finds it lost as well
                self._make_ready_for(kind, _DECODE_KINDS[variant], len(rows))
        connection.step += 1
        entry = StepEntry(
            kind=kind, step=connection.step, variant=variant, num_cold=num_cold, rows=tuple(rows)
        )
        self._is_open = self._signals.begin(entry, step)
        if self._is_open:
            self.pass_step, self._is_settled = connection.step, False
        else:
            connection.step -= 1  # nobody heard of it
            self._lose()

    def _grow(self) -> None:
        """Let the engine fill the sets of requests that have just outgrown dense attention.

        Before the step, not in it: some of its layers attend without waiting for the engine.
        """
        if not self._grown:
            return
        grown, self._grown = sorted(self._grown), frozenset()
        self._announce(
            EntryKind.GROW,
            [StepRow(row=row, generation=self._generation_of(row)) for row in grown],
        )
        self._is_open = False

    def _settle(self) -> None:
        """Let a step that is not announced wait for the engine: it reads what that has written."""
        if self._is_settled:
            return
        self._is_settled, self.pass_step = True, self._connection.step
        self._check(self._signals.await_finished(self._connection.step))

    def is_done(self, step: int) -> bool:
        """Wait until the engine has done all of `step`; False: it will not."""
        return self._signals.is_done(step)

    def _check(self, is_answered: bool) -> None:
        if not is_answered:
            self._lose()

    def _lose(self) -> None:
        self.is_void = True
        if self.breaks_off and not self._signals.is_captured:
            raise StepLostError(self._connection.lost_reason or "")

    def _make_ready_for(self, entry: EntryKind, kind: DecodeKind, size: int) -> None:
        """Let the engine of a new epoch load or capture what a step takes, when it comes first.

        So requests that were interrupted wait for the graphs of their own steps, and not for all.
        Of a policy whose steps nobody captures, SGLang rehearses none: the engine does.
        """
        wanted, step = [_PROMPTS], (kind, size)  # what is not captured is loaded with prompts
        if entry is EntryKind.DECODE and step in self._captured:
            wanted = self._captured[: self._captured.index(step) + 1]
        elif entry is EntryKind.DECODE and not self.program.is_captured:
            wanted = [_PROMPTS, step]
        if wanted[-1] in self._ready:
            return
        if self._signals.drain():
            self._make_ready(*wanted)

    def _make_ready(self, *wanted: tuple[DecodeKind, int]) -> None:
        """Let all engines make ready at once; nothing happens once the epoch is lost."""
        for kind, size in wanted:
            if (kind, size) in self._ready or self._connection.lost_reason is not None:
                continue
            for part in self._connection.parts:
                part.ask_to_prepare(variant=_DECODE_KINDS.index(kind), size=size)
            for part in self._connection.parts:
                part.await_prepared()
            self._ready.add((kind, size))

    def _host_rows(self, rows: torch.Tensor) -> list[int]:
        """Return `rows` ``[B]`` on the host; all 0 on a GPU where nobody knows them."""
        if not self._signals.is_captured:
            return rows.tolist()
        found = self._rows_on_host() or []
        return [*found, *[0] * (len(rows) - len(found))]

    def _end(self) -> None:
        if self._is_open:
            self._check(self._signals.end())
        if not self._signals.is_captured:
            self._is_open = False

    def _on_stream(self, layer: int, stream: torch.Tensor) -> None:
        is_selecting = self._is_open and self._is_decode and self._kind is DecodeKind.SELECTING
        if is_selecting and self.program.reads_stream(layer):
            check_whole(layer, stream, self._size)
            self._signals.put_stream(layer, stream)
