# SPDX-License-Identifier: Apache-2.0
"""Where the schedulers of one SGLang meet that are on several nodes: torch's store over TCP.

The first scheduler keeps it while it lives. It listens on the address that was named and nowhere
else, which torch's own rendezvous does not offer. It has no key: who reaches it can disturb.
"""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

import torch.distributed

from .errors import CacheRankLostError, SettingsError
from .message.address import LinkAddress

_SCHEME = "tandemkv-nodes"
_END, _SETTINGS = "tandemkv/end", "tandemkv/settings"
_PAUSE_S, _ANSWER_S, _LONG_S = 0.5, 5.0, 3600.0

_dist: Any = torch.distributed  # its stubs lack what is registered
_store: Any = None
"""That of this process, once it has met the others."""


def meeting_place(address: LinkAddress) -> str:
    """Return what torch is told as its ``init_method``, to meet at `address`."""
    _register()
    return f"{_SCHEME}://{address.as_node}"


@functools.cache
def _register() -> None:
    _dist.register_rendezvous_handler(_SCHEME, _meet)


def _meet(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[Any, int, int]]:
    global _store
    parts = urlparse(url)
    numbers = dict(pair.split("=") for pair in parts.query.split("&"))
    rank, size = int(numbers["rank"]), int(numbers["world_size"])
    address = LinkAddress.parse_node(parts.netloc)
    _store = host_store(address, timeout) if rank == 0 else join_store(address, rank, timeout)
    yield _store, rank, size
    raise RuntimeError(f"{url}: a group that has lost a process is not joined again")


def host_store(address: LinkAddress, timeout: timedelta) -> Any:
    """Return the store that listens at `address` while this process lives.

    Raises `OSError` if the address is taken, or not one of this host.
    """
    where = address.resolved()
    family = socket.AF_INET6 if where.is_ipv6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind((where.host, where.port))
        own.listen()
        return _dist.TCPStore(
            where.host, where.port, None, True, timeout, False, master_listen_fd=own.detach()
        )


def join_store(address: LinkAddress, rank: int, timeout: timedelta) -> Any:
    """Return the store at `address`, once there is one that has not met a process of this `rank`.

    One that has belongs to schedulers that are about to end: a process of their group has. Raises
    `TimeoutError` if there is none in time.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        try:
            store = open_store(address, timeout)
            if store.add(f"tandemkv/joined/{rank}", 1) == 1:
                return store
        except (OSError, CacheRankLostError, _dist.DistError):
            pass  # nobody is there yet, or no more
        time.sleep(_PAUSE_S)
    raise TimeoutError(f"{address}: no first node to meet in {timeout.total_seconds():g} s")


def open_store(address: LinkAddress, timeout: timedelta) -> Any:
    """Return a connection to the store at `address`, whose waits take `timeout` at most.

    Raises `OSError`, `CacheRankLostError` or torch's `DistError` if nothing answers there.
    """
    where = address.resolved()
    # torch itself writes a trace of its stack for each attempt.
    socket.create_connection((where.host, where.port), _ANSWER_S).close()
    store = _dist.TCPStore(where.host, where.port, None, False, timedelta(seconds=_ANSWER_S))
    store.set_timeout(timeout)
    return store


def check_equal(rank: int, own: Mapping[str, str]) -> None:
    """Compare settings with those of the first scheduler; for every process that has met them.

    Raises `SettingsError`, naming each that differs.
    """
    if rank == 0:
        _store.set(_SETTINGS, json.dumps(dict(own)))
        return
    first = json.loads(_store.get(_SETTINGS))
    differing = [
        f"{name} ({own.get(name)} here, {first.get(name)} on the first node)"
        for name in sorted(own.keys() | first.keys())
        if own.get(name) != first.get(name)
    ]
    if differing:
        raise SettingsError(
            f"the nodes have different settings: {'; '.join(differing)}; start all with the same"
        )


def ask_end(address: LinkAddress) -> None:
    """Ask the first node to end SGLang on all nodes; raises as `open_store` does."""
    open_store(address, timedelta(seconds=_ANSWER_S)).set(_END, "1")


def await_end(address: LinkAddress) -> bool:
    """Wait until a node asks for the end; False if the store has gone before."""
    try:
        store = open_store(address, timedelta(seconds=_LONG_S))
        while not store.check([_END]):
            with contextlib.suppress(_dist.DistStoreError):  # the time ran out: nobody has asked
                store.wait([_END])
    except (OSError, CacheRankLostError, _dist.DistError):
        return False
    return True


def agree(address: LinkAddress, key: str, proposal: str | None, timeout_s: float) -> str:
    """Return the first `proposal` that a process has made for `key` of the store at `address`.

    A process without one waits for it. Raises as `open_store` does, or torch's `DistError` if
    there is none in time.
    """
    store = open_store(address, timedelta(seconds=timeout_s))
    if proposal is None:
        return str(store.get(key), "utf-8")
    return str(store.compare_set(key, "", proposal), "utf-8")
