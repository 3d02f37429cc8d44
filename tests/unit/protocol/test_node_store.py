# SPDX-License-Identifier: Apache-2.0
"""Where schedulers of several nodes meet: who is let in, what is compared, who asks for the end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psutil
import pytest

from tandemkv.cache_rank.protocol import node_store
from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.message.address import LinkAddress
from tandemkv.cache_rank.protocol.node_store import (
    agree,
    ask_end,
    await_end,
    check_equal,
    host_store,
    join_store,
    open_store,
)

PATIENCE = timedelta(seconds=20)
SHORT = timedelta(seconds=1)


@pytest.fixture
def address() -> LinkAddress:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return LinkAddress("127.0.0.1", probe.getsockname()[1])


@pytest.fixture
def hosted(address: LinkAddress) -> Iterator[list[Any]]:
    """The one reference to the first scheduler's store, which goes with it."""
    held = [host_store(address, PATIENCE)]
    yield held
    held.clear()


def test_it_listens_on_the_address_that_was_named(address: LinkAddress, hosted: list[Any]) -> None:
    del hosted
    found = psutil.Process().net_connections("tcp")
    listening = [each.laddr for each in found if each.status == psutil.CONN_LISTEN]
    assert {each.ip for each in listening if each.port == address.port} == {address.host}


def test_a_taken_address_is_an_error(address: LinkAddress, hosted: list[Any]) -> None:
    del hosted
    with pytest.raises(OSError, match="in use"):
        host_store(address, PATIENCE)


def test_each_rank_joins_a_store_once(address: LinkAddress, hosted: list[Any]) -> None:
    """One that comes again waits for the store of schedulers that were started again as well."""
    assert join_store(address, 1, PATIENCE) is not None
    assert join_store(address, 2, PATIENCE) is not None
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(join_store, address, 1, PATIENCE)
        with pytest.raises(TimeoutError, match="no first node to meet in 1 s"):
            join_store(address, 2, SHORT)
        assert not again.done()
        hosted.clear()
        hosted.append(host_store(address, PATIENCE))
        assert again.result(20.0).add("tandemkv/joined/1", 1) == 2


def test_a_rank_waits_for_the_first(address: LinkAddress) -> None:
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(join_store, address, 1, PATIENCE)
        held = host_store(address, PATIENCE)
        early.result(20.0).set("met", "1")
        assert held.get("met") == b"1"


def test_settings_that_differ_are_named(
    address: LinkAddress, hosted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_store, "_store", hosted[0])
    check_equal(0, {"budget": "96", "policy": "quest"})
    monkeypatch.setattr(node_store, "_store", open_store(address, PATIENCE))
    check_equal(1, {"policy": "quest", "budget": "96"})
    with pytest.raises(SettingsError, match=r"settings: budget \(64 here, 96 on the first node\);"):
        check_equal(1, {"policy": "quest", "budget": "64"})


def test_the_first_node_hears_of_the_end(address: LinkAddress, hosted: list[Any]) -> None:
    with ThreadPoolExecutor(1) as pool:
        heard = pool.submit(await_end, address)
        assert not heard.done()
        ask_end(address)
        assert heard.result(20.0) is True
    hosted.clear()
    with pytest.raises((OSError, RuntimeError)):
        ask_end(address)


def test_a_store_that_goes_asks_for_nothing(address: LinkAddress, hosted: list[Any]) -> None:
    found: list[bool] = []
    waits = threading.Thread(target=lambda: found.append(await_end(address)))
    waits.start()
    waits.join(1.0)
    assert waits.is_alive()
    hosted.clear()
    waits.join(20.0)
    assert found == [False]
    assert await_end(address) is False


def test_the_first_proposal_is_everyones(address: LinkAddress, hosted: list[Any]) -> None:
    del hosted
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(agree, address, "key", None, 20.0)
        assert agree(address, "key", "first", 5.0) == "first"
        assert waits.result(20.0) == "first"
    assert agree(address, "key", "second", 5.0) == "first"
