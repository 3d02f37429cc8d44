# SPDX-License-Identifier: Apache-2.0
"""Counters of a process: a thread that answers, and the question."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from .errors import CacheRankLostError, ProtocolError
from .ipc import IpcDealer, IpcRouter
from .messages import Message, StatusReply, StatusRequest

logger = logging.getLogger(__name__)

_JOIN_S = 5.0


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
                    logger.exception("%s: a callback failed", self._thread.name)
        finally:
            self._router.close()

    def _answer(self, message: Message) -> Message | None:
        return self._status() if isinstance(message, StatusRequest) else None

    def _on_turn(self) -> None:
        """Run after each message, and each tick without one."""


def request_status(socket_path: Path, timeout_s: float) -> StatusReply:
    """Ask the process that serves `socket_path` for its counters.

    Raises
    ------
    CacheRankLostError
        If nobody answers within `timeout_s`.
    ProtocolError
        If the answer is malformed.
    """
    if not socket_path.exists():
        raise CacheRankLostError(f"{socket_path}: nobody serves it; has the process started?")
    dealer = IpcDealer(socket_path)
    try:
        dealer.send(StatusRequest())
        reply = dealer.receive(timeout_s)
    finally:
        dealer.close()
    if reply is None:
        raise CacheRankLostError(f"{socket_path}: no answer within {timeout_s:g} s")
    if not isinstance(reply, StatusReply):
        raise ProtocolError(f"StatusRequest was answered with {type(reply).__name__}")
    return reply
