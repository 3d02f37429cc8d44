# SPDX-License-Identifier: Apache-2.0
"""Proof of life in both directions, and the counters of a process.

Runs beside the service loop in threads of its own: shared memory does not tell of a peer that
hangs, and a service that is busy must still be told from one that is dead. A pause of our
own process (a stopped container, a long hold of the interpreter lock) is not taken for the
other side's silence.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from .errors import CacheRankLostError, ProtocolError
from .fault_points import reach
from .ipc import IpcDealer, IpcRouter
from .messages import Heartbeat, HeartbeatReply, Message, StatusReply, StatusRequest
from .settings.exchange_settings import ExchangeSettings

_LOG = logging.getLogger(__name__)
_JOIN_S = 5.0


class Patience:
    """How long the other side may be silent, which counts as heard from now.

    A pause of our own is not its silence: one of more than half of `patience_s`, and of `turn_s`
    that pass between two questions anyway.
    """

    def __init__(self, patience_s: float, turn_s: float = 0.0) -> None:
        self._patience_s, self._longest_turn_s = patience_s, patience_s / 2 + turn_s
        self.hear()

    def hear(self) -> None:
        """Note that it has spoken."""
        self._heard = self._turn = time.monotonic()

    def is_over(self) -> bool:
        """Whether nothing was heard for too long; to be asked regularly."""
        now = time.monotonic()
        if now - self._turn > self._longest_turn_s:
            self._heard = max(self._heard, now - self._patience_s / 2)
        self._turn = now
        return now - self._heard >= self._patience_s


class StatusServer:
    """Answers `StatusRequest` at `socket_path` from a thread of its own.

    `status` makes the reply; it is called in the server's thread and must not block. Every `tick_s`
    the thread looks whether it is to end. Raises `CacheRankError` if another live process serves
    `socket_path`.
    """

    def __init__(
        self, socket_path: Path, *, status: Callable[[], StatusReply], tick_s: float = 0.25
    ) -> None:
        self._status = status
        self._tick_s = tick_s
        self._router = IpcRouter(socket_path)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=socket_path.name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and remove the socket. Idempotent."""
        self._stopping.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                received = self._router.receive(self._tick_s)
                try:
                    reply = self._answer(received[1]) if received else None
                    if received and reply is not None:
                        self._router.send(received[0], reply)
                    self._on_turn()
                except Exception:  # a broken counter must not look like a dead process
                    _LOG.exception("%s: a callback failed", self._thread.name)
        finally:
            self._router.close()

    def _answer(self, message: Message) -> Message | None:
        return self._status() if isinstance(message, StatusRequest) else None

    def _on_turn(self) -> None:
        """Run after each message, and each tick without one."""


def request_status(socket_path: Path, timeout_s: float) -> StatusReply:
    """Ask the process that serves `socket_path` for its counters.

    Raises `CacheRankLostError` if nobody answers within `timeout_s`, `ProtocolError` if the answer
    is malformed.
    """
    if not socket_path.exists():
        raise CacheRankLostError(f"{socket_path}: nobody serves it; has the process started?")
    with closing(IpcDealer(socket_path)) as dealer:
        dealer.send(StatusRequest())
        reply = dealer.receive(timeout_s)
    if reply is None:
        raise CacheRankLostError(f"{socket_path}: no answer within {timeout_s:g} s")
    if not isinstance(reply, StatusReply):
        raise ProtocolError(f"StatusRequest was answered with {type(reply).__name__}")
    return reply


