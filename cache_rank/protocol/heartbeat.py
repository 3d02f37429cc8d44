# SPDX-License-Identifier: Apache-2.0
"""Proof of life in both directions.

Runs beside the service loop in threads of its own: shared memory does not tell of a peer that
hangs, and a service that is busy must still be told from one that is dead. A pause of our
own process (a stopped container, a long hold of the interpreter lock) is not taken for the
other side's silence.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from .errors import CacheRankLostError, ProtocolError
from .fault_points import reach
from .ipc import IpcDealer
from .messages import Heartbeat, HeartbeatReply, Message, StatusReply
from .status import StatusServer, request_status

__all__ = ["HeartbeatClient", "HeartbeatServer", "StatusServer", "request_status"]

_JOIN_S = 5.0


class HeartbeatServer(StatusServer):
    """The cache rank's end: answers heartbeats, and notices when they stop.

    `busy` returns for how many seconds the current message has kept the service busy. `on_silence`
    is called once per epoch, in the server's thread, when ``interval_s * misses`` have passed since
    the last heartbeat of the epoch; before the first one nothing is missed.
    """

    def __init__(
        self,
        socket_path: Path,
        *,
        busy: Callable[[], float],
        status: Callable[[], StatusReply],
        on_silence: Callable[[], None],
        interval_s: float,
        misses: int,
    ) -> None:
        self._busy = busy
        self._on_silence = on_silence
        self._patience_s = interval_s * misses
        self._guard = threading.Lock()
        self._epoch = 0
        self._last_beat: float | None = None
        self._last_turn = time.monotonic()
        super().__init__(socket_path, status=status, tick_s=min(0.25, interval_s / 4))

    def expect(self, epoch: int) -> None:
        """Start to watch `epoch` (call before `Welcome` is sent)."""
        with self._guard:
            self._epoch, self._last_beat = epoch, None

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
                self._last_beat = time.monotonic()
        return HeartbeatReply(epoch=epoch, sequence=message.sequence, busy_s=self._busy())

    def _on_turn(self) -> None:
        now = time.monotonic()
        paused, self._last_turn = now - self._last_turn > self._patience_s / 2, now
        with self._guard:
            if self._last_beat is None:
                return
            if paused:
                self._last_beat = max(self._last_beat, now - self._patience_s / 2)
            if now - self._last_beat < self._patience_s:
                return
            self._last_beat = None
        self._on_silence()


class HeartbeatClient:
    """The inference rank's end.

    ``interval_s * misses`` without an answer is a loss, and so is a service that is busy with one
    message for longer than `max_busy_s`. `on_lost` is called once per `start`, in the client's
    thread, with the reason; it may call `start` and `stop`.
    """

    def __init__(
        self,
        socket_path: Path,
        *,
        interval_s: float,
        misses: int,
        on_lost: Callable[[str], None],
        max_busy_s: float,
    ) -> None:
        self._socket_path = socket_path
        self._interval_s = interval_s
        self._misses = misses
        self._on_lost = on_lost
        self._max_busy_s = max_busy_s
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
            dealer = IpcDealer(self._socket_path)
            try:
                reason = self._watch(dealer, epoch, stopping)
            finally:
                dealer.close()
        except Exception as error:  # e.g. no more descriptors: unwatched is as good as lost
            reason = f"the heartbeat failed: {type(error).__name__}: {error}"
        if reason is not None and not stopping.is_set():
            self._on_lost(reason)

    def _watch(self, dealer: IpcDealer, epoch: int, stopping: threading.Event) -> str | None:
        """Return the reason of the loss, None if stopped."""
        patience_s = self._interval_s * self._misses
        last_reply = last_turn = time.monotonic()
        sequence = 0
        while not stopping.is_set():
            now = time.monotonic()
            sequence += 1
            try:
                if not reach("heartbeat.beat"):
                    dealer.send(Heartbeat(epoch=epoch, sequence=sequence))
                reason = self._judge_reply(dealer, epoch, stopping)
            except (CacheRankLostError, ProtocolError) as error:
                return str(error)
            if reason:
                return reason
            paused = time.monotonic() - last_turn > patience_s / 2 + 2 * self._interval_s
            last_turn = time.monotonic()
            if reason is None:
                last_reply = last_turn
                stopping.wait(max(0.0, now + self._interval_s - last_turn))
            elif paused:  # it was us who slept
                last_reply = max(last_reply, last_turn - patience_s / 2)
            elif last_turn - last_reply >= patience_s:
                return (
                    f"no heartbeat for {patience_s:g} s: its process hangs, or lacks CPU time "
                    "(exchange.heartbeat_misses gives it longer)"
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
