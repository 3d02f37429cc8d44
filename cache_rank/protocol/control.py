# SPDX-License-Identifier: Apache-2.0
"""The control plane: announcements from the inference rank to the cache rank, in order.

The server lives in the cache rank's service loop, the client in the scheduler's thread of
the inference rank. A client serves one epoch: make a new one for the next, so that nothing
of the old one can still be queued in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from .errors import CacheRankLostError
from .fault_points import reach
from .ipc import IpcDealer, IpcRouter, making_socket, readable
from .messages import Message
from .run_dir import RunDir

_SLICE_S = 0.05
"""Between two looks whether the process that was asked is still there."""


class ControlServer(IpcRouter):
    """The cache rank's end.

    Raises `CacheRankError` if another live process serves this run directory.
    """

    def __init__(self, run_dir: RunDir) -> None:
        super().__init__(run_dir.control_socket)

    def poll(self, timeout_s: float) -> tuple[bytes, Message] | None:
        """Return the next message and its sender, or None after `timeout_s`."""
        received = self.receive(timeout_s)
        return None if received is not None and reach("control.receive") else received

    def send(self, peer: bytes, message: Message) -> bool:
        """Send to `peer` without waiting; False if it is gone."""
        return reach("control.answer") or super().send(peer, message)


class ControlClient(IpcDealer):
    """The inference rank's end; for one thread and one epoch.

    Raises `CacheRankError` if there is no socket to be had.
    """

    def __init__(self, run_dir: RunDir) -> None:
        with making_socket(run_dir.control_socket):
            super().__init__(run_dir.control_socket)
        self._run_dir = run_dir

    def _before_connecting(self) -> None:
        self._watch()

    def send(self, message: Message) -> None:
        """Queue `message`; waits 50 ms at most.

        Raises `CacheRankLostError` if the cache rank has stopped reading.
        """
        if not reach("control.send"):
            super().send(message)

    def request(self, message: Message, timeout_s: float) -> Message:
        """Send `message` and return the answer; raises as `answer_to`."""
        self.send(message)
        return self.answer_to(message, timeout_s)

    def answer_to(
        self, message: Message, timeout_s: float, meanwhile: Callable[[], None] | None = None
    ) -> Message:
        """Return the next message, which follows `message`; `meanwhile` is called while it waits.

        Raises `CacheRankLostError` if none comes within `timeout_s`, or the process that was asked
        ends before; `ProtocolError` if it is malformed.
        """
        now = time.monotonic()
        deadline = now + timeout_s
        while not readable(self._socket, min(deadline, now + _SLICE_S)):
            now = time.monotonic()
            self._look()
            if self._was_cut_off or now >= deadline:
                break
            if meanwhile is not None:
                meanwhile()
        reply = self.receive(0.0)  # what it said before it ended has arrived by then
        if reply is not None:
            return reply
        name = type(message).__name__
        if self._was_cut_off:
            raise CacheRankLostError(
                f"the cache rank that was asked has ended: no answer to {name}"
            )
        raise CacheRankLostError(
            f"the cache rank did not answer {name} within {timeout_s:g} s; "
            f"is it running? `tandemkv cache-rank --run-dir {self._run_dir.path}` starts it"
        )
