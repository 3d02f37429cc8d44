# SPDX-License-Identifier: Apache-2.0
"""SGLang over several hosts: which settings there are, what each host starts, what is refused."""

from __future__ import annotations

import socket
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from pydantic import ValidationError

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.heartbeat import StatusServer
from tandemkv.cache_rank.protocol.message.address import LinkAddress
from tandemkv.cache_rank.protocol.messages import StatusReply
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings.rank_settings import NODES_VARIABLE
from tandemkv.server.launch import nodes
from tandemkv.server.launch.cache_rank_launch import cache_rank_launches
from tandemkv.server.launch.nodes import (
    check_meeting_place,
    interface_to_nodes,
    scheduler_state,
)
from tandemkv.server.launch.sglang_command import sglang_argv, sglang_env
from tandemkv.server.settings.launch_settings import ServeSettings

MET = {"nnodes": 2, "dist_init_addr": "127.0.0.1:7500", "tensor_parallel": 2}


def settings(**values: Any) -> ServeSettings:
    return ServeSettings.model_validate({"model": "smollm2", "device": "cpu"} | MET | values)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"node_rank": 2}, "the last is 1"),
        ({"dist_init_addr": None}, "add --dist-init-addr HOST:PORT"),
        ({"dist_init_addr": "10.0.0.1"}, "must be HOST:PORT"),
        ({"dist_init_addr": ":7500"}, "must be HOST:PORT"),
        ({"tensor_parallel": 3}, "must be a multiple of nnodes=2.*use --tp 2"),
        ({"tensor_parallel": 1}, "--cache-rank-address"),
        ({"cache_ranks": 1}, "cache_ranks=1 must be a multiple of nnodes=2.*use --cache-ranks 2"),
        ({"transport": "message"}, "link message is not available"),
    ],
)
def test_what_hosts_cannot_have_is_refused_in_words(changes: dict[str, Any], said: str) -> None:
    with pytest.raises((ValidationError, SettingsError), match=said):
        settings(**changes)


@pytest.mark.parametrize("more", [{}, {"dist_init_addr": None, "node_rank": 1}])
def test_what_is_for_several_hosts_needs_their_number(more: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="add --nnodes, or leave them out"):
        check_meeting_place(settings(nnodes=1, **more))


@pytest.mark.parametrize(
    ("tp_size", "cache_ranks", "node", "numbers", "logs"),
    [
        (2, 2, 0, [0], ["cache_rank.log"]),
        (2, 2, 1, [1], ["cache_rank1.log"]),
        (2, 4, 1, [2, 3], ["cache_rank2.log", "cache_rank3.log"]),
        (4, 2, 1, [2, 3], ["cache_rank1.log"]),
        (4, 0, 1, [], []),
    ],
)
def test_a_host_starts_the_cache_ranks_of_its_processes(
    tmp_path: Path, tp_size: int, cache_ranks: int, node: int, numbers: list[int], logs: list[str]
) -> None:
    found = settings(tensor_parallel=tp_size, cache_ranks=cache_ranks, node_rank=node)
    run_dir = RunDir.create(tmp_path / "run")
    launches = cache_rank_launches(found, run_dir)
    specs = [launch.spec for launch in launches if launch.spec is not None]
    assert [spec.log_path.name for spec in specs] == logs
    folders = {path.name for path in run_dir.path.iterdir() if path.is_dir()}
    assert folders == {f"tp{number}" for number in numbers if number}
    placement = found.rank_settings.placement
    assert list(placement.engines_of(node)) == numbers
    assert [placement.node_of(rank) for rank in range(tp_size)] == [
        rank * 2 // tp_size for rank in range(tp_size)
    ]


