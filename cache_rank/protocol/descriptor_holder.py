# SPDX-License-Identifier: Apache-2.0
"""Holds descriptors of mapped tensors, so that their memory outlives whoever made them.

The launcher holds what the inference rank hands over, by groups: K/V and tables, and what the
engine remembers of rows. It maps none of it and reads none of it. An inference rank that is started
again asks for it instead of making it anew. All of it goes with the launcher.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from .descriptor_socket import (
    SpecMessage,
    TensorsMessage,
    attach_all,
    close_all,
    receive_descriptors,
    send_descriptors,
    send_tensors,
)
from .errors import TandemKVError
from .mapped_tensors import Homes, MappedTensors

_TIMEOUT_S = 2.0
_TICK_S = 0.2


class DescriptorHolder:
    """Answers at `path` from a thread of its own until `close`.

    Parameters
    ----------
    path : Path
        Where the socket is made, in the run directory; a file that a dead process left goes.
    token : bytes
        Whoever does not know it is turned away.
    """

    def __init__(self, path: Path, token: bytes) -> None:
        self._path, self._token = path, token
        self._held: dict[str, tuple[tuple[SpecMessage, ...], list[int]]] = {}
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.bind(str(path))
            path.chmod(0o600)
            self._socket.listen(4)
            self._socket.settimeout(_TICK_S)
        except BaseException:
            self._socket.close()
            raise
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holder", daemon=True)
        self._thread.start()

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of what is held."""
        return tuple(self._held)

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        self._stopping.set()
        self._thread.join()
        self._socket.close()
        self._path.unlink(missing_ok=True)
        for _, descriptors in self._held.values():
            close_all(descriptors)
        self._held.clear()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                connection = self._socket.accept()[0]
            except TimeoutError:
                continue
            except OSError:  # no more descriptors: the next may find some
                self._stopping.wait(_TICK_S)
                continue
            with contextlib.closing(connection), contextlib.suppress(TandemKVError, OSError):
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        message, descriptors = receive_descriptors(connection, time.monotonic() + _TIMEOUT_S)
        if not hmac.compare_digest(message.token, self._token):
            close_all(descriptors)
            return
        if message.specs:
            _, before = self._held.pop(message.group, ((), []))
            close_all(before)
            self._held[message.group] = (message.specs, descriptors)
        specs, held = self._held.get(message.group, ((), []))
        if message.specs:
            specs, held = (), []  # they are there: nothing needs to go back
        answer = TensorsMessage(token=b"", epoch=0, error="", specs=specs, group=message.group)
        send_descriptors(connection, answer, held)


def let_hold(path: Path, tensors: MappedTensors, *, token: bytes, group: str) -> bool:
    """Let the holder at `path` have `tensors` as `group`, instead of what it had; False: none."""
    if not tensors.specs:
        return False
    try:
        with _connected(path) as connection:
            send_tensors(connection, tensors, token=token, group=group)
            receive_descriptors(connection, time.monotonic() + _TIMEOUT_S)
    except (OSError, TandemKVError):
        return False
    return True


def take_held(path: Path, *, token: bytes, group: str, homes: Homes | None = None) -> MappedTensors:
    """Map what the holder at `path` has as `group`; nothing if there is none, or no holder."""
    try:
        with _connected(path) as connection:
            send_tensors(connection, token=token, group=group)
            message, descriptors = receive_descriptors(connection, time.monotonic() + _TIMEOUT_S)
            return attach_all(message.specs, descriptors, homes)
    except (OSError, TandemKVError):
        return MappedTensors(homes)


def _connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(_TIMEOUT_S)
        connection.connect(str(path))
    except BaseException:
        connection.close()
        raise
    return connection


def same_tensors(found: MappedTensors, wanted: Sequence[object]) -> bool:
    """Whether `found` are exactly the tensors of the specs `wanted`."""
    return list(found.specs) == list(wanted)
