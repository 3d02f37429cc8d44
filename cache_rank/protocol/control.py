# SPDX-License-Identifier: Apache-2.0
"""The control plane: announcements from the inference rank to the cache rank, in order.

The server lives in the cache rank's service loop, the client in the scheduler's thread of
the inference rank. A client serves one epoch: make a new one for the next, so that nothing
of the old one can still be queued in it.
"""

from __future__ import annotations

from .errors import CacheRankLostError
from .fault_points import reach
from .ipc import IpcDealer, IpcRouter
from .messages import Message
from .run_dir import RunDir


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
    """The inference rank's end; for one thread and one epoch."""

    def __init__(self, run_dir: RunDir) -> None:
        super().__init__(run_dir.control_socket)
        self._run_dir = run_dir

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

    def answer_to(self, message: Message, timeout_s: float) -> Message:
        """Return the next message, which follows `message`.

        Raises `CacheRankLostError` if none comes within `timeout_s`, `ProtocolError` if it is
        malformed.
        """
        reply = self.receive(max(0.0, timeout_s))
        if reply is None:
            raise CacheRankLostError(
                f"the cache rank did not answer {type(message).__name__} within {timeout_s:g} s; "
                f"is it running? `tandemkv cache-rank --run-dir {self._run_dir.path}` starts it"
            )
        return reply
