# SPDX-License-Identifier: Apache-2.0
"""The processes of a server, by role, and what each holds."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import urllib.parse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.ipc import server_pid
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.server.launch.watchdog import shared_memory_of
from tandemkv.server.settings.launch_settings import is_loopback

LAUNCHER, CACHE_RANK, HTTP, SCHEDULER = "launcher", "cache rank", "SGLang", "scheduler"
_ROLES = {
    "sglang::scheduler": SCHEDULER,
    "sglang::detokenizer": "detokenizer",
    "cache-rank": CACHE_RANK,
    "sglang.launch_server": HTTP,
    "inference-rank": HTTP,
    "watchdog.py": "watchdog",
    "log_writer.py": "log writer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGauges:
    """What one process holds; `rss_mib` counts shared pages too, `private_mib` does not."""

    pid: int
    fds: int
    threads: int
    rss_mib: float
    private_mib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What all processes of a server hold at one moment.

    `log_writer` and the like may be there several times: a role has a list of processes.
    """

    time: float
    roles: dict[str, tuple[ProcessGauges, ...]]
    run_dir_files: tuple[str, ...]
    shared_memory: tuple[str, ...]


class ServerProcesses:
    """The processes below the launcher of a server.

    `root` is the process id of the launcher, or of SGLang's server if nobody launched it. Files of
    `run_dir` are counted.
    """

    def __init__(self, root: int, run_dir: Path | None) -> None:
        self.root = root
        self.run_dir = run_dir
        self._root = psutil.Process(root)

    @classmethod
    def listening_at(cls, url: str) -> ServerProcesses | None:
        """Return those of the server that listens at `url`; None if it is not on this host.

        Raises `SettingsError` if nobody whom we may look at listens there.
        """
        parts = urllib.parse.urlsplit(url)
        if not is_loopback(parts.hostname or ""):
            return None
        for connection in psutil.net_connections("tcp"):
            if connection.status != psutil.CONN_LISTEN or not connection.laddr:
                continue
            if connection.laddr.port == (parts.port or 80) and connection.pid:
                process = psutil.Process(connection.pid)
                parent = process.parent()
                is_launched = parent is not None and "serve" in parent.cmdline()
                root = parent.pid if is_launched and parent is not None else process.pid
                text = process.environ().get("TANDEMKV_RUN_DIR")
                return cls(root, Path(text) if text else None)
        raise SettingsError(f"url={url}: no process of this user listens there")

    def by_role(self) -> dict[str, list[psutil.Process]]:
        """Return the processes that run now."""
        found: dict[str, list[psutil.Process]] = {}
        with contextlib.suppress(psutil.Error):
            for process in (self._root, *self._root.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.setdefault(role_of(process), []).append(process)
        return found

    def pids(self) -> dict[str, int]:
        """Return the process id of each rank that runs."""
        ranks = (LAUNCHER, CACHE_RANK, HTTP, SCHEDULER)
        found = {role: some[0].pid for role, some in self.by_role().items() if role in ranks}
        if CACHE_RANK in found and self.run_dir is not None:  # another may stand by
            serving = server_pid(RunDir(self.run_dir).control_socket)
            found[CACHE_RANK] = serving or found[CACHE_RANK]
        return found

    def held(self) -> Held:
        """Return what all of them hold now."""
        by_role = self.by_role()
        groups = set[int]()
        for process in itertools.chain.from_iterable(by_role.values()):
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                if process.is_running():
                    groups.add(os.getpgid(process.pid))
        return Held(
            time=time.time(),
            roles={role: tuple(_gauges(some)) for role, some in sorted(by_role.items())},
            run_dir_files=tuple(files_below(self.run_dir)),
            shared_memory=tuple(sorted(shared_memory_of(groups))),
        )


def role_of(process: psutil.Process) -> str:
    """Return what a process of a server is."""
    text = " ".join(process.cmdline())
    usual = LAUNCHER if " serve" in text else "other"
    return next((role for part, role in _ROLES.items() if part in text), usual)


def _gauges(processes: Iterable[psutil.Process]) -> Iterable[ProcessGauges]:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            memory = process.memory_info()
            yield ProcessGauges(
                pid=process.pid,
                fds=process.num_fds(),
                threads=process.num_threads(),
                rss_mib=round(memory.rss / 2**20, 1),
                private_mib=round((memory.rss - memory.shared) / 2**20, 1),
            )


def files_below(folder: Path | None) -> list[str]:
    """Return all files below `folder`, relative to it."""
    if folder is None or not folder.is_dir():
        return []
    return [str(p.relative_to(folder)) for p in sorted(folder.rglob("*")) if not p.is_dir()]
