# SPDX-License-Identifier: Apache-2.0
"""The event loop of the cache rank: epochs come and go, the service stays.

One thread handles messages in order; the heartbeat answers from a thread of its own, and is
the only other one that touches a session (`Session.abort`). Nothing that an inference rank
sends ends the process: it ends the epoch, and is counted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from .counters import BusyClock, Counters
from .protocol.connect import check_transport, connect_transport
from .protocol.control import ControlServer
from .protocol.errors import (
    ProtocolError,
    SettingsError,
    TandemKVError,
    TransferAbortedError,
    TransferTimeoutError,
)
from .protocol.fault_points import reach
from .protocol.handshake import check_hello
from .protocol.heartbeat import HeartbeatServer
from .protocol.messages import (
    ClearSlots,
    FreeSlots,
    Goodbye,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Message,
    Refused,
    ReleaseRow,
    StatusReply,
    StatusRequest,
    StepBegin,
    Timing,
    Welcome,
)
from .protocol.model_spec import ModelSpec
from .protocol.run_dir import RunDir
from .protocol.settings import RankSettings
from .protocol.transport import Transport
from .resources import Resources
from .session import Session

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_MAX_REASON = 4096
"""Characters of a refusal that the message has room for."""


class Connect(Protocol):
    """Meets the inference rank at a rendezvous file."""

    def __call__(self, store_path: Path, *, rank: int, timeout_s: float) -> Transport:
        """See `protocol.connect.connect_transport`."""


class CacheRankService:
    """Serves one inference rank at a time.

    Parameters
    ----------
    run_dir : RunDir
        Where the sockets are made.
    resources : Resources
        Store, weights and policy.
    settings : RankSettings
        The settings of both ranks.
    max_rows : int
        Most request rows that an inference rank may have.
    counters : Counters
        The same that `resources` counts in.
    connect : Connect, optional
        Opens the data plane; by default the one that the settings name.

    Raises
    ------
    CacheRankError
        If another live process serves this run directory.
    SettingsError
        If the data plane does not fit the device.
    """

    def __init__(
        self,
        *,
        run_dir: RunDir,
        resources: Resources,
        settings: RankSettings,
        max_rows: int,
        counters: Counters,
        connect: Connect | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._resources = resources
        self._settings = settings
        self._max_rows = max_rows
        self._counters = counters
        transport = settings.exchange.transport
        if connect is None:
            check_transport(transport, resources.device)
            connect = partial(connect_transport, transport, device=resources.device)
        self._connect = connect
        self._clock = BusyClock()
        self._session: Session | None = None
        self._peer = b""
        self._silent_epoch = 0
        is_late = resources.capabilities.timing in (Timing.NEXT_STEP, Timing.EXACT_STEP)
        counters.staleness_steps = int(is_late)
        self._control = ControlServer(run_dir)
        try:
            self._heartbeat = HeartbeatServer(
                run_dir.heartbeat_socket,
                busy=self._clock.busy_s,
                status=self.status,
                on_silence=self._on_silence,
                interval_s=settings.exchange.heartbeat_interval_s,
                misses=settings.exchange.heartbeat_misses,
            )
        except BaseException:
            self._control.close()
            raise

    def run(self, stop: threading.Event, on_ready: Callable[[], None] | None = None) -> None:
        """Handle messages until `stop` is set, then close everything.

        A step under way is broken off: its inference rank may never finish it.
        """
        threading.Thread(target=self._abort_on, args=(stop,), name="stop", daemon=True).start()
        try:
            if on_ready is not None:
                on_ready()
            while not stop.is_set():
                self.handle_next(_POLL_S)
        finally:
            self._end_epoch("the cache rank stops")
            self._heartbeat.close()
            self._control.close()

    def handle_next(self, timeout_s: float) -> None:
        """Handle one message, if one comes within `timeout_s`."""
        received = self._control.poll(timeout_s)
        if self._session is not None and self._session.number == self._silent_epoch:
            self._end_epoch("the inference rank fell silent")
        if received is None:
            return
        with self._clock.working():
            try:
                self._handle(*received)
            except (TransferAbortedError, TransferTimeoutError) as error:
                self._counters.transport_errors_total += 1
                self._end_epoch(str(error))
            except TandemKVError as error:
                self._counters.protocol_errors_total += 1
                self._end_epoch(str(error))
            except Exception:
                self._counters.protocol_errors_total += 1
                logger.exception("%s failed", type(received[1]).__name__)
                self._end_epoch("an error of our own, see above")

    def status(self) -> StatusReply:
        """Return counters and gauges. Safe from any thread."""
        session = self._session
        resources, selection = self._resources, self._settings.selection
        values = self._counters.values()
        values["malformed_frames_total"] = float(self._control.malformed)
        values["busy_s"] = self._clock.busy_s()
        values["stalled_s"] = self._clock.progress.stalled_s()
        values["num_resident"] = float(selection.num_resident)
        values["capacity_tokens"] = float(self._settings.cache.capacity_tokens)
        return StatusReply(
            role="cache_rank",
            epoch=session.number if session is not None else 0,
            ready=True,
            values=values,
            info={
                "policy": selection.policy,
                "model_hash": resources.model.model_hash,
                "transport": self._settings.exchange.transport,
                "timing": resources.capabilities.timing.name.lower(),
                "calibration": resources.calibration_origin or "none",
            },
        )

    def _handle(self, peer: bytes, message: Message) -> None:
        match message:
            case Hello():
                reach("cache_rank.hello")
                self._open_epoch(peer, message)
            case StatusRequest():
                self._control.send(peer, self.status())
            case Heartbeat():
                epoch = self._session.number if self._session is not None else 0
                reply = HeartbeatReply(epoch=epoch, sequence=message.sequence, busy_s=0.0)
                self._control.send(peer, reply)
            case StepBegin() | FreeSlots() | ClearSlots() | ReleaseRow() | Goodbye():
                self._handle_in_epoch(peer, message)
            case _:
                self._counters.protocol_errors_total += 1
                logger.warning("ignored %s from an inference rank", type(message).__name__)

    def _handle_in_epoch(
        self, peer: bytes, message: StepBegin | FreeSlots | ClearSlots | ReleaseRow | Goodbye
    ) -> None:
        session = self._session
        if session is None or message.epoch != session.number:
            self._counters.old_epoch_total += 1
        elif peer != self._peer:  # whose token was not checked
            self._counters.protocol_errors_total += 1
            logger.warning(
                "ignored %s from a peer that did not open the epoch", type(message).__name__
            )
        elif isinstance(message, Goodbye):
            self._end_epoch("goodbye")
        else:
            reach("cache_rank.step")
            session.handle(message)

    def _open_epoch(self, peer: bytes, hello: Hello) -> None:
        refused = self._check(hello)
        if refused is not None:
            self._refuse(peer, refused.field, refused.message)
            return
        self._end_epoch("a new inference rank came")
        model = self._resources.model_of(hello.model)
        try:
            store = self._resources.store(model, hello.page_size)
            policy, predictor = self._resources.policy(model), self._resources.predictor(model)
            epoch = self._run_dir.next_epoch()
            store_path = self._run_dir.fresh_store(epoch)
        except SettingsError as error:
            self._refuse(peer, "cache.capacity_tokens", str(error))
            return
        except TandemKVError as error:
            self._refuse(peer, "model", str(error))
            return
        except Exception as error:  # no memory, weights that cannot be read: who waits must know
            logger.exception("no epoch can be opened")
            text = f"{type(error).__name__}: {error}; the cache rank's log shows where"
            self._refuse(peer, "cache_rank", text)
            return
        self._heartbeat.expect(epoch)
        welcome = Welcome(
            epoch=epoch,
            num_slots=store.num_slots,
            timing=int(policy.capabilities.timing),
            all_exact=policy.capabilities.all_exact,
            store_name=store_path.name,
            traits=policy.traits,
        )
        if not self._control.send(peer, welcome):
            # To wait for its data plane would keep out whoever asks next, for half a minute.
            self._heartbeat.forget()
            logger.warning("epoch %d: who asked for it is gone", epoch)
            return
        try:
            with self._clock.waiting():
                transport = self._connect(
                    store_path, rank=1, timeout_s=self._settings.exchange.transfer_timeout_s
                )
        except TandemKVError as error:
            logger.warning("epoch %d does not open: %s", epoch, error)
            raise
        self._peer = peer
        try:
            self._session = Session(
                epoch=epoch,
                model=model,
                settings=self._settings,
                max_rows=hello.max_rows,
                transport=transport,
                store=store,
                policy=policy,
                predictor=predictor,
                counters=self._counters,
                clock=self._clock,
            )
        except BaseException:
            transport.close()
            raise
        self._counters.epochs_total += 1
        logger.info("epoch %d: %s, %d rows", epoch, model.dtype, hello.max_rows)

    def _refuse(self, peer: bytes, field: str, message: str) -> None:
        self._counters.refused_total += 1
        logger.warning("refused: field=%s %s", field, message)
        self._control.send(peer, Refused(field=field, message=message[:_MAX_REASON]))

    def _check(self, hello: Hello) -> Refused | None:
        try:
            model: ModelSpec = self._resources.model_of(hello.model)
        except ProtocolError as error:
            return Refused(field="dtype", message=str(error))
        refused = check_hello(
            hello,
            token=self._run_dir.token,
            model=model,
            settings=self._settings,
            page_size=hello.page_size,
        )
        if refused is None and hello.max_rows > self._max_rows:
            return Refused(
                field="max_rows",
                message=f"inference rank has max_rows={hello.max_rows}, cache rank has "
                f"{self._max_rows}; give both ranks the same --max-running-requests",
            )
        return refused

    def _abort_on(self, stop: threading.Event) -> None:
        stop.wait()
        session = self._session
        if session is not None:
            session.abort()

    def _on_silence(self) -> None:
        session = self._session
        if session is not None:
            self._silent_epoch = session.number
            session.abort()

    def _end_epoch(self, reason: str) -> None:
        session, self._session = self._session, None
        self._heartbeat.forget()
        if session is None:
            return
        logger.info("epoch %d ends: %s", session.number, reason)
        try:
            session.close()
        except TandemKVError:
            logger.exception("epoch %d did not close cleanly", session.number)
