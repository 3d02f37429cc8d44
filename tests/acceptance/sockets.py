# SPDX-License-Identifier: Apache-2.0
"""Every listening socket of a server's processes, read from /proc."""

from __future__ import annotations

import contextlib
import ipaddress
from pathlib import Path
from typing import NamedTuple

import psutil
from rank_servers import Server

_TCP_LISTEN = "0A"
_UNIX_LISTEN = 0x10000  # __SO_ACCEPTCON
_RANK_SOCKETS = {
    "control.sock": "control messages of the inference rank",
    "heartbeat.sock": "heartbeats and status of the cache rank",
    "memory.sock": "descriptors of the memory that both ranks map",
    "holder.sock": "descriptors of that memory, which the launcher keeps",
    "inference.sock": "status of the inference rank",
}


class Listener(NamedTuple):
    """A socket that waits for connections (udp: that is bound)."""

    process: str
    kind: str
    address: str
    port: int

    @property
    def is_local(self) -> bool:
        """Whether only this host can reach it."""
        return self.kind == "unix" or ipaddress.ip_address(self.address).is_loopback


def listening(server: Server) -> list[Listener]:
    """Listeners of the server's process and of all below it."""
    found = set()
    for process in server.processes():
        with contextlib.suppress(psutil.Error, OSError):
            name, inodes = _role(process), _inodes(process.pid)
            found |= {Listener(name, *rest) for inode, *rest in _table() if inode in inodes}
    return sorted(found)


def purpose(listener: Listener, server: Server) -> str | None:
    """What a listener is for; None if nobody knows it."""
    if listener.kind == "unix":
        path = Path(listener.address)
        if server.run_dir is not None and path.parent == server.run_dir:
            return _RANK_SOCKETS.get(path.name)
        if listener.process == "cache rank":
            return None
        return "zmq between SGLang's processes" if path.name.startswith("tmp") else None
    if listener.kind.startswith("udp") or not listener.is_local:
        return None
    if listener.port == int(server.url.rpartition(":")[2]):
        return "HTTP API" if listener.process == "SGLang" else None
    return None


def _role(process: psutil.Process) -> str:
    if process.name().startswith("sglang::"):
        return f"SGLang {process.name().removeprefix('sglang::').strip(' :')}"
    argv = process.cmdline()
    if "cache-rank" in argv:
        return "cache rank"
    if "sglang.launch_server" in argv:
        return "SGLang"
    if "serve" in argv or "tandemkv.server.torchrun" in argv:
        return "launcher"
    return " ".join(argv[:3])


def _inodes(pid: int) -> set[str]:
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(link.readlink())
            if target.startswith("socket:["):
                found.add(target[8:-1])
    return found


def _table() -> list[tuple[str, str, str, int]]:
    """(inode, kind, address, port) of all listeners of this host."""
    rows = []
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if kind.startswith("udp") or state == _TCP_LISTEN:
                address, port = local.split(":")
                rows.append((inode, kind, _address(address), int(port, 16)))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        parts = line.split(maxsplit=7)
        if int(parts[3], 16) & _UNIX_LISTEN:
            rows.append((parts[6], "unix", parts[7] if len(parts) > 7 else "", 0))
    return rows


def _address(text: str) -> str:
    words = [bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
