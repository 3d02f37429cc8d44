# SPDX-License-Identifier: Apache-2.0
"""K/V between two hosts: one private gloo pair of `torch.distributed`, on one interface.

Built around what gloo does to those who are careless:

- A receive smaller than the message kills the process. Each message is two transfers: a header of
  fixed size, and a body of the bytes that the header names, which are checked first.
- A send that is being written when the pair breaks is never told, and waits to its limit; one that
  the other end has not asked for yet is told. So the header is waited for behind its body. For a
  body that is on its way there is no such help, to receive it neither: `is_waiting` tells who is
  left in such a wait, and behind it nobody gets a message.
- A wait that times out closes the pair for good. In an epoch `receive` has no limit; `abort` uses
  the same fact to break every wait at once (the process group's own ``abort`` does nothing).
- Its stores listen on every interface, or need a shared folder. Here each end has a store of its
  own that nobody else sees, and the one entry that the other needs travels over the authenticated
  control connection (`door`). gloo itself listens on the interface that it is told, from the
  handshake until the epoch ends, and keeps a descriptor for each stranger that connects: once both
  ends have met, the kernel drops what comes to its port (`.closed_port`), if it lets us say so.

It is not the default process group: the serving process has its own. What it moves is neither
encrypted nor signed; the network between the two hosts has to be trusted with K/V.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from tandemkv.cache_rank.protocol.errors import CacheRankLostError, ProtocolError, SettingsError

from .address import checked_interface
from .closed_port import drop_strangers, listeners_of

MAX_BODY_BYTES = 64 << 20
TOKEN_BYTES = 32
INFERENCE_END, CACHE_END = 0, 1
_LOG = logging.getLogger(__name__)
_dist: Any = torch.distributed  # its stubs know nothing of gloo's own interface
_MAGIC = 0x544B5632
_HEADER_TAG, _BODY_TAG, _NEVER_TAG, _TOKEN_TAG = 1, 2, 3, 4
_FOREVER = timedelta(days=365)
_TICK_S = 0.005
_KIND_BYTES = 8


class MeetingPoint:
    """One end that waits to be met: it listens, and knows how the other end finds it.

    It listens on one `interface`, an IP address. Both ends have met within `timeout_s`; one message
    is sent within `transfer_timeout_s`. Raises `SettingsError` if the machine has no such
    interface, `CacheRankLostError` if gloo fails otherwise.
    """

    def __init__(
        self, interface: str, end: int, *, timeout_s: float, transfer_timeout_s: float
    ) -> None:
        self._end, self._transfer_timeout_s = end, transfer_timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._store = _dist.HashStore()
        self._store.set_timeout(timedelta(seconds=timeout_s))
        options = _dist.ProcessGroupGloo._Options()
        options._timeout, options._threads = timedelta(seconds=timeout_s), 1
        name = checked_interface(interface)
        try:
            with listeners_of() as self._listeners:
                device = _dist.ProcessGroupGloo.create_device(hostname=name)
        except RuntimeError as error:
            raise SettingsError(
                f"interface {interface} cannot be used: {error}; name an address of this machine"
            ) from error
        options._devices = [device]
        self._group: Any = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(options,), daemon=True)
        self._thread.start()
        try:
            self.place: bytes = self._await_place()
        except BaseException:
            self.close()
            raise

    def meet(self, place: bytes, token: bytes) -> DataPlane:
        """Return the data plane to the other end, which is met at `place`.

        Both ends have the same `token` of `TOKEN_BYTES` from the control connection, and show it to
        each other: whoever connected instead has none. Raises `CacheRankLostError` if it is not
        there in time, `ProtocolError` if gloo does not write places so, for it would end the
        process by reading this one; or if somebody else was met.
        """
        if len(place) != len(self.place) or place[:_KIND_BYTES] != self.place[:_KIND_BYTES]:
            raise ProtocolError(f"a place of {len(place)} bytes is none of this version of gloo")
        self._store.set(_key(1 - self._end), place)
        self._thread.join()
        if self._group is None:
            raise CacheRankLostError(f"the two hosts do not meet for K/V: {self._error}")
        group, self._group = self._group, None
        self._recognise(group, token)
        try:
            drop_strangers(self._listeners)
        except OSError as error:
            _LOG.warning(
                "the port for K/V stays open to strangers, each of whom takes a descriptor: this "
                "kernel takes no filter on a socket from this process (%s)",
                error.strerror,
            )
        return DataPlane(group, 1 - self._end, self._store, timeout_s=self._transfer_timeout_s)

    def close(self) -> None:
        """Give up, unmet; gloo stops to listen within `timeout_s`. Idempotent."""
        self._group = None

    def _recognise(self, group: Any, token: bytes) -> None:
        ours = torch.frombuffer(bytearray(token), dtype=torch.uint8)
        theirs, peer = torch.zeros(TOKEN_BYTES, dtype=torch.uint8), 1 - self._end
        try:
            works = (
                group.recv([theirs], peer, _TOKEN_TAG),
                group.send([ours], peer, _TOKEN_TAG),
            )
            for work in works:
                work.wait(timedelta(seconds=max(0.1, self._deadline - time.monotonic())))
        except RuntimeError as error:
            raise CacheRankLostError(f"the two hosts do not meet for K/V: {error}") from error
        if not hmac.compare_digest(bytes(theirs.tolist()), token):
            raise ProtocolError("another end was met than the one that control speaks to")

    def _run(self, options: Any) -> None:
        try:
            self._group = _dist.ProcessGroupGloo(self._store, self._end, 2, options)
        except RuntimeError as error:
            self._error = error

    def _await_place(self) -> bytes:
        key = _key(self._end)
        while self._thread.is_alive() and time.monotonic() < self._deadline:
            if key in self._store.list_keys():
                return bytes(self._store.get(key))
            time.sleep(_TICK_S)
        raise CacheRankLostError(f"gloo does not listen: {self._error}")


class DataPlane:
    """Messages in both directions, each in order. One thread may send and another one receive.

    Attributes
    ----------
    breaks_with : list of Callable
        Called by the first `abort`, with its reason: what else the two hosts share ends then, too.
    """

    def __init__(self, group: Any, peer: int, store: Any, *, timeout_s: float) -> None:
        self._group, self._peer, self._store = group, peer, store
        self._timeout = timedelta(seconds=timeout_s)
        self._sent, self._received = torch.zeros(3, dtype=torch.int64), torch.zeros(3).long()
        self._num_received = 0
        self._waiting: set[threading.Thread] = set()
        self._reason = ""
        self.breaks_with: list[Callable[[str], None]] = []
        self.bytes_sent = self.bytes_received = 0

    def send(self, body: torch.Tensor) -> None:
        """Send ``body [n]`` uint8, 1 to `MAX_BODY_BYTES` bytes; returns once the other end has it.

        Raises `CacheRankLostError` if the other end is gone, or does not read.
        """
        if body.dtype != torch.uint8 or not 0 < body.numel() <= MAX_BODY_BYTES:
            raise ValueError(
                f"body {body.dtype}{tuple(body.shape)}: at most {MAX_BODY_BYTES} bytes"
            )
        self._sent[0], self._sent[2] = _MAGIC, body.numel()
        self._sent[1] += 1

        def post(group: Any) -> list[Any]:
            header = group.send([self._sent], self._peer, _HEADER_TAG)
            return [group.send([body], self._peer, _BODY_TAG), header]

        self._do(post, self._timeout)
        self.bytes_sent += body.numel()

    def receive(self, limit_s: float | None = None) -> torch.Tensor:
        """Return the next message, ``[n]`` uint8; waits `limit_s` for it, by default for ever.

        Raises `CacheRankLostError` if the other end is gone, or silent for `limit_s`, or `abort`
        was called; `ProtocolError` if what comes is no message; the pair is broken then.
        """
        header = self._received
        limit = _FOREVER if limit_s is None else timedelta(seconds=limit_s)
        self._do(lambda group: [group.recv([header], self._peer, _HEADER_TAG)], limit)
        magic, number, size = header.tolist()
        self._num_received += 1
        if magic != _MAGIC or number != self._num_received or not 0 < size <= MAX_BODY_BYTES:
            self.abort("the other end does not speak our protocol")
            raise ProtocolError(f"message {number} of {size} bytes is out of order or bounds")
        body = torch.empty(size, dtype=torch.uint8)
        self._do(lambda group: [group.recv([body], self._peer, _BODY_TAG)], self._timeout)
        self.bytes_received += size
        return body

    def abort(self, reason: str) -> None:
        """Break what is under way, and all that is to come. Any thread may call it; idempotent."""
        self._reason = self._reason or reason
        others, self.breaks_with = self.breaks_with, []
        for break_it in others:
            try:
                break_it(self._reason)
            except RuntimeError as error:  # the rest must not be left waiting
                _LOG.warning("what breaks with the data plane cannot be broken: %s", error)
        group = self._group
        if group is not None:
            with contextlib.suppress(RuntimeError):
                never = group.recv([torch.empty(1, dtype=torch.uint8)], self._peer, _NEVER_TAG)
                never.wait(timedelta(milliseconds=1))

    def is_waiting(self, thread: threading.Thread) -> bool:
        """Whether `thread` is in `send` or `receive`."""
        return thread in self._waiting

    def close(self) -> None:
        """Release it, once no thread uses it any more but those that wait in vain. Idempotent."""
        self.abort("the data plane was closed")
        self._group = self._store = None

    def _do(self, post: Callable[[Any], list[Any]], timeout: timedelta) -> None:
        group = self._group
        if group is None or self._reason:
            raise CacheRankLostError(self._reason or "the data plane was closed")
        thread = threading.current_thread()
        self._waiting.add(thread)
        try:
            for work in post(group):
                work.wait(timeout)
        except RuntimeError as error:
            raise CacheRankLostError(
                self._reason or f"the other host is gone, or does not read: {error}"
            ) from error
        finally:
            self._waiting.discard(thread)
        if self._reason:  # the memory may be another epoch's by now
            raise CacheRankLostError(self._reason)


def _key(end: int) -> str:
    return f"0/{end}"  # gloo's name of a rank's place in its first context
