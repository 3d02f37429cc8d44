# SPDX-License-Identifier: Apache-2.0
"""Lists of mapped tensors whose descriptors come with them, as they travel over a Unix socket.

Imports no torch: who holds memory for the ranks maps none of it (`descriptor_holder`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Annotated

import msgspec

from tandemkv.cache_rank.protocol.errors import CacheRankLostError, ProtocolError

_MAX_BYTES = 1 << 16
_MAX_DESCRIPTORS = 128
_Dim = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Home = Annotated[str, msgspec.Meta(pattern=r"^(host|inference|engine|pool_[0-9]{1,2})\Z")]
"""Whose memory a tensor is (`tandemkv.cache_rank.protocol.memory.mapped_tensors.Homes`)."""
ITEM_BYTES = {
    "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int64": 8, "int32": 4,
    "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Of the dtypes that mapped tensors have."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Name, shape, dtype (a torch name) and home of a mapped tensor, also as they travel."""

    name: Annotated[str, msgspec.Meta(max_length=64)]
    shape: Annotated[tuple[_Dim, ...], msgspec.Meta(max_length=8)]
    dtype: Annotated[str, msgspec.Meta(pattern=rf"^({'|'.join(ITEM_BYTES)})\Z")]
    home: Home = "host"

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor; at least one page, for an empty file cannot be mapped."""
        return max(mmap.PAGESIZE, prod(self.shape) * ITEM_BYTES[self.dtype])


class TensorsMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Tensors whose descriptors come with the message.

    `error` is empty if all is well, and else why there are none. `group` is for who holds them
    (`descriptor_holder`): without tensors it is asked for them, with an error it lets go of them.
    Where an engine is refused memory, it names the tensors that are the reason, if some are.
    """

    token: Annotated[bytes, msgspec.Meta(max_length=64)] = b""
    epoch: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = 0
    error: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    specs: Annotated[tuple[TensorSpec, ...], msgspec.Meta(max_length=_MAX_DESCRIPTORS)] = ()
    group: Annotated[str, msgspec.Meta(max_length=64)] = ""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(TensorsMessage)
BOOKS = "books"
"""Group of what an engine remembers of rows, and leaves to the next."""


def listening(path: Path, *, backlog: int) -> socket.socket:
    """Return a socket at `path` that listens to its owner; what a dead process left there goes."""
    path.unlink(missing_ok=True)
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        found.bind(str(path))
        path.chmod(0o600)
        found.listen(backlog)
    except BaseException:
        found.close()
        raise
    return found


def connected(path: Path, timeout_s: float) -> socket.socket:
    """Return a connection to who listens at `path`; raises `OSError` if nobody does."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
    except BaseException:
        connection.close()
        raise
    return connection


def has_hung_up(connection: socket.socket, timeout_s: float = 0.0) -> bool:
    """Whether the other end is closed, or is within `timeout_s`."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
    return bool(poll.poll(timeout_s * 1e3))


def send_descriptors(
    connection: socket.socket, message: TensorsMessage, descriptors: Sequence[int]
) -> None:
    """Send `message` with the descriptors of its tensors."""
    socket.send_fds(connection, [_ENCODER.encode(message)], descriptors)


def receive_descriptors(
    connection: socket.socket, deadline: float
) -> tuple[TensorsMessage, list[int]]:
    """Return the next message and its descriptors, which are the caller's from then on.

    Raises `CacheRankLostError` if none comes until `deadline`, `ProtocolError` if it is malformed.
    """
    connection.settimeout(max(0.001, deadline - time.monotonic()))
    try:
        frame, descriptors, flags, _ = socket.recv_fds(connection, _MAX_BYTES, _MAX_DESCRIPTORS)
    except (OSError, struct.error) as error:
        raise CacheRankLostError(f"the other rank does not send its memory: {error}") from error
    try:
        if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
            raise ProtocolError(
                "descriptors were cut off: raise the limit of open files (ulimit -n)"
            )
        if not frame:
            raise CacheRankLostError("the other rank hung up")
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        return _DECODER.decode(frame), list(descriptors)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        close_all(descriptors)
        raise ProtocolError(f"malformed list of tensors: {error}") from error
    except BaseException:
        close_all(descriptors)
        raise


def exchange(
    path: Path, message: TensorsMessage, descriptors: Sequence[int] = (), *, timeout_s: float
) -> tuple[TensorsMessage, list[int]]:
    """Return what who listens at `path` answers to `message`; raises `OSError`, or as above."""
    with connected(path, timeout_s) as connection:
        send_descriptors(connection, message, descriptors)
        return receive_descriptors(connection, time.monotonic() + timeout_s)


def close_all(descriptors: Iterable[int]) -> None:
    """Close descriptors; those that are closed already are none."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
