# SPDX-License-Identifier: Apache-2.0
"""Makes sure that the process of an epoch that is over writes to shared memory no more."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct

from tandemkv.cache_rank.protocol.errors import CacheRankLostError
from tandemkv.cache_rank.protocol.memory.descriptor_messages import has_hung_up

_CREDENTIALS = struct.Struct("3i")
_EXIT_S = 0.5
"""Longest time from the end of a dying process's connection to its own."""


class Fence:
    """The other end of a connection, to be ended if it does not end by itself.

    A process that was stopped, or hangs, still has the memory mapped, and may go on at any time.
    `connection` is a Unix socket, open at the other end as long as the process uses the memory. One
    that was told to let go is waited for `grace_s`, before it is ended. One that cannot be ended
    from here, for it is in another PID namespace, finds that we have hung up and lets go by itself,
    if it lives.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self.grace_s = connection.dup(), 0.0
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self._pid = _CREDENTIALS.unpack(raw)[0]
        self._process = -1
        if self._pid > 0 and self._pid != os.getpid():  # 0: it is of another namespace
            try:
                # Named by descriptor: a number may be another process's by the time of the kill.
                self._process = os.pidfd_open(self._pid)
            except OSError:  # it has ended already
                self._process = -1

    def close(self, timeout_s: float) -> None:
        """Return once the other end is closed; hangs up, and kills the process, if it is not.

        Idempotent. Raises `CacheRankLostError` if it is still open after `timeout_s`.
        """
        if self._connection.fileno() < 0:
            return
        if not has_hung_up(self._connection, self.grace_s):
            with contextlib.suppress(OSError):  # it has just ended
                self._connection.shutdown(socket.SHUT_WR)  # we still see it hang up
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                if self._process >= 0:
                    signal.pidfd_send_signal(self._process, signal.SIGKILL)
            if not has_hung_up(self._connection, timeout_s):
                raise CacheRankLostError(
                    f"the cache rank of the epoch before (pid {self._pid or 'unknown'}) has its "
                    "memory mapped still, and cannot be ended from here; end it"
                )
        self._connection.close()
        if self._process >= 0:
            # Files of a dying process are closed in any order: its GPU's work may end later than
            # this one. A process that lives has given the memory back before it closed its end.
            poll = select.poll()
            poll.register(self._process, select.POLLIN)
            poll.poll(_EXIT_S * 1e3)
            os.close(self._process)
            self._process = -1
