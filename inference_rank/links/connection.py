# SPDX-License-Identifier: Apache-2.0
"""The inference rank's connection to an engine in another process of this host.

Owned by the scheduler thread. Only `mark_lost` is called from other threads: the heartbeat's, and
the one that watches whether the other process lives.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tandemkv.cache_rank.protocol.control import ControlClient
from tandemkv.cache_rank.protocol.engine_program import EngineProgram
from tandemkv.cache_rank.protocol.errors import (
    CacheRankLostError,
    HandshakeRefusedError,
    TandemKVError,
)
from tandemkv.cache_rank.protocol.handshake import open_epoch
from tandemkv.cache_rank.protocol.heartbeat import HeartbeatClient
from tandemkv.cache_rank.protocol.memory.descriptor_messages import BOOKS, has_hung_up
from tandemkv.cache_rank.protocol.memory.descriptor_socket import (
    let_hold,
    offer_tensors,
    take_held,
    wait_for_hang_up,
)
from tandemkv.cache_rank.protocol.memory.mapped_tensors import MappedTensors
from tandemkv.cache_rank.protocol.memory.shared_devices import gpu_uuids
from tandemkv.cache_rank.protocol.memory.shared_region import (
    STAMPS,
    FlagIndex,
    RegionSizes,
    specs_by_life,
)
from tandemkv.cache_rank.protocol.message.opening import opening_s
from tandemkv.cache_rank.protocol.messages import PROTOCOL_VERSION, Goodbye, Hello, Welcome
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings
from tandemkv.cache_rank.protocol.step_flags import StepFlags
from tandemkv.cache_rank.protocol.step_ring import EntryKind, StepEntry, StepRing, StepRow
from tandemkv.inference_rank.counters import Counters

from .fence import Fence
from .patience import LONGEST_PREPARING_S, Patience, limit_s

_LOG = logging.getLogger(__name__)
HANDSHAKE_TIMEOUT_S = 30.0
KEPT, OWN = "kept", "own"
"""Groups of tensors, besides `BOOKS`, that the launcher, or ``tandemkv memory``, holds."""
_LONGEST_WAIT_S = 3600.0
_GRACE_S, _GPU_GRACE_S = 1.0, 5.0
"""For an engine that was told that its epoch ends; it looks for messages ten times a second. On a
GPU it has a prompt's kernels to queue first, and hundreds of GiB to unmap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedEpoch:
    """A cache rank that was met, and whose epoch nobody has begun yet.

    `has_lost_memory`: the K/V of the epoch before are gone, with the host that held them.
    """

    control: ControlClient
    connection: socket.socket
    ours: MappedTensors
    theirs: MappedTensors
    welcome: Welcome
    has_lost_memory: bool = False

    @property
    def is_gone(self) -> bool:
        """Whether the cache rank has ended the epoch already, or itself."""
        return has_hung_up(self.connection)

    def close(self) -> None:
        """Release it unused."""
        self.connection.close()
        self.control.close()
        self.ours.close()
        self.theirs.close()


