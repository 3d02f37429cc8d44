# SPDX-License-Identifier: Apache-2.0
"""SGLang over several hosts: where they meet, and how a launch asks the part that is on its own."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import psutil

from tandemkv.cache_rank.protocol.errors import CacheRankError, SettingsError
from tandemkv.cache_rank.protocol.heartbeat import request_status
from tandemkv.cache_rank.protocol.message.address import LinkAddress
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.server.checks.ports import choose_port, why_taken

from .liveness import Pulse
from .probes import ServerState

if TYPE_CHECKING:
    from tandemkv.server.settings.launch_settings import ServeSettings

LOOPBACK = "lo"
INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
AGENT_STORE_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"
_KEY = "tandemkv/dist-init-addr"
_STATUS_TIMEOUT_S = 2.0


def interface_to_nodes(settings: ServeSettings) -> str:
    """Return the network interface over which SGLang's processes exchange sums.

    That of loopback if all are on this host. Raises `SettingsError` if no interface leads to host
    0.
    """
    address = settings.nodes_address
    if address is None:
        return LOOPBACK
    try:
        own = _resolved(address).own_host()
    except CacheRankError as error:
        raise SettingsError(
            f"dist_init_addr={address}: {error}; give an address of host 0 that this one reaches"
        ) from error
    if ipaddress.ip_address(own).is_loopback:
        return LOOPBACK
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == own for each in addresses):
            return name
    raise SettingsError(
        f"dist_init_addr={address}: no interface here has {own}, from which it is "
        f"reached; name one with the variable {INTERFACE_VARIABLE}"
    )


def check_meeting_place(settings: ServeSettings) -> None:
    """Refuse an address at which host 0 cannot listen, or that no way leads to.

    So is one that there is no use for. Raises `SettingsError`, with what to do.
    """
    address = settings.nodes_address
    if address is None:
        if settings.node_rank or settings.dist_init_addr is not None:
            raise SettingsError(
                f"node_rank={settings.node_rank}, dist_init_addr={settings.dist_init_addr}: these "
                "are for several hosts; add --nnodes, or leave them out"
            )
        return
    if INTERFACE_VARIABLE not in os.environ:
        interface_to_nodes(settings)
    if settings.node_rank:
        return
    where = _resolved(address)
    name = LinkAddress.parse_node(address).host
    if ipaddress.ip_address(where.host).is_loopback and name not in ("localhost", where.host):
        raise SettingsError(
            f"dist_init_addr={address}: {name} is {where.host} here, which no other host reaches "
            "(/etc/hosts says so, as a rule); give the IP address of this host"
        )
    try:
        error = why_taken(where.host, where.port)
    except SettingsError as not_here:
        raise SettingsError(
            f"dist_init_addr={address}: {where.host} is no address of this machine, which is host "
            "0; give one of its addresses that the other hosts reach, or --node-rank if this is "
            "another host"
        ) from not_here
    if error is not None:
        raise SettingsError(
            f"dist_init_addr={address} cannot be used on host 0 "
            f"({error.strerror}); give an address of this machine and a port that is free here"
        )


def _resolved(text: str) -> LinkAddress:
    try:
        return LinkAddress.parse_node(text).resolved()
    except CacheRankError as error:
        raise SettingsError(f"dist_init_addr={text}: {error}") from error


def address_of_torchrun(environ: Mapping[str, str], *, is_first: bool, timeout_s: float) -> str:
    """Return where SGLang's processes meet that torchrun has started, as ``HOST:PORT``.

    Its own address, but for the port where its store listens: the first process draws another, and
    the others read that in the store. Raises `SettingsError` if torchrun names none, or its store
    does not answer.
    """
    try:
        host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise SettingsError(
            f"torchrun sets MASTER_ADDR and MASTER_PORT, and here {error} is wrong or missing; add "
            "--dist-init-addr HOST:PORT"
        ) from error
    if environ.get(AGENT_STORE_VARIABLE) != "True":
        return LinkAddress(host, port).as_node
    from tandemkv.cache_rank.protocol.node_store import agree

    proposal = LinkAddress(host, choose_port(host, 0)).as_node if is_first else None
    try:
        return agree(LinkAddress(host, port), _KEY, proposal, timeout_s)
    except (OSError, CacheRankError, RuntimeError) as error:  # torch's errors are of the last kind
        raise SettingsError(
            f"torchrun's store at {host}:{port} does not tell where to meet ({error}); add "
            "--dist-init-addr HOST:PORT to the commands of all nodes"
        ) from error


def scheduler_state(run_dir: RunDir) -> ServerState:
    """Ask the scheduler of a host whose SGLang has no requests of its own; see `server_state`."""
    try:
        reply = request_status(run_dir.inference_socket, _STATUS_TIMEOUT_S)
    except CacheRankError as error:
        return ServerState(reachable=False, ready=False, detail=str(error))
    return ServerState(reachable=True, ready=reply.ready, detail="waiting for the other nodes")


def scheduler_pulse(run_dir: RunDir) -> Pulse:
    """Ask that scheduler whether its work moves; raises `CacheRankError` if it does not answer."""
    reply = request_status(run_dir.inference_socket, _STATUS_TIMEOUT_S)
    return Pulse(is_ready=reply.ready, stalled_s=reply.values["stalled_s"])
