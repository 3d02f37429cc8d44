# SPDX-License-Identifier: Apache-2.0
"""One epoch: the messages of one inference rank, from its `Welcome` to its end.

Lives in the service thread; `abort` may be called from the heartbeat's.
"""

from __future__ import annotations

import torch

from .counters import BusyClock, Counters
from .decode_step import DecodeStep
from .epoch import Epoch, QueryPredictor
from .exchange import Exchange
from .extend_step import ExtendStep
from .mirror import ResidentMirror
from .pack_ledger import PackLedger
from .policies.base import Policy
from .protocol.errors import ProtocolError
from .protocol.messages import ClearSlots, FreeSlots, ReleaseRow, StepBegin, StepKind
from .protocol.model_spec import ModelSpec
from .protocol.settings import RankSettings
from .protocol.step_program import StepProgram, TransferKind, seeded_rows
from .protocol.tally import DeviceTally
from .protocol.transport import Transport
from .row_table import RowTable
from .scratch import make_scratch
from .selecting import SELECTION_COUNTERS
from .store import KVStore


class Session:
    """Rows, mirror, policy state and transfers of an epoch. The store outlives it.

    Parameters
    ----------
    epoch : int
        Its number.
    transport : Transport
        The data plane; closed with the session.
    """

    def __init__(
        self,
        *,
        epoch: int,
        model: ModelSpec,
        settings: RankSettings,
        max_rows: int,
        transport: Transport,
        store: KVStore,
        policy: Policy,
        predictor: QueryPredictor | None,
        counters: Counters,
        clock: BusyClock,
    ) -> None:
        self._transport = transport
        self._counters = counters
        selection, device = settings.selection, store.device
        self._epoch = Epoch(
            number=epoch,
            model=model,
            settings=settings,
            program=StepProgram(model, settings, policy.capabilities.timing, policy.traits),
            exchange=Exchange(transport, clock, counters, device),
            store=store,
            rows=RowTable(
                max_rows=max_rows,
                max_context=model.max_context,
                num_slots=store.num_slots,
                device=device,
            ),
            mirror=ResidentMirror(
                num_layers=model.num_layers if policy.capabilities.selects else 0,
                max_rows=max_rows,
                num_kv_heads=model.num_kv_heads,
                num_resident=selection.num_resident,
                device=device,
            ),
            policy=policy,
            predictor=predictor,
            counters=counters,
            ledger=PackLedger(2),
            tally=DeviceTally(counters, SELECTION_COUNTERS, device),
            scratch=make_scratch(model, max_rows, device) if policy.capabilities.selects else None,
            device=device,
        )

    @property
    def number(self) -> int:
        """The epoch's number."""
        return self._epoch.number

    def handle(self, message: StepBegin | FreeSlots | ClearSlots | ReleaseRow) -> None:
        """Do what a message of this epoch asks for.

        Raises
        ------
        ProtocolError
            If it contradicts what is known; the epoch has to end.
        TransferAbortedError, TransferTimeoutError
            The data plane broke.
        """
        match message:
            case StepBegin():
                self._run_step(message)
            case FreeSlots():
                if message.num_slots > self._epoch.store.num_slots:
                    raise ProtocolError(f"num_slots={message.num_slots} freed at once")
                self._epoch.store.free(self._epoch.exchange.receive_slots(message.num_slots))
            case ClearSlots():
                self._epoch.store.clear()
            case ReleaseRow():
                if self._epoch.rows.release(message.row, message.generation):
                    self._epoch.release(message.row, message.generation)
                self._counters.rows_live = self._epoch.rows.num_live
        self._epoch.tally.flush()
        self._epoch.store.flush_counters()
        self._epoch.exchange.update_byte_counters()

    def abort(self) -> None:
        """Break the transfers under way. Safe from any thread."""
        self._transport.abort()

    def close(self) -> None:
        """Break what is under way and release the data plane; free every slot."""
        self._epoch.exchange.update_byte_counters()
        self._transport.close()
        self._epoch.store.clear()
        self._counters.rows_live = 0

    @torch.inference_mode()
    def _run_step(self, step: StepBegin) -> None:
        epoch = self._epoch
        self._check(step)
        epoch.ledger.acknowledge(step.applied_seq)
        transfers = epoch.program.transfers(step)
        epoch.exchange.announce(transfers)
        table = torch.empty(0, dtype=torch.int32, device=epoch.device)
        if transfers and transfers[0].kind is TransferKind.SLOT_TABLE:
            table = epoch.exchange.receive(transfers.pop(0))
            epoch.rows.check_slots(table)
        dirty = [row.length for row in step.dirty]
        *tables, table = table.split([*dirty, len(table) - sum(dirty)])
        for row, slots in zip(step.dirty, tables, strict=True):
            displaced = epoch.rows.assign(row, slots, keep_length=True)
            if displaced is not None:
                epoch.release(row.row, displaced)
        running: ExtendStep | DecodeStep
        if step.kind == StepKind.EXTEND:
            running = ExtendStep(epoch, step, table.split([row.length for row in step.rows]))
        else:
            running = DecodeStep(epoch, step, table)
        for transfer in transfers:
            running.execute(transfer)
        running.finish()
        self._counters.steps_total += 1
        self._counters.rows_live = epoch.rows.num_live

    def _check(self, step: StepBegin) -> None:
        for row in (*step.dirty, *step.rows):
            self._epoch.rows.check(row)
        rows = [row.row for row in step.rows if row.row]
        if len(set(rows)) != len(rows):
            raise ProtocolError(f"step_id={step.step_id}: a row is in the step twice")
        if not step.rows:
            raise ProtocolError(f"step_id={step.step_id} has no rows")
        for row in seeded_rows(step.rows):
            if row.window == 0:
                raise ProtocolError(f"row={row.row}: is to be seeded with window=0")
        if step.applied_seq > self._epoch.ledger.last_seq:
            raise ProtocolError(
                f"applied_seq={step.applied_seq} of {self._epoch.ledger.last_seq} packs sent"
            )
