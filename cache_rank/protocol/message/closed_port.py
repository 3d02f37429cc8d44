# SPDX-License-Identifier: Apache-2.0
"""Ports of a library that goes on to listen after everybody is there: nobody else gets in.

The library's socket cannot be closed under it. A socket filter on it lets the kernel drop what
comes to the port before anything answers; connections that are there are sockets of their own.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_SO_ATTACH_FILTER = 26  # asm-generic/socket.h; the module socket has no name for it
_RETURN_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF_RET | BPF_K: keep 0 bytes of a packet
_creating = threading.Lock()


@contextmanager
def listeners_of() -> Iterator[set[int]]:
    """Yield a set that holds, behind the body, descriptors of the sockets that it let listen.

    One body at a time in a process; what other threads let listen meanwhile is taken for its own.
    """
    found: set[int] = set()
    with _creating:
        before = _listening()
        yield found
        found |= _listening() - before


def drop_strangers(descriptors: Iterable[int]) -> None:
    """Let nobody connect any more to the listening sockets of `descriptors`.

    Raises `OSError` if the kernel takes no filter: some take those of privileged processes only.
    """
    code = ctypes.create_string_buffer(_RETURN_NOTHING)
    program = struct.pack("HP", 1, ctypes.addressof(code))
    for descriptor in descriptors:
        with socket.socket(fileno=os.dup(descriptor)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _listening() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/fd").iterdir() if _listens(int(path.name))}


def _listens(descriptor: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        copy = os.dup(descriptor)
    except OSError:  # closed meanwhile
        return False
    with socket.socket(fileno=copy) as found:
        return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
