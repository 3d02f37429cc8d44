# SPDX-License-Identifier: Apache-2.0
"""Hands descriptors of mapped tensors from one process to another, and tells when a rank is gone.

A Unix socket in the private run directory. The inference rank connects, proves that it knows the
token, and sends its tensors; the cache rank answers with its own, or with the reason why not. Then
the connection stays open without traffic: the kernel closes it when either process ends, however
it ends, so that the other learns of it at once.
"""

from __future__ import annotations

import contextlib
import hmac
import select
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tandemkv.cache_rank.protocol.errors import (
    CacheRankLostError,
    HandshakeRefusedError,
    ProtocolError,
    TandemKVError,
    UnusableBooksError,
)
from tandemkv.cache_rank.protocol.fault_points import reach

from .descriptor_holder import HOLDER_TIMEOUT_S
from .descriptor_messages import (
    BOOKS,
    TensorsMessage,
    TensorSpec,
    close_all,
    connected,
    exchange,
    listening,
    receive_descriptors,
    send_descriptors,
)
from .mapped_tensors import Homes, MappedTensors

_WITHDRAW_S = 1.0
_LOOK_S = 0.5


class DescriptorListener:
    """The cache rank's end: waits for one inference rank at a time.

    Its socket is made at `path`, in the run directory; a file that a dead process left goes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket = listening(path, backlog=1)

    def accept(
        self, homes: Homes | None = None, *, token: bytes, epoch: int, timeout_s: float,
        is_there: Callable[[], bool] = lambda: True,
    ) -> tuple[socket.socket, MappedTensors]:  # fmt: skip
        """Return the connection to the inference rank of `epoch`, and its tensors, mapped.

        `homes` as of `MappedTensors`. `is_there` is asked twice a second: one that was welcomed may
        end, or give up, before it connects. Others in the meantime are turned away. Raises
        `CacheRankLostError` if none comes in time, or it is gone, or says that it will not. Raises
        `ProtocolError` if what comes is not as agreed, and `SettingsError` if it cannot be mapped
        here; the inference rank is told why.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            connection = self._accept_one(deadline, is_there)
            try:
                message, descriptors = receive_descriptors(connection, deadline)
                if not hmac.compare_digest(message.token, token) or message.epoch != epoch:
                    close_all(descriptors)
                    connection.close()
                    continue
                if message.error:
                    raise CacheRankLostError(message.error)
                reach("memory.accept")
                return connection, attach_all(message.specs, descriptors, homes)
            except BaseException as error:
                send_reason(connection, error)
                connection.close()
                raise

    def close(self) -> None:
        """Close and remove the socket. Idempotent."""
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def _accept_one(self, deadline: float, is_there: Callable[[], bool]) -> socket.socket:
        while True:
            left_s = deadline - time.monotonic()
            self._socket.settimeout(max(0.001, min(_LOOK_S, left_s)))
            try:
                return self._socket.accept()[0]
            except TimeoutError as error:
                if left_s <= _LOOK_S:
                    reason = "did not send its memory in time"
                elif is_there():
                    continue
                else:
                    reason = "is gone, and did not send its memory"
                raise CacheRankLostError(f"the inference rank {reason}") from error


def offer_tensors(
    path: Path, tensors: Sequence[MappedTensors], *, token: bytes, epoch: int, timeout_s: float
) -> tuple[socket.socket, MappedTensors]:
    """Hand `tensors` to the cache rank that listens at `path`.

    Returns
    -------
    connection : socket.socket
        Stays open for the life of the epoch; `wait_for_hang_up` watches it.
    theirs : MappedTensors
        What the cache rank made, for us to hold: it outlives the cache rank with us.

    Raises `HandshakeRefusedError` if the cache rank cannot use them, with its reason, and `BOOKS`
    as the field if it could do without those; `CacheRankLostError` if it is gone, or does not
    answer within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    try:
        connection = connected(path, timeout_s)
        try:
            reach("memory.offer")
            send_tensors(connection, *tensors, token=token, epoch=epoch)
            message, descriptors = receive_descriptors(connection, deadline)
            if message.error:
                close_all(descriptors)
                raise HandshakeRefusedError(message.group or "memory", message.error)
            return connection, attach_all(message.specs, descriptors, tensors[0].homes)
        except BaseException:
            connection.close()
            raise
    except OSError as error:
        raise CacheRankLostError(
            f"{path}: the cache rank does not take the memory: {error}"
        ) from error


def withdraw_tensors(path: Path, *, token: bytes, epoch: int, reason: str) -> None:
    """Have a cache rank that waits at `path` for the tensors of `epoch` wait no longer.

    One that does not wait for those, or is gone, takes no notice.
    """
    with contextlib.suppress(OSError), connected(path, _WITHDRAW_S) as connection:
        send_tensors(connection, token=token, epoch=epoch, error=reason)


def send_tensors(
    connection: socket.socket, *tensors: MappedTensors,
    token: bytes = b"", epoch: int = 0, error: str = "", group: str = "",
) -> None:  # fmt: skip
    """Send tensors, or the reason why there are none; `group` as of `TensorsMessage`."""
    specs = tuple(spec for each in tensors for spec in each.specs)
    message = TensorsMessage(token, epoch, error[:4096], specs, group)
    send_descriptors(connection, message, [each for some in tensors for each in some.descriptors])


def send_reason(connection: socket.socket, error: BaseException) -> None:
    """Tell why there are no tensors; one that is gone, maybe for that reason, is not told."""
    group = BOOKS if isinstance(error, UnusableBooksError) else ""
    with contextlib.suppress(OSError):
        send_tensors(connection, error=f"{type(error).__name__}: {error}", group=group)


def let_hold(path: Path, tensors: MappedTensors, *, token: bytes, group: str) -> bool:
    """Let the holder at `path` have `tensors`, or none, as `group`, instead of what it had.

    Returns whether there is a holder.
    """
    reason = "" if tensors.specs else "there are none any more"
    message = TensorsMessage(token=token, error=reason, specs=tensors.specs, group=group)
    try:
        exchange(path, message, tensors.descriptors, timeout_s=HOLDER_TIMEOUT_S)
    except (OSError, TandemKVError):
        return False
    return True


def take_held(path: Path, *, token: bytes, group: str, homes: Homes | None = None) -> MappedTensors:
    """Map what the holder at `path` has as `group`; nothing if there is none, or no holder."""
    question = TensorsMessage(token=token, group=group)
    try:
        message, descriptors = exchange(path, question, timeout_s=HOLDER_TIMEOUT_S)
        return attach_all(message.specs, descriptors, homes)
    except (OSError, TandemKVError):
        return MappedTensors(homes)


def wait_for_hang_up(connection: socket.socket, wake: socket.socket) -> bool:
    """Block until the other process has ended (True), or `wake` becomes readable (False)."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
    poll.register(wake, select.POLLIN | select.POLLHUP)
    found = dict(poll.poll())
    return wake.fileno() not in found


def attach_all(
    specs: Sequence[TensorSpec], descriptors: Sequence[int], homes: Homes | None
) -> MappedTensors:
    """Map the tensors of a message; the descriptors are ours from then on, even on an error.

    Raises `ProtocolError` if they are not as the message says.
    """
    left = list(descriptors)
    tensors = MappedTensors(homes)
    try:
        if len(specs) != len(left):
            raise ProtocolError(f"{len(left)} descriptors came for {len(specs)} tensors")
        for spec in specs:
            tensors.attach(spec, left.pop(0))
    except BaseException:
        close_all(left)
        tensors.close()
        raise
    return tensors