class HeartbeatServer(StatusServer):
    """The cache rank's end: answers heartbeats, and notices when they stop.

    `busy` returns for how many seconds the current message has kept the service busy. `on_silence`
    is called with the epoch, once in each, in the server's thread, when as many heartbeats as
    `exchange` says have not come since the last one of the epoch; before the first one nothing is
    missed. The next epoch may have begun by then.
    """

    def __init__(
        self,
        socket_path: Path,
        exchange: ExchangeSettings,
        *,
        busy: Callable[[], float],
        status: Callable[[], StatusReply],
        on_silence: Callable[[int], None],
    ) -> None:
        self._busy = busy
        self._on_silence = on_silence
        interval_s = exchange.heartbeat_interval_s
        self._patience_s = interval_s * exchange.heartbeat_misses
        self._guard = threading.Lock()
        self._epoch = 0
        self._patience: Patience | None = None
        super().__init__(socket_path, status=status, tick_s=min(0.25, interval_s / 4))

    def expect(self, epoch: int) -> None:
        """Start to watch `epoch` (call before `Welcome` is sent)."""
        with self._guard:
            self._epoch, self._patience = epoch, None

    def forget(self) -> None:
        """Watch nothing; heartbeats are answered with epoch 0, which tells the peer."""
        self.expect(0)

    def _answer(self, message: Message) -> Message | None:
        if not isinstance(message, Heartbeat):
            return super()._answer(message)
        if reach("heartbeat.reply"):
            return None
        with self._guard:
            epoch = self._epoch
            if message.epoch == epoch != 0:
                self._patience = self._patience or Patience(self._patience_s)
                self._patience.hear()
        return HeartbeatReply(epoch=epoch, sequence=message.sequence, busy_s=self._busy())

    def _on_turn(self) -> None:
        with self._guard:
            if self._patience is None or not self._patience.is_over():
                return
            epoch, self._patience = self._epoch, None
        self._on_silence(epoch)


class HeartbeatClient:
    """The inference rank's end.

    As many heartbeats without an answer as `exchange` says are a loss, and so is a service that is
    busy with one message for longer than a transfer may take. `on_lost` is called once per `start`,
    in the client's thread, with the reason; it may call `start` and `stop`.
    """

    def __init__(
        self, socket_path: Path, exchange: ExchangeSettings, on_lost: Callable[[str], None]
    ) -> None:
        self._socket_path, self._on_lost = socket_path, on_lost
        self._interval_s = exchange.heartbeat_interval_s
        self._patience_s = self._interval_s * exchange.heartbeat_misses
        self._max_busy_s = exchange.transfer_timeout_s
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, epoch: int) -> None:
        """Watch `epoch` instead of what was watched before."""
        self.stop()
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(epoch, self._stopping), name="heartbeat", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Watch nothing. Idempotent."""
        self._stopping.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _run(self, epoch: int, stopping: threading.Event) -> None:
        try:
            with closing(IpcDealer(self._socket_path)) as dealer:
                reason = self._watch(dealer, epoch, stopping)
        except Exception as error:  # e.g. no more descriptors: unwatched is as good as lost
            reason = f"the heartbeat failed: {type(error).__name__}: {error}"
        if reason is not None and not stopping.is_set():
            self._on_lost(reason)

    def _watch(self, dealer: IpcDealer, epoch: int, stopping: threading.Event) -> str | None:
        """Return the reason of the loss, None if stopped."""
        sequence, patience = 0, Patience(self._patience_s, turn_s=2 * self._interval_s)
        while not stopping.is_set():
            now = time.monotonic()
            sequence += 1
            try:
                while dealer.receive(0.0) is not None:
                    pass  # late, and of earlier beats: it would be taken for an answer to this one
                if not reach("heartbeat.beat"):
                    dealer.send(Heartbeat(epoch=epoch, sequence=sequence))
                reason = self._judge_reply(dealer, epoch, stopping)
            except (CacheRankLostError, ProtocolError) as error:
                return str(error)
            if reason:
                return reason
            if reason is None:
                patience.hear()
                stopping.wait(max(0.0, now + self._interval_s - time.monotonic()))
            elif patience.is_over():
                return (
                    f"no heartbeat for {self._patience_s:g} s: its process hangs, or lacks CPU "
                    "time (exchange.heartbeat_misses gives it longer)"
                )
        return None

    def _judge_reply(self, dealer: IpcDealer, epoch: int, stopping: threading.Event) -> str | None:
        """Wait up to an interval for a reply; a late one proves life as well.

        Returns a reason, None if all is well, an empty string if no reply came.
        """
        deadline = time.monotonic() + self._interval_s
        while not stopping.is_set():
            left_s = deadline - time.monotonic()
            reply = dealer.receive(max(0.0, min(left_s, 0.1)))
            if reply is None:
                if left_s <= 0:
                    break
                continue
            if not isinstance(reply, HeartbeatReply):
                raise ProtocolError(f"Heartbeat was answered with {type(reply).__name__}")
            if reply.epoch != epoch:
                return f"the cache rank is in epoch {reply.epoch}, we are in {epoch}"
            if reply.busy_s > self._max_busy_s:
                return f"the cache rank has been busy with one message for {reply.busy_s:.1f} s"
            return None
        return ""
