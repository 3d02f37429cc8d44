# SPDX-License-Identifier: Apache-2.0
"""zmq sockets with every bound set. One message is one frame.

Each socket owns its context, so that closing it waits for its file to be gone.
No class may be used by two threads at once; handing one over to a thread is fine.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import zmq
from zmq.utils.monitor import parse_monitor_message

from .errors import AlreadyServedError, CacheRankError, CacheRankLostError, ProtocolError
from .messages import CODEC, MAX_FRAME_BYTES, Codec, Message, Refused

_HIGH_WATER = 1024
_SEND_TIMEOUT_MS = 50
_SORTING_S = 0.01
_PID_BYTES = 32
_SPARE_DESCRIPTORS = 16
"""A context takes some for itself, and others may take some meanwhile."""
_LOOK_S = 0.1
"""Longest time that `server_pid` of another process holds the lock that it looks at."""
_MAX_CONNECTIONS_WAITING = 64
ZAP_DOMAIN = b"tandemkv"

T = TypeVar("T")


class Router(Generic[T]):
    """A serving socket that tells its peers apart. Garbage is counted in `malformed` and dropped.

    A first message of another protocol version is refused.
    """

    def __init__(self, codec: Codec[T]) -> None:
        self.malformed = 0
        self._codec = codec
        self._context, self._socket = _bound(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # On ipc nobody answers for this domain, and so everybody is let in (the directory's mode is
        # the guard). But with one, zmq refuses ZMTP 1 and 2, for which random bytes may be taken:
        # libzmq 4.3.5 aborts if such a peer is in its handshake while the socket closes.
        self._socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        self._socket.setsockopt(zmq.BACKLOG, _MAX_CONNECTIONS_WAITING)

    def receive(self, timeout_s: float) -> tuple[bytes, T] | None:
        """Return the next sound message and who sent it, or None after `timeout_s`.

        Garbage is dropped for a moment longer at most: it may come without end.
        """
        now = time.monotonic()
        deadline, last = now + timeout_s, now + max(timeout_s, _SORTING_S)
        while readable(self._socket, deadline) and time.monotonic() < last:
            parts, is_whole = receive_parts(self._socket, limit=2)
            if len(parts) != 2 or not is_whole:
                self.malformed += 1
                continue
            try:
                return parts[0], self._codec.decode(parts[1])
            except ProtocolError:
                self.malformed += 1
                if refusal := self._codec.refusal_of(parts[1]):
                    self.send(parts[0], refusal)
        return None

    def send(self, peer: bytes, message: T | Refused) -> bool:
        """Send to `peer`; False if it is gone or does not read."""
        try:
            self._socket.send_multipart([peer, self._codec.encode(message)], flags=zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True


class IpcRouter(Router[Message]):
    """The serving end.

    A file that a dead process left at `path` is taken over. Raises `CacheRankError` if a live
    process serves `path`, it cannot be bound, or there is no socket to be had.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._closed = False
        self._lock = take_lock(path)
        try:
            with making_socket(path):
                super().__init__(CODEC)
        except CacheRankError:
            os.close(self._lock)
            raise
        try:
            self._socket.bind(f"ipc://{path}")
            path.chmod(0o600)
        except (zmq.ZMQError, OSError) as error:
            self.close()
            raise CacheRankError(f"cannot bind {path}: {error}") from error

    def close(self) -> None:
        """Close and remove the socket file. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._socket.close(linger=0)
        self._context.term()
        self._path.unlink(missing_ok=True)
        os.close(self._lock)  # gives up the lock last: the next owner finds a clean path


class Dealer(Generic[T]):
    """A calling socket, not connected yet; errors name the `place` that it calls.

    Raises `zmq.ZMQError` if there are hardly any descriptors left; see `making_socket`.
    """

    def __init__(self, codec: Codec[T], place: object) -> None:
        self._codec, self._place = codec, place
        self._is_in = self._was_cut_off = False
        self._context, self._socket = _bound(zmq.DEALER)
        self._monitor: zmq.Socket[bytes] | None = None

    def send(self, message: T) -> None:
        """Queue `message`; waits 50 ms at most.

        Raises `CacheRankLostError` if the queue is full: the other side has not read for long.
        """
        try:
            self._socket.send(self._codec.encode(message))
        except zmq.ZMQError as error:
            raise CacheRankLostError(
                f"{self._place}: nobody reads, {_HIGH_WATER} messages are waiting ({error})"
            ) from error

    def receive(self, timeout_s: float) -> T | None:
        """Return the next message, or None after `timeout_s`.

        Raises `ProtocolError` if it is malformed.
        """
        if not readable(self._socket, time.monotonic() + timeout_s):
            return None
        parts, is_whole = receive_parts(self._socket, limit=1)
        if not is_whole:
            raise ProtocolError(f"{self._place}: a message of several frames")
        return self._codec.decode(parts[0])

    def close(self) -> None:
        """Close; what cannot be sent within 50 ms is dropped. Idempotent."""
        if self._context.closed:
            return
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
        self._socket.close(linger=_SEND_TIMEOUT_MS)
        self._context.term()

    def _watch(self, events: int = 0) -> zmq.Socket[bytes]:
        """Have the connection watched from now on, with `events` besides; returns where they come.

        `_look` notes whether we were let in (`_is_in`), and whether a process that had let us in
        has hung up (`_was_cut_off`). What it had got is lost then: the socket connects to the next
        one by itself, which gets only what was not sent before.
        """
        events |= int(zmq.Event.HANDSHAKE_SUCCEEDED) | int(zmq.Event.DISCONNECTED)
        self._monitor = self._socket.get_monitor_socket(events)
        return self._monitor

    def _look(self) -> None:
        """Take note of what became of the connection since the last look."""
        assert self._monitor is not None
        with contextlib.suppress(zmq.Again):
            while True:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
                self._was_cut_off |= self._is_in and event == zmq.Event.DISCONNECTED
                self._is_in |= event == zmq.Event.HANDSHAKE_SUCCEEDED
                self._on_event(event)

    def _on_event(self, event: int) -> None:
        """For who watches more than that."""


class IpcDealer(Dealer[Message]):
    """The calling end. Messages wait in a bounded queue while nobody serves `path`."""

    def __init__(self, path: Path) -> None:
        super().__init__(CODEC, path)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 100)
        self._before_connecting()
        self._socket.connect(f"ipc://{path}")

    def _before_connecting(self) -> None:
        """For who watches the socket from its first event on."""


def server_pid(path: Path) -> int | None:
    """Return the id of the live process that serves `path`; None if there is none."""
    try:
        handle = os.open(f"{path}.lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)  # others who look may have it as well
    except OSError:
        text = os.read(handle, _PID_BYTES).decode("ascii", errors="replace")
        return int(text) if text.isdecimal() else 0
    finally:
        os.close(handle)
    return None


class _Context(zmq.Context[zmq.Socket[bytes]]):
    """A context that may be left to the garbage collector together with its sockets.

    pyzmq's own knows them by weak references, which are gone by then for all that one cycle holds:
    it waits for ever for sockets that nobody closes any more, in whatever thread collects garbage.
    An error is enough for such a cycle, if its traceback is kept.
    """

    _made: tuple[zmq.Socket[bytes], ...] = ()

    def socket(self, *args: Any, **kwargs: Any) -> zmq.Socket[bytes]:
        made = super().socket(*args, **kwargs)
        self._made += (made,)
        return made

    def __del__(self) -> None:
        for made in self._made:
            made.close(linger=0)
        super().__del__()


def _bound(kind: int) -> tuple[_Context, zmq.Socket[bytes]]:
    """Return a socket with every bound set, and its context.

    Raises `zmq.ZMQError` if there are hardly any descriptors left.
    """
    _require_descriptors()
    context = _Context()
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
    socket.setsockopt(zmq.SNDTIMEO, _SEND_TIMEOUT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 2000)
    return context, socket


def _require_descriptors() -> None:
    """Raise where a context would get no descriptor: libzmq ends the process then."""
    with contextlib.ExitStack() as held:
        try:
            for _ in range(_SPARE_DESCRIPTORS):
                held.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            raise zmq.ZMQError(error.errno) from error


@contextlib.contextmanager
def making_socket(place: object) -> Iterator[None]:
    """Raise `CacheRankError` where zmq has no socket for us.

    Not for who asks whether another process lives: that one is well, and we lack descriptors.
    """
    try:
        yield
    except zmq.ZMQError as error:
        raise CacheRankError(
            f"{place}: no socket can be made: {error}; the process may lack descriptors (ulimit -n)"
        ) from error


def readable(socket: zmq.Socket[bytes], deadline: float) -> bool:
    """Wait for a message until `deadline`."""
    left_ms = max(0, round((deadline - time.monotonic()) * 1e3))
    return bool(socket.poll(left_ms, zmq.POLLIN))


def receive_parts(socket: zmq.Socket[bytes], limit: int) -> tuple[list[bytes], bool]:
    """Return the first `limit` frames of a message, and whether these are all."""
    parts: list[bytes] = []
    is_whole, more = True, True
    while more:
        frame = socket.recv(zmq.NOBLOCK)
        if len(parts) < limit:
            parts.append(frame)
        else:
            is_whole = False
        more = bool(socket.getsockopt(zmq.RCVMORE))
    return parts, is_whole


def take_lock(path: Path) -> int:
    """Return a descriptor that makes this process the one that serves `path`, while it is open.

    Raises `AlreadyServedError` if another live process serves it, `CacheRankError` if there is no
    file to be had.
    """
    # zmq removes an existing socket file without asking, be it stale or in use. The kernel
    # drops this lock with its process, so it tells the two apart.
    try:
        handle = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CacheRankError(f"cannot lock {path}: {error}") from error
    deadline = time.monotonic() + _LOOK_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if time.monotonic() < deadline:
                time.sleep(0.001)
                continue
            with contextlib.suppress(OSError):
                os.close(handle)
            raise AlreadyServedError(
                f"{path}: another live process serves it; stop that one or give another --run-dir"
            ) from error
    with contextlib.suppress(OSError):
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
    return handle
