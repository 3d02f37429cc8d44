# SPDX-License-Identifier: Apache-2.0
"""The inference rank's session with its cache rank: epochs, steps, frees, loss.

Owned by the scheduler thread. Only `mark_lost` is called from another thread (the heartbeat).
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import torch

from tandemkv.cache_rank.protocol.connect import check_transport, connect_transport
from tandemkv.cache_rank.protocol.control import ControlClient
from tandemkv.cache_rank.protocol.errors import CacheRankLostError, TandemKVError
from tandemkv.cache_rank.protocol.handshake import make_hello, open_epoch
from tandemkv.cache_rank.protocol.heartbeat import HeartbeatClient
from tandemkv.cache_rank.protocol.messages import (
    ClearSlots,
    FreeSlots,
    Goodbye,
    Message,
    ReleaseRow,
    StepBegin,
    Timing,
    Welcome,
)
from tandemkv.cache_rank.protocol.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings import RankSettings
from tandemkv.cache_rank.protocol.step_program import StepProgram, TransferKind
from tandemkv.cache_rank.protocol.transport import Transport

from .counters import Counters
from .step_transfers import StepTransfers

HANDSHAKE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A cache rank that was met, and whose epoch nobody has begun yet."""

    control: ControlClient
    transport: Transport
    welcome: Welcome

    def close(self) -> None:
        """Release it unused."""
        self.transport.close()
        self.control.close()


class CacheClient:
    """Connection to one cache rank.

    Attributes
    ----------
    lost_reason : str or None
        Why there is no epoch; None while connected.
    program : StepProgram
        Derives the transfers of a step, from the capabilities in the handshake.
    """

    def __init__(
        self,
        *,
        run_dir: RunDir,
        settings: RankSettings,
        model: ModelSpec,
        max_rows: int,
        page_size: int,
        counters: Counters,
        device: torch.device,
    ) -> None:
        check_transport(settings.exchange.transport, device)
        self._device = device
        self._run_dir = run_dir
        self._settings = settings
        self._model = model
        self._max_rows = max_rows
        self._page_size = page_size
        self._counters = counters
        self._control: ControlClient | None = None
        self._transport: Transport | None = None
        self._lock = threading.Lock()
        self._bytes_before = (0, 0)
        self.lost_reason: str | None = "not connected yet"
        self.epoch = 0
        self.all_exact = False
        self.program = StepProgram(model, settings, Timing.NONE)
        exchange = settings.exchange
        self._heartbeat = HeartbeatClient(
            run_dir.heartbeat_socket,
            interval_s=exchange.heartbeat_interval_s,
            misses=exchange.heartbeat_misses,
            on_lost=self.mark_lost,
            max_busy_s=exchange.transfer_timeout_s,
        )

    def connect(self, *, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> Welcome:
        """Open a new epoch; raises what `open_connection` raises."""
        self.drop()
        return self.adopt(self.open_connection(timeout_s=timeout_s))

    def open_connection(self, *, timeout_s: float) -> Connection:
        """Meet the cache rank: Hello, Welcome and data plane, within `timeout_s` in all.

        Touches nothing of this object, so any thread may call it; the scheduler goes on.

        Raises
        ------
        HandshakeRefusedError
            The cache rank was started with other settings, or holds another model.
        CacheRankLostError
            There is no cache rank, or it did not answer in time.
        """
        deadline = time.monotonic() + timeout_s
        control = ControlClient(self._run_dir)
        try:
            hello = make_hello(
                token=self._run_dir.token,
                model=self._model,
                settings=self._settings,
                max_rows=self._max_rows,
                page_size=self._page_size,
            )
            welcome = open_epoch(control, hello, timeout_s)
            transport = connect_transport(
                self._settings.exchange.transport,
                self._run_dir.resolve_store(welcome.store_name),
                rank=0,
                timeout_s=self._settings.exchange.transfer_timeout_s,
                connect_timeout_s=max(0.1, deadline - time.monotonic()),
                device=self._device,
            )
        except BaseException:
            control.close()
            raise
        return Connection(control=control, transport=transport, welcome=welcome)

    def adopt(self, connection: Connection) -> Welcome:
        """Begin the epoch of a connection that `open_connection` returned."""
        welcome = connection.welcome
        self._control, self._transport = connection.control, connection.transport
        self.epoch = welcome.epoch
        self.all_exact = welcome.all_exact
        self.program = StepProgram(
            self._model, self._settings, Timing(welcome.timing), welcome.traits
        )
        self._counters.epochs_total += 1
        with self._lock:
            self.lost_reason = None
        self._heartbeat.start(welcome.epoch)
        return welcome

    def begin_step(self, step: StepBegin, table: torch.Tensor) -> StepTransfers:
        """Announce a step and send its slot table, ``[num_table_slots]`` int32."""
        transport = self._require()
        self._send(step)
        transfers = StepTransfers(transport, self.program.transfers(step), self._device)
        if table.numel():
            transfers.send(TransferKind.SLOT_TABLE, (), table)
        return transfers

    def free(self, slots: torch.Tensor) -> None:
        """Hint that `slots`, ``[n]``, may be reused. Nothing happens when there is no epoch."""
        if self.lost_reason is not None or self._transport is None or not slots.numel():
            return
        ids = slots.to(dtype=torch.int32).contiguous().clone()
        self._guarded(FreeSlots(epoch=self.epoch, num_slots=ids.numel()), ids)

    def clear(self) -> None:
        """All slots are free."""
        if self.lost_reason is None:
            self._guarded(ClearSlots(epoch=self.epoch))

    def release(self, row: int, generation: int) -> None:
        """Tell that the occupancy (`row`, `generation`) ended."""
        if self.lost_reason is None:
            self._guarded(ReleaseRow(epoch=self.epoch, row=row, generation=generation))

    def mark_lost(self, reason: str) -> None:
        """End the epoch: abort every transfer under way. Safe from any thread, idempotent."""
        with self._lock:
            if self.lost_reason is not None:
                return
            self.lost_reason = reason
            self._counters.cache_rank_lost_total += 1
        if self._transport is not None:
            self._transport.abort()

    def update_byte_counters(self) -> None:
        """Bring the byte counters of `Counters` up to date."""
        if self._transport is not None:
            sent, received = self._bytes_before
            self._counters.bytes_sent_total = sent + self._transport.bytes_sent
            self._counters.bytes_received_total = received + self._transport.bytes_received

    def close(self) -> None:
        """Say goodbye and release everything. Idempotent."""
        if self.lost_reason is None and self._control is not None:
            self._guarded(Goodbye(epoch=self.epoch))
        with self._lock:
            self.lost_reason = "closed"
        self.drop()

    def drop(self) -> None:
        """Release what is left of an epoch that ended. Idempotent."""
        self._heartbeat.stop()
        if self._transport is not None:
            self.update_byte_counters()
            self._bytes_before = (
                self._counters.bytes_sent_total,
                self._counters.bytes_received_total,
            )
            self._transport.close()
            self._transport = None
        if self._control is not None:
            self._control.close()
            self._control = None

    def _require(self) -> Transport:
        if self.lost_reason is not None or self._transport is None:
            raise CacheRankLostError(f"no cache rank: {self.lost_reason}")
        return self._transport

    def _send(self, message: Message) -> None:
        if self._control is None:
            raise CacheRankLostError(f"no cache rank: {self.lost_reason}")
        self._control.send(message)

    def _guarded(self, message: Message, data: torch.Tensor | None = None) -> None:
        try:
            self._send(message)
            if data is not None:
                self._require().issue_send(data)
        except TandemKVError as error:
            self.mark_lost(str(error))
