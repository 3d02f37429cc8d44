# SPDX-License-Identifier: Apache-2.0
"""Writes what a child prints to its log, which never exceeds its bound.

A process of its own between the child and the file: the child is never made to wait by a
launcher that is stopped, and loses no output when the launcher is killed. It ends when the last
process that may print has ended. It uses nothing but the standard library, and is started as a
script, isolated (``-I -S``): ``log_writer.py PATH MAX_BYTES``, the output on standard input.
"""

from __future__ import annotations

import os
import signal
import sys

_READ_BYTES = 65536


class BoundedLog:
    """A log file that moves to ``*.1``, in place of an earlier one, before it grows too long.

    What the file at `path` holds already counts; it and ``*.1`` have at most `max_bytes` each.
    """

    def __init__(self, path: str, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._file = -1
        self._size = 0
        self._lost_bytes = 0

    def write(self, data: bytes) -> None:
        """Append `data`. What the disk does not take is counted, and said later in the log."""
        note = f"[{self._lost_bytes} bytes of this log were lost: the disk took none]\n"
        if self._lost_bytes and self._append(note.encode()):
            self._lost_bytes = 0
        if self._lost_bytes or not self._append(data):
            self._lost_bytes += len(data)

    def _append(self, data: bytes) -> bool:
        try:
            while data:
                self._open()
                room = self._max_bytes - self._size
                if len(data) > room:
                    room = max(0, data.rfind(b"\n", 0, room) + 1)  # cut between two lines
                    if not room and not self._size:  # a line longer than a log
                        room = self._max_bytes
                if not room:
                    self._move()
                    continue
                written = os.write(self._file, data[:room])
                self._size += written
                data = data[written:]
        except OSError:
            self._close()
            return False
        return True

    def _open(self) -> None:
        if self._file >= 0:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(self._path, flags, 0o600)
        self._size = os.fstat(self._file).st_size

    def _move(self) -> None:
        self._close()
        os.replace(self._path, f"{self._path}.1")  # noqa: PTH105 (no pathlib: starts faster)

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    log = BoundedLog(sys.argv[1], int(sys.argv[2]))
    while data := os.read(0, _READ_BYTES):
        log.write(data)


if __name__ == "__main__":
    _main()
