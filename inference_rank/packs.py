# SPDX-License-Identifier: Apache-2.0
"""Packs that are under way: waited for with a deadline, applied in order, acknowledged."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tandemkv.cache_rank.protocol.errors import ProtocolError, TransferTimeoutError
from tandemkv.cache_rank.protocol.exchange_settings import ExchangeSettings
from tandemkv.cache_rank.protocol.pack_layout import PackLayout
from tandemkv.cache_rank.protocol.tally import DeviceTally
from tandemkv.kernels.placing import SideReader, place
from tandemkv.kernels.scatter import scatter_pack

from .counters import Counters
from .resident_set import ResidentSet
from .step_transfers import Receive


@dataclass(slots=True)
class _Pending:
    receive: Receive
    layout: PackLayout
    due: int
    is_late: bool = False


class PackQueue:
    """Packs of one epoch, in the order in which they arrive.

    A pack is written to the resident set by the scheduler thread only, before the attention
    that is to use it; nothing writes into resident slots from outside.
    """

    def __init__(
        self,
        *,
        resident: ResidentSet,
        exchange: ExchangeSettings,
        counters: Counters,
        generation_of: Callable[[int], int],
        epoch: int,
    ) -> None:
        self._resident = resident
        self._exchange = exchange
        self._counters = counters
        self._generation_of = generation_of
        self._epoch = epoch
        self._pending: deque[_Pending] = deque()
        self._reader = SideReader(resident.device)
        self._tally = DeviceTally(counters, ("scattered_rows_total",), resident.device)
        self.applied_seq = 0

    def add(self, receive: Receive, layout: PackLayout, due: int) -> None:
        """Queue a posted receive; decode step number `due` is the first to use it."""
        self._pending.append(_Pending(receive, layout, due))

    def apply_for(self, layer: int, decode_step: int) -> None:
        """Apply every pack that `layer` may use in `decode_step`, and those before it.

        Raises
        ------
        TransferTimeoutError
            In deterministic mode, if a pack does not come.
        """
        while self._next_is_due(layer, decode_step):
            pending = self._pending[0]
            if not self._wait(pending):
                return
            self._pending.popleft()
            self._scatter(pending)

    def _next_is_due(self, layer: int, decode_step: int) -> bool:
        # In-order: a due pack behind others drags those along, all of them posted earlier.
        return any(
            layer in p.receive.transfer.layers and p.due <= decode_step for p in self._pending
        )

    def _wait(self, pending: _Pending) -> bool:
        start = time.perf_counter()
        if self._exchange.deterministic:
            done = pending.receive.work.wait(None)
            if not done:
                raise TransferTimeoutError("a pack did not arrive in deterministic mode")
        else:
            deadline = 0.0 if pending.is_late else self._exchange.deadline_us * 1e-6
            done = pending.receive.work.wait(deadline)
        waited = time.perf_counter() - start
        self._counters.exchange_wait_us_total += int(waited * 1e6)
        if not done and not pending.is_late:
            pending.is_late = True
            self._counters.late_packs_total += 1
        return done

    def _scatter(self, pending: _Pending) -> None:
        buffer, layout = pending.receive.buffer, pending.layout
        views = layout.views(buffer)
        head = layout.head(self._reader.read(buffer[: layout.head_nbytes]))
        header = head.header
        if header.epoch != self._epoch or header.seq != self.applied_seq + 1:
            raise ProtocolError(
                f"pack epoch={header.epoch} seq={header.seq}, expected epoch={self._epoch} "
                f"seq={self.applied_seq + 1}"
            )
        self.applied_seq = header.seq
        live = [
            self._generation_of(row) == generation
            for row, generation in zip(head.rows, head.generations, strict=True)
        ]
        slots = views.fetch_slot
        if not all(live):
            self._counters.stale_pack_rows_total += live.count(False)
            keep = place(live, slots.device, torch.bool).view(1, -1, 1, 1)
            slots = torch.where(keep, slots, torch.full_like(slots, -1))
        row_index, log_weight = views.rows.to(torch.int64), views.log_weight
        if log_weight.numel() and not all(live):
            log_weight = torch.where(keep, log_weight, float("nan"))
        for i, layer in enumerate(pending.receive.transfer.layers):
            scatter_pack(
                self._resident.k[layer],
                self._resident.v[layer],
                row_index,
                slots[i],
                views.k[i],
                views.v[i],
                pos_res=self._resident.positions[layer],
                fetch_pos=views.fetch_pos[i],
            )
            if self._resident.samples is not None:
                self._resident.samples.weigh(layer, row_index, log_weight[i])
        self._counters.packs_total += 1
        self._tally.add("scattered_rows_total", (slots >= 0).sum())
        self._tally.flush()
