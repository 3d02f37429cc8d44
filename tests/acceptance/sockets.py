# SPDX-License-Identifier: Apache-2.0
"""Every listening socket of a server's processes."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import psutil
from rank_servers import Server


def listening(server: Server) -> list[tuple[str, str, int]]:
    """(process name, address, port) of every TCP listener below the server's process."""
    found = []
    for process in server.processes():
        found += [
            (process.name(), connection.laddr.ip, connection.laddr.port)
            for connection in process.net_connections(kind="tcp")
            if connection.status == psutil.CONN_LISTEN
        ]
    return sorted(found)


def of_cache_rank(server: Server) -> list[tuple[str, int]]:
    """TCP listeners of the cache rank alone."""
    process = psutil.Process(server.cache_rank_pid())
    return [
        (connection.laddr.ip, connection.laddr.port)
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    ]


def is_loopback(address: str) -> bool:
    """Whether only this host can reach the address."""
    return ipaddress.ip_address(address).is_loopback


def unix_sockets(run_dir: Path) -> list[str]:
    """Names of the sockets in the run directory."""
    return sorted(path.name for path in run_dir.iterdir() if path.is_socket())
