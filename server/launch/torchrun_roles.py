# SPDX-License-Identifier: Apache-2.0
"""What torchrun says to a process, and which role follows from it."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.message.address import LinkAddress
from tandemkv.cache_rank.protocol.run_dir import usual_place
from tandemkv.server.settings.launch_settings import ServeSettings
from tandemkv.server.settings.sources import Sourced

from .cache_rank_launch import SplitLaunch
from .nodes import address_of_torchrun

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A process that torchrun started, by what it tells it: see its own documentation.

    `agent` tells the torchrun process of this host, and its start, from all others.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    run_id: str
    restart_count: int
    agent: str

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], agent: str) -> Self:
        """Read what torchrun has set.

        Raises `SettingsError` if something is missing, or no number: this process was not started
        by torchrun.
        """
        try:
            return cls(
                rank=int(environ["RANK"]),
                world_size=int(environ["WORLD_SIZE"]),
                local_rank=int(environ["LOCAL_RANK"]),
                local_world_size=int(environ["LOCAL_WORLD_SIZE"]),
                node_rank=int(environ["GROUP_RANK"]),
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

    def place(self, settings: ServeSettings) -> int:
        """Return the number of this process, of those that have an inference rank together.

        That is the first one, and each other one has a cache rank. They are all processes, or by
        link shared those of a node.
        """
        return self.rank if settings.wished_link == "message" else self.local_rank

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

    def cache_rank_dir(self, given: Path | None) -> Path:
        """Return the run directory of a cache rank that no other process enters (link message).

        Such cache ranks have the numbers of all processes, but for the first.

        It lies beside `given`, the setting, or beside where the processes of this host would meet:
        the one that holds it removes it without a look at the others.
        """
        beside = (given or self.launch.run_dir).absolute()
        return beside.with_name(f"{beside.name}-cache{self.rank - 1}")


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
    for name in [x for x in environ if x in _OF_THE_GROUP or x.startswith(_OF_THE_AGENT)]:
        del environ[name]


def open_cache_ranks(settings: ServeSettings, worker: Worker) -> int | None:
    """Return ``--cache-ranks`` that the processes imply; None if something else decides it."""
    if settings.cache_ranks is not None or settings.wished_link is not None:
        return None
    implied = worker.world_size - worker.num_nodes
    tp_size = settings.tensor_parallel
    # Others neither divide --tp nor are a multiple of it: the number of processes is refused.
    return None if implied % tp_size and tp_size % implied else implied


def check_processes(settings: ServeSettings, worker: Worker) -> None:
    """Refuse processes that no role is for, or that are missing.

    Raises `SettingsError`, with how torchrun is to be called.
    """
    if settings.wished_link == "message":
        _check_processes_of_addresses(settings, worker)
    else:
        _check_processes_here(settings, worker)


def _check_processes_of_addresses(settings: ServeSettings, worker: Worker) -> None:
    """Refuse processes that are not one for each address, and the first."""
    addresses = settings.cache_rank_addresses
    if not addresses:
        raise SettingsError(
            "transport=message under torchrun: each process has to know where the cache ranks "
            "listen, and the keys, before any of them starts; use --cache-rank-address with a "
            "tcp://IP:PORT for each process but the first, and --link-keys, or `tandemkv serve`, "
            "which makes both for one host"
        )
    for address in addresses:
        LinkAddress.parse(address)  # its process listens there: a name will not do
    needed = 1 + len(addresses)
    if worker.world_size != needed:
        raise SettingsError(
            f"torchrun started {worker.world_size} processes on {worker.num_nodes} nodes, and "
            f"these settings have {needed}: the inference rank, and a cache rank for each of "
            f"{len(addresses)} addresses in --cache-rank-address; use --nnodes {needed} "
            f"--nproc-per-node 1, or others that make {needed} in all, or as many addresses"
        )


def _check_processes_here(settings: ServeSettings, worker: Worker) -> None:
    """Refuse processes that do not meet on their host, as many on each."""
    nodes, here = worker.num_nodes, worker.local_world_size
    if worker.world_size != nodes * here:
        raise SettingsError(
            f"torchrun started {worker.world_size} processes on {nodes} nodes, and {here} of them "
            "here: each node has as many; use the same --nproc-per-node on all"
        )
    if worker.local_rank != worker.rank - worker.node_rank * here:
        raise SettingsError(
            "torchrun --virtual-local-rank gives each process another GPU as its first, and both "
            "ranks have to see the same GPUs; leave it out"
        )
    if settings.tensor_parallel % nodes:
        raise SettingsError(
            f"torchrun --nnodes {nodes} with --tp {settings.tensor_parallel}: each node has "
            f"as many of SGLang's processes, and cache ranks for them; use --tp {nodes}, or "
            "--cache-rank-address and --link-keys for cache ranks alone on other nodes, or "
            "torchrun --standalone on each node, which makes replicas for a router"
        )
    num_cache_ranks = settings.rank_settings.placement.num_cache_ranks
    if num_cache_ranks % nodes:
        raise SettingsError(
            f"torchrun --nnodes {nodes} with --cache-ranks {num_cache_ranks}: each node has as "
            f"many; use --cache-ranks {settings.tensor_parallel}"
        )
    needed = 1 + num_cache_ranks // nodes
    if here != needed:
        roles, of_each = "the inference rank", " on each node" if nodes > 1 else ""
        if needed > 1:
            roles += " and the cache rank" + ("s" if needed > 2 else "")
        raise SettingsError(
            f"torchrun started {here} processes{of_each}, and these settings have "
            f"{needed}: {roles} (SGLang starts those of --tp itself); use --nproc-per-node "
            f"{needed}"
        )


def nodes_of(
    settings: ServeSettings, worker: Worker, environ: Mapping[str, str]
) -> dict[str, Sourced]:
    """Return the settings of SGLang over several nodes that torchrun decides.

    Raises `SettingsError` if it does not tell where SGLang's processes are to meet.
    """
    found: dict[str, object] = {"nnodes": worker.num_nodes, "node_rank": worker.node_rank}
    if settings.dist_init_addr is None:
        found["dist_init_addr"] = address_of_torchrun(
            environ, is_first=worker.node_rank == 0, timeout_s=settings.start_timeout_s
        )
    return {name: Sourced(value, "torchrun") for name, value in found.items()}


def check_is_here(address: str, worker: Worker) -> None:
    """Refuse an address that is not one of this host's: torchrun has numbered the nodes otherwise.

    Raises `SettingsError`, with what decides the numbers.
    """
    host = LinkAddress.parse(address).host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise SettingsError(
                f"cache_rank_address={address} is for rank {worker.rank} of torchrun, and its host "
                f"does not have {host} ({error.strerror}); give the addresses in the order of "
                "ranks: that of --node-rank, or with --rdzv-backend c10d the alphabetical one of "
                "--local-addr or the names of the hosts, of which the first is the inference rank's"
            ) from error


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
