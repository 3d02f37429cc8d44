# SPDX-License-Identifier: Apache-2.0
"""TCP ports and addresses of the HTTP server."""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path
from typing import Any

from tandemkv.cache_rank.protocol.errors import SettingsError

_OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_DRAWN, _USUAL_FIRST_OUTGOING, _LAST_PORT = 20000, 32768, 65535
_MAX_DRAWS = 64


def choose_port(host: str, port: int) -> int:
    """Return `port` if it can be bound on `host`, or a free one if `port` is 0.

    The port is free when this returns; another process may still take it before SGLang does, then
    SGLang fails to start and its log says so. A free one is drawn from below those that the system
    gives to outgoing connections, which would take it in the minute that SGLang needs. Raises
    `SettingsError` if the port is taken or the address is not one of this machine's.
    """
    if port:
        error = why_taken(host, port)
        if error is None:
            return port
        raise SettingsError(
            f"port={port} on {host} cannot be used ({error.strerror}); stop the program that "
            "holds it, choose another --port, or --port 0 for any free one"
        ) from error
    last = _first_outgoing()
    for drawn in random.SystemRandom().sample(range(_FIRST_DRAWN, last), _MAX_DRAWS):
        if why_taken(host, drawn) is None:
            return drawn
    raise SettingsError(
        f"port=0: none of {_MAX_DRAWS} ports drawn from {_FIRST_DRAWN} to {last - 1} on {host} is "
        "free; name one with --port"
    )


def why_taken(host: str, port: int) -> OSError | None:
    """Return why `port` cannot be bound at every address of `host`, None if it can.

    As the server binds them: a name may have two, and one of IPv6 leaves IPv4 alone. Raises
    `SettingsError` if `host` is not this machine's.
    """
    try:
        infos = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )
    except OSError as error:
        raise SettingsError(f"host={host} cannot be resolved ({error.strerror})") from error
    found = (_why_not_bound(family, address, host) for family, *_, address in infos)
    return next(filter(None, found), None)


def _why_not_bound(family: int, address: Any, host: str) -> OSError | None:
    try:
        probe = socket.socket(family, socket.SOCK_STREAM)
    except OSError:  # a kernel without IPv6; the server passes over it
        return None
    with probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise SettingsError(
                    f"host={host} is no address of this machine; use 127.0.0.1"
                ) from error
            return error
    return None


def _first_outgoing() -> int:
    """Return the first port of outgoing connections."""
    try:
        first = int(_OUTGOING.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return _USUAL_FIRST_OUTGOING
    return first if first >= _FIRST_DRAWN + _MAX_DRAWS else _LAST_PORT


def server_url(host: str, port: int) -> str:
    """Return the address at which this machine reaches a server bound to `host`."""
    if host in ("0.0.0.0", ""):
        host = "127.0.0.1"
    elif host == "::":
        host = "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
