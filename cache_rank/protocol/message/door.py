# SPDX-License-Identifier: Apache-2.0
"""Control between two hosts: zmq over TCP, encrypted and authenticated with CURVE.

`Door` is the cache rank's end, on one interface. Who has no key of the allow-list, or comes from an
address that is not on it, gets no further than the handshake of CURVE, so nothing that a stranger
sends is decoded. `Caller` is the inference rank's end; it says in words why it was not let in.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection

import zmq
from zmq.auth.thread import ThreadAuthenticator

from tandemkv.cache_rank.protocol.errors import (
    CacheRankError,
    CacheRankLostError,
    HandshakeRefusedError,
    ProtocolError,
)
from tandemkv.cache_rank.protocol.ipc import ZAP_DOMAIN, Dealer, Router, making_socket, readable
from tandemkv.cache_rank.protocol.messages import HeartbeatReply, Refused

from .address import LinkAddress
from .keys import KeyPair
from .letters import CODEC, Admitted, Knock, Letter

_LOG = logging.getLogger(__name__)
_LINGER_MS = 50
_SLICE_S = 0.1
_TRY_S, _PAUSE_S = 5.0, 0.5
_REFUSALS = (
    int(zmq.Event.HANDSHAKE_FAILED_AUTH)
    | int(zmq.Event.HANDSHAKE_FAILED_PROTOCOL)
    | int(zmq.Event.HANDSHAKE_FAILED_NO_DETAIL)
)


class Door(Router[Letter]):
    """The cache rank's end. Used by one thread.

    It listens at `address` and nowhere else. `allowed` has the public keys of who may connect, and
    `hosts` the IP addresses that they may come from; none: from any. Raises
    `CacheRankError` if the address cannot be bound.
    """

    def __init__(
        self,
        address: LinkAddress,
        keys: KeyPair,
        allowed: Collection[bytes],
        hosts: Collection[str] = (),
    ) -> None:
        super().__init__(CODEC)
        self._allowed = frozenset(allowed)
        self._authenticator = ThreadAuthenticator(self._context, log=_LOG)
        self._authenticator.start()
        if hosts:
            self._authenticator.allow(*hosts)
        self._authenticator.configure_curve_callback(
            domain=ZAP_DOMAIN.decode(), credentials_provider=self
        )
        self._socket.setsockopt(zmq.IPV6, int(address.is_ipv6))
        self._socket.curve_publickey, self._socket.curve_secretkey = keys.public, keys.secret
        self._socket.curve_server = True
        try:
            self._socket.bind(str(address))
        except zmq.ZMQError as error:
            self.close()
            raise CacheRankError(
                f"address={address} cannot be bound: {error}; it must be one of this machine's, "
                "with a free port"
            ) from error
        self.address = LinkAddress.parse(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether the owner of `key` is let in; zmq's authenticator asks."""
        del domain
        is_allowed = key in self._allowed
        if not is_allowed:
            _LOG.warning("refused: key %s is not on the allow-list", key.decode("ascii", "replace"))
        return is_allowed

    def close(self) -> None:
        """Close. Idempotent."""
        if self._context.closed:
            return
        self._socket.close(linger=_LINGER_MS)
        self._authenticator.stop()
        self._context.term()


