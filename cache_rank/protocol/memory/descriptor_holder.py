# SPDX-License-Identifier: Apache-2.0
"""Holds descriptors of mapped tensors, so that their memory outlives whoever made them.

The launcher, or ``tandemkv memory``, holds what the inference rank hands over, by groups: K/V and
tables, and what the engine remembers of rows. It maps none of it and reads none of it, and needs
neither torch nor a GPU. An inference rank that is started again asks for it instead of making it
anew (`descriptor_socket.take_held`). All of it goes with the process that holds it.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import threading
import time
from pathlib import Path

from tandemkv.cache_rank.protocol.errors import CacheRankLostError, TandemKVError
from tandemkv.cache_rank.protocol.ipc import take_lock

from .descriptor_messages import (
    TensorsMessage,
    TensorSpec,
    close_all,
    exchange,
    listening,
    receive_descriptors,
    send_descriptors,
)

HOLDER_TIMEOUT_S = 2.0
_TICK_S = 0.2


class DescriptorHolder:
    """Answers at `path` from a thread of its own until `close`.

    Its socket is made at `path`, in the run directory; a file that a dead process left goes.
    Whoever does not know the `token` is turned away. Raises `CacheRankError` if another live
    process holds memory there.
    """

    def __init__(self, path: Path, token: bytes) -> None:
        self._path, self._token = path, token
        self._held: dict[str, tuple[tuple[TensorSpec, ...], list[int]]] = {}
        self._lock = take_lock(path)
        try:
            self._socket = listening(path, backlog=4)
        except BaseException:
            os.close(self._lock)
            raise
        self._socket.settimeout(_TICK_S)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holder", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join()
        self._socket.close()
        self._path.unlink(missing_ok=True)
        for _, descriptors in self._held.values():
            close_all(descriptors)
        self._held.clear()
        os.close(self._lock)

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
        message, descriptors = receive_descriptors(connection, time.monotonic() + HOLDER_TIMEOUT_S)
        if not hmac.compare_digest(message.token, self._token):
            close_all(descriptors)
            return
        specs, held = self._held.get(message.group, ((), []))
        if message.specs or message.error:
            close_all(held)
            self._held[message.group] = (message.specs, descriptors)
            specs, held = (), []  # they are there: nothing needs to go back
        else:
            close_all(descriptors)
        answer = TensorsMessage(specs=specs, group=message.group)
        send_descriptors(connection, answer, held)


def ask_holder(path: Path, *, token: bytes, timeout_s: float = HOLDER_TIMEOUT_S) -> None:
    """Return once the holder at `path` has answered.

    Raises `CacheRankLostError` if it does not within `timeout_s`, or does not know `token`.
    """
    try:
        _, found = exchange(path, TensorsMessage(token=token), timeout_s=timeout_s)
    except OSError as error:
        raise CacheRankLostError(f"{path}: nobody answers: {error}") from error
    close_all(found)
