# SPDX-License-Identifier: Apache-2.0
"""What torchrun says to a process, and which role follows from it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Self

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.run_dir import usual_place

from .cache_rank_launch import SplitLaunch
from .settings import ServeSettings

COMMAND = "torchrun --standalone --nproc-per-node N -m tandemkv.server.torchrun MODEL"
SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_SHUTDOWN_S = 30.0
"""From torchrun's signal to its SIGKILL, where its own setting does not say otherwise."""
_MARGIN_S = 10.0
"""Of that, for the processes to end once the requests are through."""

_OF_THE_GROUP = frozenset(
    {
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
        "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    }
)  # fmt: skip
_OF_THE_AGENT = "TORCHELASTIC_"


class Role(Enum):
    """What a process of torchrun does."""

    INFERENCE = "inference rank"
    CACHE = "cache rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A process that torchrun started, by what it tells it: see its own documentation.

    `agent` tells the torchrun process of this host, and its start, from all others.
    """

    rank: int
    local_rank: int
    local_world_size: int
    num_nodes: int
    run_id: str
    restart_count: int
    agent: str

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], agent: str) -> Self:
        """Read what torchrun has set.

        Raises
        ------
        SettingsError
            If something is missing, or no number: this process was not started by torchrun.
        """
        try:
            return cls(
                rank=int(environ["RANK"]),
                local_rank=int(environ["LOCAL_RANK"]),
                local_world_size=int(environ["LOCAL_WORLD_SIZE"]),
                num_nodes=int(environ["GROUP_WORLD_SIZE"]),
                run_id=environ["TORCHELASTIC_RUN_ID"],
                restart_count=int(environ["TORCHELASTIC_RESTART_COUNT"]),
                agent=agent,
            )
        except (KeyError, ValueError) as error:
            raise SettingsError(
                f"torchrun sets RANK, LOCAL_RANK and others, and here {error} is wrong or missing; "
                f"start it as {COMMAND}, or use `tandemkv serve MODEL`, which needs no torchrun"
            ) from error

    @property
    def role(self) -> Role:
        """The first process is the inference rank; each other one is a cache rank."""
        return Role.CACHE if self.rank else Role.INFERENCE

    @property
    def cache_rank(self) -> int:
        """Number of the cache rank that a process of this role is."""
        return self.rank - 1

    @property
    def launch(self) -> SplitLaunch:
        """Where the processes of this host meet: what follows is the same for all of them.

        A name, not torchrun's store, which exists on a TCP port only, and not for every
        rendezvous. The agent is in it: two launches may have one id (torchrun's default is
        ``none``), and one that was restarted must not find what the last one left.
        """
        parts = (str(os.geteuid()), self.run_id, str(self.restart_count), self.agent)
        launch_id = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
        return SplitLaunch(run_dir=usual_place() / f"tandemkv-{launch_id}", launch_id=launch_id)


def agent_of(pid: int) -> str:
    """Return process `pid` and when it started, which together nobody else has on this host."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:  # it is gone, and so will we be
        return str(pid)
    started = stat.rpartition(")")[2].split()[19]
    return f"{pid}.{started}"


def forget_torchrun(environ: MutableMapping[str, str]) -> None:
    """Remove what torchrun says of its group, so that no child takes it for its own.

    torch's rendezvous would connect to torchrun's store where SGLang means its own, and libraries
    take RANK, WORLD_SIZE and LOCAL_RANK for places in SGLang's tensor-parallel group. What is for
    any torch program (OMP_NUM_THREADS) stays.
    """
    for name in list(environ):
        if name in _OF_THE_GROUP or name.startswith(_OF_THE_AGENT):
            del environ[name]


def open_cache_ranks(settings: ServeSettings, worker: Worker) -> int | None:
    """Return ``--cache-ranks`` that the processes imply; None if something else decides it."""
    if settings.cache_ranks is not None or settings.transport is not None:
        return None
    implied = worker.local_world_size - 1
    # With --tp more are refused, see `check_processes`.
    return implied if settings.tensor_parallel == 1 or not implied else None


def check_processes(settings: ServeSettings, worker: Worker) -> None:
    """Refuse processes that no role is for, or that are missing.

    Raises
    ------
    SettingsError
        With how torchrun is to be called.
    """
    if worker.num_nodes > 1:
        raise SettingsError(
            f"torchrun --nnodes {worker.num_nodes}: several nodes are not available in this "
            "version: inference rank and cache rank meet in memory of one host, and the GPUs of "
            "--tp are those of one host; start torchrun --standalone on each node, which makes "
            "replicas for a router"
        )
    if worker.local_rank != worker.rank:
        raise SettingsError(
            "torchrun --virtual-local-rank gives each process another GPU as its first, and both "
            "ranks have to see the same GPUs; leave it out"
        )
    if settings.tensor_parallel > 1 and settings.wished_link in (None, "shared"):
        raise SettingsError(
            f"tensor_parallel={settings.tensor_parallel} with cache ranks in processes of their "
            "own is not available under torchrun in this version; use `tandemkv serve`, which "
            "starts all of them, or --cache-ranks 0 with --nproc-per-node 1"
        )
    if settings.wished_link == "message":
        raise SettingsError(
            "transport=message is not available under torchrun in this version; use `tandemkv "
            "serve`, which starts what it needs"
        )
    needed = 1 + settings.rank_settings.placement.num_cache_ranks
    if worker.local_world_size != needed:
        roles = "the inference rank"
        if needed > 1:
            roles += " and the cache rank" + ("s" if needed > 2 else "")
        raise SettingsError(
            f"torchrun started {worker.local_world_size} processes, and these settings have "
            f"{needed}: {roles} (SGLang starts those of --tp itself); use --nproc-per-node "
            f"{needed}"
        )


def drain_within(settings: ServeSettings, environ: Mapping[str, str]) -> tuple[ServeSettings, str]:
    """Return settings whose drain ends before torchrun kills, and what there is to say of it.

    Where `drain_timeout_s` is left open it is shortened; where it was given it stays: torchrun may
    have been told to wait with ``--shutdown-timeout``, which nobody but itself can see.
    """
    try:
        limit_s = float(environ.get(SHUTDOWN_VARIABLE, _SHUTDOWN_S))
    except ValueError:
        limit_s = _SHUTDOWN_S
    longest_s = max(0.0, limit_s - _MARGIN_S)
    if settings.drain_timeout_s <= longest_s:
        return settings, ""
    if "drain_timeout_s" not in settings.model_fields_set:
        said = (
            f"requests under way get {longest_s:g} s after a signal, for torchrun kills after "
            f"{limit_s:g} s: raise {SHUTDOWN_VARIABLE} for more"
        )
        return settings.model_copy(update={"drain_timeout_s": longest_s}), said
    needed_s = settings.drain_timeout_s + _MARGIN_S
    return settings, (
        f"--drain-timeout-s {settings.drain_timeout_s:g}: torchrun kills {limit_s:g} s after a "
        f"signal, unless it has --shutdown-timeout {needed_s:g} or {SHUTDOWN_VARIABLE}={needed_s:g}"
    )