class Caller(Dealer[Letter]):
    """The inference rank's end, for one epoch. Used by one thread.

    `keys` are our own, `server` is the cache rank's public key. Raises `CacheRankError` if there is
    no socket to be had.
    """

    def __init__(self, address: LinkAddress, keys: KeyPair, server: bytes) -> None:
        self.address = address
        with making_socket(address):
            super().__init__(CODEC, address)
            try:
                self._connect(address, keys, server)
            except BaseException:
                self._context.destroy(linger=0)
                raise

    def _connect(self, address: LinkAddress, keys: KeyPair, server: bytes) -> None:
        self._socket.setsockopt(zmq.IPV6, int(address.is_ipv6))
        self._socket.curve_publickey, self._socket.curve_secretkey = keys.public, keys.secret
        self._socket.curve_serverkey = server
        self._events = self._watch(int(zmq.Event.CONNECTED) | _REFUSALS)
        self._is_connected = False
        self._socket.connect(str(address))

    def enter(self, timeout_s: float) -> None:
        """Wait until we are let in; asks for nothing.

        Raises `HandshakeRefusedError` if we are not, `CacheRankLostError` if nobody answers within
        `timeout_s`, with what is known of the reason.
        """
        deadline = time.monotonic() + timeout_s
        while not self._is_in:
            if time.monotonic() >= deadline:
                raise CacheRankLostError(f"{self.address}: {self._why(timeout_s)}")
            readable(self._events, min(deadline, time.monotonic() + _SLICE_S))
            self._look()

    def request(self, letter: Letter, timeout_s: float) -> Letter:
        """Send `letter` and return the answer.

        Raises `HandshakeRefusedError` if we are not let in, or what we ask for is refused;
        `CacheRankLostError` if there is no answer within `timeout_s`, with what is known of the
        reason, or the process that had let us in ends before; `ProtocolError` if it is malformed.
        """
        self.send(letter)
        return self._answer(timeout_s)

    def knock(
        self, letter: Knock, timeout_s: float, meanwhile: Callable[[], None] | None = None
    ) -> Admitted:
        """Ask for an epoch, and return the welcome to it; `meanwhile` is called while it waits.

        Raises as `request`, and `ProtocolError` if the answer is another one.
        """
        deadline = time.monotonic() + timeout_s
        self.send(letter)
        reply = self._answer(timeout_s, meanwhile)
        while isinstance(reply, HeartbeatReply):  # whether we are still there
            reply = self._answer(deadline - time.monotonic(), meanwhile)
        if not isinstance(reply, Admitted):
            raise ProtocolError(f"Knock was answered with {type(reply).__name__}")
        return reply

    def _answer(self, timeout_s: float, meanwhile: Callable[[], None] | None = None) -> Letter:
        reply = self.receive(timeout_s, meanwhile)
        if reply is None:
            raise CacheRankLostError(f"{self.address}: {self._why(timeout_s)}")
        if isinstance(reply, Refused):
            raise HandshakeRefusedError(reply.field, reply.message)
        return reply

    def receive(
        self, timeout_s: float, meanwhile: Callable[[], None] | None = None
    ) -> Letter | None:
        """Return the next letter, or None after `timeout_s`; `meanwhile` is called as by `knock`.

        Raises `HandshakeRefusedError` if we are not let in, `CacheRankLostError` if the process
        that had let us in has ended, and `ProtocolError` if it is malformed.
        """
        deadline = time.monotonic() + timeout_s
        while not readable(self._socket, min(deadline, time.monotonic() + _SLICE_S)):
            self._look()
            if self._was_cut_off or time.monotonic() >= deadline:
                break
            if meanwhile is not None:
                meanwhile()
        letter = super().receive(0.0)  # what it said before it ended has arrived by then
        if letter is None and self._was_cut_off:
            raise CacheRankLostError(f"the cache rank at {self.address} has hung up; see its log")
        return letter

    def _on_event(self, event: int) -> None:
        self._is_connected = True
        if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
            raise HandshakeRefusedError(
                "key",
                f"the cache rank at {self.address} does not let us in: our key or our "
                "address is not on its allow-list; copy inference_rank.key into its folder "
                "of keys, and name our address there",
            )

    def _why(self, timeout_s: float) -> str:
        within = f"within {timeout_s:g} s"
        if self._is_in:
            return f"the cache rank did not answer {within}"
        if self._is_connected:
            return (
                f"no CURVE handshake {within}: what listens there is not the cache rank whose key "
                "is in cache_rank.key"
            )
        return f"nobody listens there ({within}); is `tandemkv cache-rank` running on that host?"


def await_entry(address: LinkAddress, keys: KeyPair, server: bytes, stop: threading.Event) -> None:
    """Return once the cache rank lets us in, or `stop` is set; the log says what it waits for.

    Parameters are those of `Caller`; a name in `address` is looked up for each try. Raises
    `HandshakeRefusedError` if we are not let in.
    """
    told = ""
    while not stop.is_set():
        with contextlib.ExitStack() as tried:
            try:
                caller = Caller(address.resolved(), keys, server)
                tried.callback(caller.close)
                caller.enter(_TRY_S)
            except CacheRankLostError as error:
                if str(error) != told:
                    told = str(error)
                    _LOG.warning("waiting for the cache rank: %s", told)
            else:
                return
        stop.wait(_PAUSE_S)