class SharedConnection:
    """Memory, flags and announcements of one inference rank, and whether its cache rank lives.

    `kept` and `own` stay when an epoch ends (`shared_region.specs_by_life`): K/V and tables, which
    other cache ranks of the same inference rank may map as well, and what only this one's process
    maps. `counters` count waits, epochs and losses.

    `lost_reason` is why there is no epoch, None while connected; with `has_left` this rank left it,
    and its engine lives. Steps are counted over all epochs: `step` was announced last, and
    `confirmed` is the latest whose results were taken. The engine has the heads of `shard`.
    `end_waits` is called when the epoch is lost, by whoever finds it so and before anybody else
    sees it: it lets what waits for the engine on a GPU wait no longer.
    """

    program: EngineProgram

    def __init__(
        self,
        *,
        run_dir: RunDir,
        settings: RankSettings,
        model: ModelSpec,
        sizes: RegionSizes,
        kept: MappedTensors,
        own: MappedTensors,
        counters: Counters,
    ) -> None:
        self._run_dir, self._settings, self._model = run_dir, settings, model
        self._sizes, self._kept, self._counters = sizes, kept, counters
        self.shard, self.own = sizes.shard, own
        self._staging = MappedTensors(own.homes)
        self._staging.borrow(kept, own)
        self._at = FlagIndex(model.num_layers)
        self._lock = threading.Lock()
        self._control: ControlClient | None = None
        self._connection: socket.socket | None = None
        self._waker: socket.socket | None = None
        self._theirs = MappedTensors()
        self._ours = MappedTensors()
        self.lost_reason: str | None = "not connected yet"
        self.epoch = self.step = self.confirmed = 0
        self.has_left = False
        self.end_waits: Callable[[], None] | None = None
        self._fence: Fence | None = None
        self._taking_up: Patience | None = None
        self._is_first = False
        exchange = settings.exchange
        self._limit_s = limit_s(exchange)
        self._heartbeat = HeartbeatClient(run_dir.heartbeat_socket, exchange, self.mark_lost)

    @property
    def parts(self) -> tuple[SharedConnection, ...]:
        """Connections to single cache ranks: this one; see `ShardedConnection`."""
        return (self,)

    # -- epochs --------------------------------------------------------------------------

    def connect(self, *, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> None:
        """Open the first epoch; raises what `open_connection` raises."""
        self.take_books()
        self.adopt(self.open_connection(timeout_s=timeout_s))

    def take_books(self) -> None:
        """Take what is held of an earlier engine's memory, before the first epoch."""
        # What an earlier inference rank's engine remembered is of requests that ended with it.
        self._theirs = take_held(
            self._run_dir.holder_socket,
            token=self._run_dir.token,
            group=BOOKS,
            homes=self.own.homes,
        )
        self._is_first = True

    def open_connection(self, *, timeout_s: float) -> OpenedEpoch:
        """Meet the cache rank with new flags, ring and staging.

        It has `timeout_s` to welcome us, and then ``transfer_timeout_s``, if that is longer than
        what is left, to build its engine: one that ends meanwhile is noticed at once. One on
        another host has `opening_s` of the memory besides: by its bytes, and not by how often it
        was met. It is asked again without books that are of no use to it: rows are seeded anew.

        The cache rank of the epoch before has ended then, or is ended: it maps the same memory.
        Changes nothing of this object, so that any thread may call it while no epoch is open.

        Raises `HandshakeRefusedError` if the cache rank was started with other settings or cannot
        use the memory, `CacheRankLostError` if there is none or it did not answer in time, and
        `SettingsError` if memory for the epoch is not to be had.
        """
        if self._fence is not None:
            self._fence.close(timeout_s)
        try:
            return self._open(timeout_s, (self.own, self._kept, self._theirs))
        except HandshakeRefusedError as error:
            is_far = self._settings.placement.has_far_host  # it names the K/V there, not rows
            is_free = self._is_first and not is_far  # no request goes on
            may_be_they = error.field == BOOKS or (error.field == "memory" and is_free)
            if not may_be_they or not self._theirs.specs:
                raise  # the next try may take up all rows
            _LOG.warning("rows are seeded anew, what is known of them is of no use: %s", error)
            return self._open(timeout_s, (self.own, self._kept))

    def _open(self, timeout_s: float, survivors: tuple[MappedTensors, ...]) -> OpenedEpoch:
        deadline = time.monotonic() + timeout_s
        ours = MappedTensors(self.own.homes)
        control = ControlClient(self._run_dir)
        try:
            hello = Hello(
                protocol_version=PROTOCOL_VERSION,
                token=self._run_dir.token,
                model=self._model,
                settings=self._settings.flat(),
                max_rows=self._sizes.max_batch,
                page_size=self._sizes.page_size,
                gpus=gpu_uuids(self.own.homes),
            )
            welcome = open_epoch(control, hello, timeout_s)
            if self._is_first and STAMPS in self._theirs:  # its engine has stopped by now
                self._theirs[STAMPS].zero_()
            specs = specs_by_life(
                self._model, self._settings.selection, self._sizes, on_gpu=ours.homes.are_on_gpu
            )
            ours.allocate_all(specs.epoch)
            # Weights and zeros of tensors that survive may be queued.
            if ours.homes.here.type == "cuda":
                torch.cuda.synchronize(ours.homes.here)
            connection, theirs = offer_tensors(
                self._run_dir.memory_socket,
                (*survivors, ours),
                token=self._run_dir.token,
                epoch=welcome.epoch,
                timeout_s=max(deadline - time.monotonic(), self._built_s()),
            )
        except BaseException:
            control.close()
            ours.close()
            raise
        return OpenedEpoch(
            control=control, connection=connection, ours=ours, theirs=theirs, welcome=welcome,
            has_lost_memory=self._has_lost_memory(theirs),
        )  # fmt: skip

    def _built_s(self) -> float:
        """Return how long a cache rank that has our memory may take to have an engine on it."""
        limit_s = self._settings.exchange.transfer_timeout_s
        if not self._settings.placement.has_far_host:
            return limit_s
        return limit_s + opening_s((*self._kept.specs, *self.own.specs))

    def _has_lost_memory(self, theirs: MappedTensors) -> bool:
        """Whether the other host, if there is one, names other memory than that of the K/V."""
        if not self._settings.placement.has_far_host or STAMPS not in self._theirs:
            return False
        known = int(self._theirs[STAMPS][0])
        return known not in (0, int(theirs[STAMPS][0]))

    def adopt(self, opened: OpenedEpoch) -> None:
        """Begin the epoch of what `open_connection` returned; its engine knows no request yet."""
        self.drop()
        welcome, at = opened.welcome, self._at
        self._control, self._connection = opened.control, opened.connection
        self._fence = Fence(opened.connection)
        self._is_first = False
        self._theirs.close()  # the same memory is mapped as what came now
        self._ours, self._theirs = opened.ours, opened.theirs
        run_dir = self._run_dir
        groups = ((KEPT, self._kept), (OWN, self.own), (BOOKS, self._theirs))
        for group, held in groups:  # it may have come anew
            let_hold(run_dir.holder_socket, held, token=run_dir.token, group=group)
        self._flags = StepFlags(opened.ours["flags"])
        for flag in (at.FINISHED, at.ABORTED):
            self._flags.raise_to(flag, self.step)
        self._flags.raise_to(at.CONFIRMED, self.confirmed)
        self._ring = StepRing(opened.ours["ring"], self._flags)
        self.program = EngineProgram(
            self._model, self._settings, welcome.traits, page_size=self._sizes.page_size
        )
        self.epoch = welcome.epoch
        self._counters.epochs_total += 1
        with self._lock:
            self.lost_reason, self.has_left = None, False
        self._heartbeat.start(welcome.epoch)
        wake, self._waker = socket.socketpair()
        threading.Thread(
            target=self._watch,
            args=(welcome.epoch, opened.connection, wake),
            name="lifeline",
            daemon=True,
        ).start()

    def mark_lost(self, reason: str, *, epoch: int | None = None) -> None:
        """End the epoch: nothing is waited for any more. Safe from any thread, idempotent.

        With `epoch` only if that one is open: who found it lost may be so late that the next is.
        """
        if self._lose(reason, epoch):
            self._counters.cache_rank_lost_total += 1

    def is_lost(self) -> bool:
        """Whether there is no epoch, or somebody is just ending it."""
        with self._lock:
            return self.lost_reason is not None

    def leave(self, reason: str) -> None:
        """End the epoch of an engine that lives: it is told, and lets go of the memory.

        Nothing happens if the epoch is lost already.
        """
        if not self._lose(reason):
            return
        self.has_left = True
        self._flags.raise_to(self._at.ABORTED, self.step)  # it may wait in a broken step
        if self._fence is not None:
            self._fence.grace_s = _GPU_GRACE_S if self.own.homes.are_on_gpu else _GRACE_S
        self._say_goodbye()

    def _lose(self, reason: str, epoch: int | None = None) -> bool:
        with self._lock:
            if self.lost_reason is not None or epoch not in (None, self.epoch):
                return False
            try:
                if self.end_waits is not None:
                    self.end_waits()
            except Exception:  # they end at their limit
                _LOG.exception("waits for the engine cannot be ended at once")
            self.lost_reason = reason
            return True

    def close(self) -> None:
        """Say goodbye and release what belongs to the epoch. Idempotent."""
        if self.lost_reason is None:
            self._say_goodbye()
        with self._lock:
            self.lost_reason = "closed"
        self.drop()
        self._theirs.close()

    def _say_goodbye(self) -> None:
        if self._control is not None:
            with contextlib.suppress(TandemKVError):
                self._control.send(Goodbye(epoch=self.epoch))

    # -- steps ---------------------------------------------------------------------------

    @property
    def tensors(self) -> MappedTensors:
        """Where staging is (`shared_region.specs_by_life`)."""
        return self._staging if self.own.homes.are_on_gpu else self._ours

    @property
    def books(self) -> MappedTensors:
        """What the engine remembers of each row, held here too: it outlives the engine."""
        return self._theirs

    def handed_over(self, name: str, size: int) -> torch.Tensor:
        """Return ``[size, Hq, n]``, what the engine has handed over as the staging `name`."""
        return self.tensors[name][:size]

    def resident_positions(self, book: int) -> torch.Tensor:
        """Return ``[rows, H, R]`` int32, the engine's books of what is resident."""
        return self.books["resident_positions"][book]

    @property
    def own_bytes(self) -> int:
        """Bytes of mapped memory of this cache rank's alone, the engine's books included."""
        return self.own.nbytes + self._ours.nbytes + self._theirs.nbytes

    def ask_to_prepare(self, *, variant: int, size: int) -> None:
        """Let the engine make ready for decode steps of `size` requests, or prompts if 0.

        `await_prepared` waits until it is; compiling may take a minute.
        """
        self.step += 1
        rows = tuple(StepRow(row=0, generation=0, length=1) for _ in range(size))
        self.announce(StepEntry(kind=EntryKind.PREPARE, step=self.step, variant=variant, rows=rows))

    def await_prepared(self) -> None:
        """Wait until the engine is ready; raises `CacheRankLostError` if it is lost before.

        It is lost if it has not heard of it within the heartbeat's window and a second more, or
        takes longer than `LONGEST_PREPARING_S`, or `transfer_timeout_s` if that is more.
        """
        patience = self._patience(LONGEST_PREPARING_S)
        found = self._flags.wait(
            self._at.FINISHED, self.step, timeout_s=_LONGEST_WAIT_S,
            is_over=lambda: self.lost_reason is not None or patience.is_over(),
        )  # fmt: skip
        if not found:
            self.mark_lost("it does not make ready, and makes no progress")
            raise CacheRankLostError(f"it did not get ready: {self.lost_reason}")

    def announce(self, entry: StepEntry) -> None:
        """Announce the next step, numbered `step`; nothing happens once the epoch is lost."""
        if self.lost_reason is not None:
            return
        try:
            self._ring.write(entry, timeout_s=_LONGEST_WAIT_S, is_over=self._is_over_now())
        except CacheRankLostError as error:
            self.mark_lost(str(error))

    def raise_to(self, flag: int) -> None:
        """Raise a flag to the present step; nothing happens once the epoch is lost."""
        if self.lost_reason is None:
            self._flags.raise_to(flag, self.step)

    def wait(self, flag: int, step: int | None = None) -> bool:
        """Wait for a flag of `step`, the present one by default; False: the epoch is lost.

        The engine may take as long as it makes progress; it is lost once it makes none for the
        heartbeat's window and a second more.
        """
        if self.lost_reason is not None:
            return False
        wanted = self.step if step is None else step
        if self._flags.value(flag) - wanted >= 0:
            return True
        started = time.perf_counter_ns()
        found = self._flags.wait(
            flag, wanted, timeout_s=_LONGEST_WAIT_S, is_over=self._is_over_now()
        )
        self._counters.exchange_wait_us_total += (time.perf_counter_ns() - started) // 1000
        if not found:
            self.mark_lost(f"no answer within {self._limit_s:g} s")
        return found

    def resume(self, rows: tuple[StepRow, ...]) -> None:
        """Let the engine take up the requests in `rows`; `has_finished` tells when it has.

        Meanwhile `lose_if_stuck` is to be called.
        """
        self.step += 1
        self.announce(StepEntry(kind=EntryKind.RESUME, step=self.step, rows=rows))
        self._taking_up = self._patience()

    def lose_if_stuck(self) -> None:
        """End the epoch if the engine does not take up the requests, though its process lives.

        It has the heartbeat's window and a second more to hear of them, and may then make no
        progress for `transfer_timeout_s`: the key index of a layer is made of all K/V at once.
        """
        patience = self._taking_up
        if patience is not None and not self.has_finished(self.step) and patience.is_over():
            self.mark_lost("it does not take up the requests, and makes no progress")

    @property
    def resumed_rows(self) -> tuple[int, int]:
        """Rows that the engine took up in this epoch, and rows that it seeded anew."""
        return self._flags.value(self._at.RESTORED), self._flags.value(self._at.RESEEDED)

    def await_finish(self, step: int) -> bool:
        """Wait until the engine has done all of `step`; False: it will not."""
        return self.has_finished(step) or self.wait(self._at.FINISHED, step)

    def forget_rows(self) -> None:
        """Give up what is known of rows: the next epoch begins without. Only while lost."""
        self._theirs.close()

    def has_finished(self, step: int) -> bool:
        """Whether the engine has done all of `step`; also known of an epoch that is lost."""
        return self._flags.value(self._at.FINISHED) - step >= 0

    def give_up(self) -> None:
        """Let the engine end the present step without what was not raised for it."""
        if self.lost_reason is None:
            self._flags.raise_to(self._at.ABORTED, self.step)

    def confirm(self, step: int) -> None:
        """Note that the results of `step`, which the engine has finished, were taken."""
        self.confirmed = max(self.confirmed, step)
        if self.lost_reason is None:
            self._flags.raise_to(self._at.CONFIRMED, self.confirmed)

    def _is_over_now(self) -> Callable[[], bool]:
        """Return a check whether the epoch is lost, or the engine makes no progress any more."""
        flag, most_s = self._at.PROGRESS, self._limit_s
        patience = Patience(self._flags, flag, announced=0, read_s=most_s, work_s=most_s)
        return lambda: self.lost_reason is not None or patience.is_over()

    def _patience(self, work_s: float = 0.0) -> Patience:
        """Return patience with what was announced last, which may take longer than a step."""
        work_s = max(self._limit_s, work_s, self._settings.exchange.transfer_timeout_s)
        return Patience(
            self._flags, self._at.PROGRESS, announced=self._ring.num_entries,
            read_s=self._limit_s, work_s=work_s,
        )  # fmt: skip

    def _watch(self, epoch: int, connection: socket.socket, wake: socket.socket) -> None:
        with contextlib.closing(wake):
            try:
                is_gone = wait_for_hang_up(connection, wake)
            except (OSError, ValueError) as error:
                self.mark_lost(f"its connection cannot be watched: {error}", epoch=epoch)
                return
        if is_gone:
            self.mark_lost("its process ended, or gave the epoch up; see its log", epoch=epoch)

    def drop(self) -> None:
        """Release what is left of an epoch that ended; what survives it stays. Idempotent."""
        self._heartbeat.stop()
        if self._waker is not None:
            self._waker.close()
            self._waker = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._control is not None:
            self._control.close()
            self._control = None
        self._ours.close()
