# SPDX-License-Identifier: Apache-2.0
"""The event loop of the engine's process: epochs come and go, the service stays.

One thread does the steps and answers the control socket between them; the heartbeat answers from a
thread of its own. Nothing that an inference rank sends ends the process: it ends the epoch, and is
counted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tandemkv.cache_rank.engine.factory import make_policy
from tandemkv.cache_rank.policies.base import Policy
from tandemkv.cache_rank.protocol.control import ControlServer
from tandemkv.cache_rank.protocol.errors import TandemKVError
from tandemkv.cache_rank.protocol.fault_points import reach
from tandemkv.cache_rank.protocol.handshake import check_hello, refusal_for, still_waits
from tandemkv.cache_rank.protocol.head_shard import HeadShard
from tandemkv.cache_rank.protocol.heartbeat import HeartbeatServer
from tandemkv.cache_rank.protocol.memory.descriptor_socket import (
    DescriptorListener,
    send_reason,
    send_tensors,
)
from tandemkv.cache_rank.protocol.memory.mapped_tensors import Homes, MappedTensors
from tandemkv.cache_rank.protocol.memory.shared_devices import gpu_uuids
from tandemkv.cache_rank.protocol.memory.shared_region import RegionSizes, kept_specs, part_books
from tandemkv.cache_rank.protocol.message.opening import most_told, opening_s
from tandemkv.cache_rank.protocol.messages import (
    TOTALS_OF_PROCESS,
    Goodbye,
    Hello,
    Message,
    Refused,
    StatusReply,
    StatusRequest,
    Welcome,
)
from tandemkv.cache_rank.protocol.models.model_spec import (
    ModelSpec,
    model_as_claimed,
    part_for,
    read_model_spec,
)
from tandemkv.cache_rank.protocol.progress import BusyClock
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings

from .session import SharedSession

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_CONTROL_EVERY = 32
"""Steps between two looks at the control socket, whose messages can wait."""


class SharedEngineService:
    """Serves one inference rank at a time, in memory that it makes.

    An inference rank may have `max_rows` request rows; cache rank `rank` may have a part of its KV
    heads. Raises `CacheRankError` if another live process serves this run directory,
    `UnsupportedModelError` or `PolicyError` if the model or the policy cannot be served.
    """

    def __init__(
        self,
        *,
        run_dir: RunDir,
        model_dir: Path,
        settings: RankSettings,
        max_rows: int,
        homes: Homes,
        rank: int = 0,
    ) -> None:
        self._run_dir, self._model_dir, self._settings = run_dir, model_dir, settings
        self._max_rows, self._clock = max_rows, BusyClock()
        self._totals = dict.fromkeys(TOTALS_OF_PROCESS, 0.0)  # one value is written at once
        whole = read_model_spec(model_dir, dtype="float32", kv_dtype=settings.cache.stored_dtype)
        self._model, self._shard = part_for(whole, settings.placement, rank)
        self._homes, self._gpus = homes, gpu_uuids(homes)
        self._make_policy(self._model)  # one that cannot be built is told now
        self._session: SharedSession | None = None
        with contextlib.ExitStack() as made:
            self._control = ControlServer(run_dir)
            made.callback(self._control.close)
            self._listener = DescriptorListener(run_dir.memory_socket)
            made.callback(self._listener.close)
            self._heartbeat = HeartbeatServer(
                run_dir.heartbeat_socket,
                settings.exchange,
                busy=self._clock.busy_s,
                status=self.status,
                on_silence=self._abort,
            )
            made.pop_all()

    def run(self, stop: threading.Event, on_ready: Callable[[], None] | None = None) -> None:
        """Do steps and answer until `stop` is set, then close everything."""

        def abort_once_it_stops() -> None:
            stop.wait()
            self._abort()

        threading.Thread(target=abort_once_it_stops, name="stop", daemon=True).start()
        try:
            if on_ready is not None:
                on_ready()
            while not stop.is_set():
                self.run_some()
        finally:
            self.close()

    def close(self) -> None:
        """End the epoch, if there is one, and close everything; for who does not `run`."""
        self._end_epoch("the cache rank stops")
        self._heartbeat.close()
        self._listener.close()
        self._control.close()

    def run_some(self) -> None:
        """Do the announced steps for a moment, then look at the control socket."""
        session = self._session
        if session is not None:
            try:
                with session.stream():  # once for many steps: entering it takes 20 to 40 us
                    for _ in range(_CONTROL_EVERY):
                        if not session.run_next(_POLL_S):
                            break
            except Exception:
                self._totals["protocol_errors_total"] += 1
                logger.exception("a step of epoch %d failed", session.number)
                self._end_epoch("an error of our own, see above")
            if session.is_over:
                self._end_epoch("the inference rank is gone")
        session = None  # an engine's memory is given back before another one is built
        received = self._control.poll(0.0 if self._session is not None else _POLL_S)
        if received is not None:
            self._handle(*received)

    def status(self) -> StatusReply:
        """Return counters and gauges. Safe from any thread."""
        session, selection = self._session, self._settings.selection
        values = self._totals.copy()
        values["malformed_frames_total"] = float(self._control.malformed)
        values["busy_s"] = self._clock.busy_s()
        values["stalled_s"] = self._clock.progress.stalled_s()
        values["num_resident"] = float(selection.num_resident)
        values["capacity_tokens"] = float(self._settings.cache.capacity_tokens)
        if session is not None:
            values |= session.engine.last_counters()
            values["steps_total"] = float(session.num_steps)
            values["index_bytes"] = float(session.engine.nbytes)
            values["restored_rows"] = float(session.runner.num_restored)
            values["reseeded_rows"] = float(session.runner.num_reseeded)
            values |= session.runner.delays.values()
        return StatusReply(
            role="cache_rank",
            epoch=session.number if session is not None else 0,
            ready=True,
            values=values,
            info={
                "policy": selection.policy,
                "model_hash": self._model.model_hash,
                **self._settings.placement.info(),
                "pid": str(os.getpid()),
            },
        )

    def _handle(self, peer: bytes, message: Message) -> None:
        match message:
            case Hello():
                reach("cache_rank.hello")
                self._open_epoch(peer, message)
            case StatusRequest():
                self._control.send(peer, self.status())
            case Goodbye():
                if self._session is not None and message.epoch == self._session.number:
                    self._end_epoch("goodbye")
            case _:
                self._totals["protocol_errors_total"] += 1
                logger.warning("ignored %s from an inference rank", type(message).__name__)

    def _open_epoch(self, peer: bytes, hello: Hello) -> None:
        try:
            model = model_as_claimed(self._model, hello.model)
        except TandemKVError as error:
            self._refuse(peer, Refused(field="dtype", message=str(error)))
            return
        refused = self._check(hello, model)
        if refused is not None:
            self._refuse(peer, refused)
            return
        # A Hello may have waited for long: who gave up must not end another's epoch.
        is_there = partial(still_waits, self._control.send, peer)
        if not is_there():
            logger.info("ignored the Hello of an inference rank that is gone")
            return
        self._end_epoch("a new inference rank came")
        try:
            policy = self._make_policy(model)
            epoch = self._run_dir.next_epoch()
        except Exception as error:  # who waits must know
            logger.exception("no epoch can be opened")
            self._refuse(peer, refusal_for(error))
            return
        placement = self._settings.placement
        sizes = RegionSizes(
            num_slots=self._num_slots(hello.page_size),
            num_rows=hello.max_rows + 1,
            page_size=hello.page_size,
            is_apart=placement.has_far_pool,
            shard=HeadShard() if placement.has_far_host else self._shard,  # of the pool here
            num_sharing=placement.num_sharing,
            maps_sets=not placement.host_engine,
        )
        welcome = Welcome(epoch=epoch, num_slots=sizes.num_slots, traits=policy.traits)
        self._heartbeat.expect(epoch)
        if not self._control.send(peer, welcome):
            self._heartbeat.forget()
            logger.warning("epoch %d: who asked for it is gone", epoch)
            return
        try:
            self._session = self._accept(epoch, model, sizes, is_there)
        except Exception as error:  # the inference rank was told
            self._totals["protocol_errors_total"] += 1
            self._heartbeat.forget()
            logger.warning("epoch %d does not open: %s", epoch, error, exc_info=True)
            return
        self._totals["epochs_total"] += 1
        logger.info("epoch %d: %s, %d rows", epoch, model.dtype, hello.max_rows)

    def _accept(
        self, epoch: int, model: ModelSpec, sizes: RegionSizes, is_there: Callable[[], bool]
    ) -> SharedSession:
        """Take the inference rank's memory, and build the engine on it."""
        limit_s = self._settings.exchange.transfer_timeout_s + self._opening_s(model, sizes)
        token = self._run_dir.token
        connection, tensors = self._listener.accept(
            self._homes, token=token, epoch=epoch, timeout_s=limit_s, is_there=is_there
        )
        made, session = MappedTensors(), None
        try:
            made = part_books(tensors, model, self._settings.selection, sizes)
            session = SharedSession(
                epoch=epoch,
                model=model,
                settings=self._settings,
                model_dir=self._model_dir,
                sizes=sizes,
                shard=self._shard,
                connection=connection,
                tensors=tensors,
                made=made,
                clock=self._clock,
            )
            send_tensors(connection, made)
        except BaseException as error:
            send_reason(connection, error)
            if session is not None:
                session.close()
            connection.close()
            for mapped in (tensors, made):
                mapped.close()
            raise
        return session

    def _opening_s(self, model: ModelSpec, sizes: RegionSizes) -> float:
        """Return how long the pump of this host may take to have the memory that it sends."""
        if not self._settings.placement.has_far_host:
            return 0.0
        kept = kept_specs(model, self._settings.selection, sizes)
        return opening_s(kept, most_told(model, self._settings))

    def _make_policy(self, model: ModelSpec) -> Policy:
        return make_policy(model, self._settings, self._model_dir, device=self._homes.here)

    def _num_slots(self, page_size: int) -> int:
        capacity = self._settings.cache.capacity_tokens
        return capacity // page_size * page_size + page_size

    def _refuse(self, peer: bytes, refused: Refused) -> None:
        self._totals["refused_total"] += 1
        logger.warning("refused: field=%s %s", refused.field, refused.message)
        self._control.send(peer, refused)

    def _check(self, hello: Hello, model: ModelSpec) -> Refused | None:
        refused = check_hello(
            hello,
            token=self._run_dir.token,
            model=model,
            settings=self._settings,
            gpus=self._gpus,
        )
        if refused is None and hello.max_rows > self._max_rows:
            return Refused(
                field="max_rows",
                message=f"inference rank has max_rows={hello.max_rows}, cache rank has "
                f"{self._max_rows}; give both ranks the same --max-running-requests",
            )
        return refused

    def _abort(self, epoch: int | None = None) -> None:
        """End the step under way, if any, of `epoch` or of whichever there is."""
        session = self._session
        if session is not None and epoch in (None, session.number):
            session.abort()

    def _end_epoch(self, reason: str) -> None:
        session, self._session = self._session, None
        self._heartbeat.forget()
        if session is not None:
            logger.info("epoch %d ends: %s%s", session.number, reason, _told(session))
            session.close()


def _told(session: SharedSession) -> str:
    """Return how soon decode steps began, for the log; nothing if there was none."""
    found = session.runner.delays.values()
    if not found:
        return ""
    return (
        f"; decode steps began {found['announcement_p50_us']:.0f} us after their announcement "
        f"(median; {found['announcement_p99_us']:.0f} us in 99 of 100; seen after "
        f"{found['announcement_seen_p50_us']:.0f} us, read after "
        f"{found['announcement_read_p50_us']:.0f} us, queued after "
        f"{found['announcement_queued_p50_us']:.0f} us)"
    )