def test_sglang_is_told_of_all_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3, 4, 7})
    found = settings(node_rank=1, tensor_parallel=4)
    argv = sglang_argv(found, model_dir=tmp_path, device="cpu", dtype="float32", port=1)
    told = dict(pairwise(argv))
    names = ("--tp-size", "--nnodes", "--node-rank", "--dist-init-addr")
    assert [told[name] for name in names] == ["4", "2", "1", "127.0.0.1:7500"]
    env = sglang_env(found, {}, run_dir=tmp_path, device="cpu")
    assert env["SGLANG_CPU_OMP_THREADS_BIND"] == "3|4,7|3|4,7"  # it takes that of rank 2 and 3
    assert env["GLOO_SOCKET_IFNAME"] == "lo"
    assert env[NODES_VARIABLE] == "127.0.0.1:7500"
    assert env["SGLANG_USE_MESSAGE_QUEUE_BROADCASTER"] == "false"
    given = {"GLOO_SOCKET_IFNAME": "eth7", "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "true"}
    env = sglang_env(found, given, run_dir=tmp_path, device="cpu")
    assert env["GLOO_SOCKET_IFNAME"] == "eth7"
    assert env["SGLANG_USE_MESSAGE_QUEUE_BROADCASTER"] == "false", "it would unpickle"
    alone = settings(nnodes=1, dist_init_addr=None)
    argv = sglang_argv(alone, model_dir=tmp_path, device="cpu", dtype="float32", port=1)
    assert "--nnodes" not in argv
    env = sglang_env(alone, {NODES_VARIABLE: "x:1"}, run_dir=tmp_path, device="cpu")
    assert env[NODES_VARIABLE] == ""


class Address(NamedTuple):
    address: str


def test_the_interface_is_the_one_that_leads_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interface_to_nodes(settings()) == "lo"
    assert interface_to_nodes(settings(nnodes=1, dist_init_addr=None)) == "lo"
    monkeypatch.setattr(LinkAddress, "own_host", lambda _: "10.0.0.2")
    cards = {"lo": [Address("127.0.0.1")], "eth1": [Address("fe80::1%eth1"), Address("10.0.0.2")]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: cards)
    assert interface_to_nodes(settings(dist_init_addr="10.0.0.1:7500")) == "eth1"
    del cards["eth1"]
    with pytest.raises(SettingsError, match=r"no interface here has 10.0.0.2.*GLOO_SOCKET_IFNAME"):
        interface_to_nodes(settings(dist_init_addr="10.0.0.1:7500"))


def test_host_0_has_to_have_the_address_and_the_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        check_meeting_place(settings(dist_init_addr=where, node_rank=1))
        with pytest.raises(SettingsError, match=r"dist_init_addr=.*in use.*a port that is free"):
            check_meeting_place(settings(dist_init_addr=where))
    with pytest.raises(SettingsError, match=r"203\.0\.113\.1 is no address .*or --node-rank if"):
        check_meeting_place(settings(dist_init_addr="203.0.113.1:7500"))
    with pytest.raises(SettingsError, match=r"name leads to no address"):
        check_meeting_place(settings(dist_init_addr="nobody.invalid:7500", node_rank=1))


def test_a_name_that_stays_on_this_host_is_no_meeting_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As /etc/hosts of many systems has their own name."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 7500))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(SettingsError, match=r"node0 is 127\.0\.1\.1 here.* give the IP address"):
        check_meeting_place(settings(dist_init_addr="node0:7500"))
    check_meeting_place(settings(dist_init_addr="localhost:7500"))


def test_a_host_without_http_is_asked_at_its_scheduler(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    assert not scheduler_state(run_dir).reachable
    is_ready = False

    def status() -> StatusReply:
        values = {"stalled_s": 3.0}
        return StatusReply("inference_rank", epoch=1, ready=is_ready, values=values, info={})

    server = StatusServer(run_dir.inference_socket, status=status)
    try:
        state = scheduler_state(run_dir)
        assert (state.reachable, state.ready) == (True, False)
        assert "other nodes" in state.detail
        is_ready = True
        assert scheduler_state(run_dir).ready
        assert nodes.scheduler_pulse(run_dir).stalled_s == 3.0
    finally:
        server.close()
