# SPDX-License-Identifier: Apache-2.0
"""TCP ports and addresses of the HTTP server."""

from __future__ import annotations

import errno
import socket

from tandemkv.cache_rank.protocol.errors import SettingsError


def choose_port(host: str, port: int) -> int:
    """Return `port` if it can be bound on `host`, or a free one if `port` is 0.

    The port is free when this returns; another process may still take it before SGLang does,
    then SGLang fails to start and its log says so.

    Raises
    ------
    SettingsError
        If the port is taken or the address is not one of this machine's.
    """
    try:
        infos = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )
    except OSError as error:
        raise SettingsError(f"host={host} cannot be resolved ({error.strerror})") from error
    family, kind, proto, _, address = infos[0]
    with socket.socket(family, kind, proto) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise SettingsError(
                    f"host={host} is no address of this machine; use 127.0.0.1"
                ) from error
            raise SettingsError(
                f"port={port} on {host} cannot be used ({error.strerror}); stop the program that "
                "holds it, choose another --port, or --port 0 for any free one"
            ) from error
        return int(probe.getsockname()[1])


def server_url(host: str, port: int) -> str:
    """Return the address at which this machine reaches a server bound to `host`."""
    if host in ("0.0.0.0", ""):
        host = "127.0.0.1"
    elif host == "::":
        host = "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
