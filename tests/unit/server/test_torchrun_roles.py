# SPDX-License-Identifier: Apache-2.0
"""Roles of torchrun's processes: from what, where they meet, what is refused."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.message.address import LinkAddress
from tandemkv.cache_rank.protocol.node_store import host_store
from tandemkv.server.checks.ports import choose_port
from tandemkv.server.launch.nodes import AGENT_STORE_VARIABLE
from tandemkv.server.launch.torchrun_roles import (
    SHUTDOWN_VARIABLE,
    Worker,
    agent_of,
    check_is_here,
    check_processes,
    drain_within,
    forget_torchrun,
    nodes_of,
    open_cache_ranks,
)
from tandemkv.server.settings.launch_settings import ServeSettings

# What torchrun of torch 2.13 sets, of two processes of one node.
ENVIRONMENT = {
    "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
    "ROLE_RANK": "1", "ROLE_NAME": "default", "ROLE_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT",
    "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_x/none_y/attempt_0/1/error.json",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip


@pytest.fixture
def second() -> Worker:
    return Worker.from_environment(ENVIRONMENT, "77.1")


def settings(**values: Any) -> ServeSettings:
    return ServeSettings(model="smollm2", **values)


def of_host(worker: Worker, count: int, rank: int = 1) -> Worker:
    """One of `count` processes, all on one host."""
    return replace(
        worker, rank=rank, local_rank=rank, world_size=count, local_world_size=count, num_nodes=1
    )


def of_nodes(worker: Worker, count: int, rank: int = 1) -> Worker:
    """One of `count` processes, each on a node of its own."""
    return replace(
        worker, rank=rank, local_rank=0, world_size=count, local_world_size=1, num_nodes=count,
        node_rank=rank,
    )  # fmt: skip


def addressed(count: int, **values: Any) -> ServeSettings:
    """Settings of `count` cache ranks at addresses."""
    addresses = ",".join(f"tcp://127.0.0.{2 + n}:7400" for n in range(count))
    return settings(cache_rank_address=addresses, link_keys=Path("keys"), **values)


def test_the_first_process_has_sglang_and_the_second_the_cache_rank(second: Worker) -> None:
    assert second.place(settings()) == 1
    assert replace(second, rank=0, local_rank=0).place(settings()) == 0


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"])
def test_what_torchrun_sets_is_required(name: str) -> None:
    rest = {key: text for key, text in ENVIRONMENT.items() if key != name}
    with pytest.raises(SettingsError, match=rf"here '{name}' is wrong or missing.*torchrun"):
        Worker.from_environment(rest, "77.1")


def test_a_number_that_is_none_is_refused() -> None:
    with pytest.raises(SettingsError, match="'first' is wrong or missing"):
        Worker.from_environment(ENVIRONMENT | {"RANK": "first"}, "77.1")


def test_processes_of_one_launch_meet_in_one_place(
    second: Worker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    launch = second.launch
    assert replace(second, rank=0, local_rank=0).launch == launch
    assert launch.run_dir == tmp_path / f"tandemkv-{launch.launch_id}"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    assert second.launch.run_dir.parent == Path("/tmp")


@pytest.mark.parametrize("change", [{"run_id": "7"}, {"restart_count": 1}, {"agent": "77.2"}])
def test_another_launch_meets_elsewhere(second: Worker, change: dict[str, Any]) -> None:
    """Two that are called ``none``, and one that torchrun has started again."""
    assert replace(second, **change).launch.run_dir != second.launch.run_dir


def test_another_user_meets_elsewhere(second: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = second.launch
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    assert second.launch != mine


def test_an_agent_is_a_process_and_its_start() -> None:
    assert agent_of(os.getpid()) == agent_of(os.getpid())
    assert agent_of(os.getpid()).startswith(f"{os.getpid()}.")
    assert agent_of(os.getppid()) != agent_of(os.getpid())


def test_children_hear_nothing_of_the_group() -> None:
    """SGLang's torch would take torchrun's store for its own, and libraries the ranks."""
    environ = ENVIRONMENT | {"PATH": "/bin", "HF_HUB_OFFLINE": "1", "MY_RANK": "3"}
    forget_torchrun(environ)
    assert environ == {
        "PATH": "/bin",
        "HF_HUB_OFFLINE": "1",
        "MY_RANK": "3",
        "OMP_NUM_THREADS": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


@pytest.mark.parametrize(
    ("given", "implied"),
    [
        ({}, 1),
        ({"cache_ranks": 0}, None),
        ({"transport": "local"}, None),
        ({"cache_rank_address": "tcp://127.0.0.2:7400", "link_keys": "keys"}, None),
    ],
)
def test_cache_ranks_follow_from_the_processes_if_open(
    second: Worker, given: dict[str, Any], implied: int | None
) -> None:
    assert open_cache_ranks(settings(**given), second) == implied


def test_each_other_process_is_a_cache_rank(second: Worker) -> None:
    last = of_host(second, 4, rank=3)
    assert open_cache_ranks(settings(), last) == 3
    check_processes(settings(cache_ranks=3), last)
    assert (second.place(settings()), last.place(settings())) == (1, 3)


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ({"cache_ranks": 1}, 2),
        ({"cache_ranks": 4}, 5),
        ({"transport": "shared"}, 2),
        ({"cache_ranks": 0}, 1),
        ({"cache_ranks": 0, "tensor_parallel": 4}, 1),
        ({"cache_ranks": 2, "tensor_parallel": 2}, 3),
        ({"cache_ranks": 4, "tensor_parallel": 2}, 5),
        ({"cache_ranks": 2, "tensor_parallel": 4}, 3),
    ],
)
def test_there_is_a_process_for_each_role(
    second: Worker, given: dict[str, Any], count: int
) -> None:
    check_processes(settings(**given), of_host(second, count))
    for other in {1, 2, 3, 5} - {count}:
        with pytest.raises(SettingsError) as error:
            check_processes(settings(**given), of_host(second, other))
        assert f"torchrun started {other} processes" in str(error.value)
        assert f"use --nproc-per-node {count}" in str(error.value)


@pytest.mark.parametrize(("count", "implied"), [(1, 0), (2, 1), (3, 2), (5, 4), (4, None)])
def test_tensor_parallel_ranks_share_the_other_processes(
    second: Worker, count: int, implied: int | None
) -> None:
    """Left open, there are as many cache ranks as other processes, if --tp has a use for them."""
    worker, parallel = of_host(second, count, rank=0), settings(tensor_parallel=2)
    assert open_cache_ranks(parallel, worker) == implied
    if implied is None:
        with pytest.raises(SettingsError, match="--nproc-per-node 3"):
            check_processes(parallel, worker)
    else:
        check_processes(settings(tensor_parallel=2, cache_ranks=implied), worker)


def of_split(worker: Worker, nodes: int, here: int, node: int = 1, local: int = 0) -> Worker:
    """One of `here` processes on each of several nodes."""
    return replace(
        worker, rank=node * here + local, world_size=nodes * here, local_rank=local,
        local_world_size=here, node_rank=node, num_nodes=nodes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "here"),
    [
        ({"tensor_parallel": 2}, 2),
        ({"tensor_parallel": 4, "cache_ranks": 0}, 1),
        ({"tensor_parallel": 2, "cache_ranks": 4}, 3),
        ({"tensor_parallel": 4, "cache_ranks": 2}, 2),
    ],
)
def test_each_node_has_sglang_and_its_part_of_the_cache_ranks(
    second: Worker, given: dict[str, Any], here: int
) -> None:
    found = settings(**given)
    for node in (0, 1):
        workers = [of_split(second, 2, here, node, local) for local in range(here)]
        for worker in workers:
            check_processes(found, worker)
        assert [worker.place(found) for worker in workers] == list(range(here))
        assert workers[0].place(found) == 0
    for count, implied in ((2, 2), (1, 0)):
        assert open_cache_ranks(settings(tensor_parallel=2), of_split(second, 2, count)) == implied
    with pytest.raises(SettingsError, match=rf"{here + 1} processes on each.*node {here}"):
        check_processes(found, of_split(second, 2, here + 1))


@pytest.mark.parametrize("given", [{"cache_ranks": 1}, {"tensor_parallel": 3}, {}])
def test_nodes_that_cannot_have_as_many_are_refused_in_words(
    second: Worker, given: dict[str, Any]
) -> None:
    with pytest.raises(SettingsError) as error:
        check_processes(settings(**given), of_split(second, 2, 2))
    for part in ("--nnodes 2", "use --tp 2", "--cache-rank-address and --link-keys"):
        assert part in str(error.value)


def test_nodes_of_other_numbers_are_refused_in_words(second: Worker) -> None:
    found = settings(tensor_parallel=2)
    with pytest.raises(SettingsError, match=r"3 processes on 2 nodes.*--nproc-per-node"):
        check_processes(found, replace(of_split(second, 2, 2), world_size=3))
    with pytest.raises(SettingsError, match=r"--cache-ranks 1: .* use --cache-ranks 2"):
        check_processes(settings(tensor_parallel=2, cache_ranks=1), of_split(second, 2, 2))


def test_where_nodes_meet_follows_from_torchrun(second: Worker) -> None:
    found, worker = settings(tensor_parallel=2), of_split(second, 2, 2)
    environ = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    values = {name: each.value for name, each in nodes_of(found, worker, environ).items()}
    assert values == {"nnodes": 2, "node_rank": 1, "dist_init_addr": "10.0.0.1:29500"}
    assert settings(tensor_parallel=2, **values).node_rank == 1
    given = settings(tensor_parallel=2, dist_init_addr="10.0.0.1:7500")
    assert set(nodes_of(given, worker, {})) == {"nnodes", "node_rank"}
    with pytest.raises(SettingsError, match=r"'MASTER_PORT'.*--dist-init-addr HOST:PORT"):
        nodes_of(found, worker, {"MASTER_ADDR": "10.0.0.1"})


def test_nodes_agree_on_a_port_in_torchruns_store(second: Worker) -> None:
    """Its own port is taken: the store listens there."""
    found = settings(tensor_parallel=2, start_timeout_s=20.0)
    address = LinkAddress("127.0.0.1", choose_port("127.0.0.1", 0))
    store = host_store(address, timedelta(seconds=5))
    environ = {
        "MASTER_ADDR": address.host,
        "MASTER_PORT": str(address.port),
        AGENT_STORE_VARIABLE: "True",
    }

    def told(node: int) -> Any:
        return nodes_of(found, of_split(second, 2, 2, node), environ)["dist_init_addr"].value

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(told, 1)  # it waits
        first = told(0)
        assert other.result(timeout=20.0) == first != address.as_node
    assert told(0) == first  # torchrun has started it again: the other one has not moved
    del store
    with pytest.raises(SettingsError, match=r"does not tell where to meet.*--dist-init-addr"):
        told(1)


def test_messages_without_addresses_are_refused_in_words(second: Worker) -> None:
    for worker in (of_host(second, 2), of_nodes(second, 2)):
        with pytest.raises(SettingsError, match=r"has to know .*--cache-rank-address .*--link"):
            check_processes(settings(transport="message"), worker)


@pytest.mark.parametrize("values", [{}, {"tensor_parallel": 2}, {"cache_ranks": 2}])
def test_each_address_has_a_process_on_whatever_node(
    second: Worker, values: dict[str, Any]
) -> None:
    found = addressed(2, **values)
    mixed = replace(second, rank=2, local_rank=1, world_size=3, local_world_size=2, num_nodes=2)
    for worker in (of_host(second, 3), of_nodes(second, 3), mixed):
        assert open_cache_ranks(found, worker) is None
        check_processes(found, worker)
    for count in (1, 2, 4):
        with pytest.raises(SettingsError) as error:
            check_processes(found, of_nodes(second, count))
        assert f"started {count} processes on {count} nodes" in str(error.value)
        assert "use --nnodes 3 --nproc-per-node 1" in str(error.value)


def test_a_process_cannot_listen_at_a_name(second: Worker) -> None:
    named = settings(cache_rank_address="tcp://node2:7400", link_keys=Path("keys"))
    with pytest.raises(SettingsError, match="IP address"):
        check_processes(named, of_nodes(second, 2))


def test_an_address_of_another_host_is_refused_with_what_decides_ranks(second: Worker) -> None:
    check_is_here("tcp://127.0.0.3:7400", second)
    with pytest.raises(SettingsError, match=r"for rank 1 of torchrun.*--node-rank"):
        check_is_here("tcp://192.0.2.1:7400", second)  # of nobody: RFC 5737


def test_run_directories_of_addressed_cache_ranks_are_their_own(second: Worker) -> None:
    third, launch = replace(second, rank=2), second.launch
    found = [worker.cache_rank_dir(None) for worker in (second, third)]
    assert [path.name for path in found] == [
        f"{launch.run_dir.name}-cache0",
        f"{launch.run_dir.name}-cache1",
    ]
    assert {path.parent for path in found} == {launch.run_dir.parent}
    given = [worker.cache_rank_dir(Path("/run/mine")) for worker in (second, third)]
    assert given == [Path("/run/mine-cache0"), Path("/run/mine-cache1")]


def test_gpus_by_process_are_refused(second: Worker) -> None:
    with pytest.raises(SettingsError, match="--virtual-local-rank"):
        check_processes(settings(cache_ranks=1), replace(second, local_rank=0))


def test_the_drain_ends_before_torchrun_kills() -> None:
    found, said = drain_within(settings(), {})
    assert found.drain_timeout_s == 20.0
    assert f"torchrun kills after 30 s: raise {SHUTDOWN_VARIABLE}" in said
    assert drain_within(settings(), {SHUTDOWN_VARIABLE: "60"}) == (settings(), "")
    assert drain_within(settings(), {SHUTDOWN_VARIABLE: "5"})[0].drain_timeout_s == 0.0


def test_a_drain_that_was_given_stays() -> None:
    """torchrun's own flag cannot be seen from here."""
    mine = settings(drain_timeout_s=120.0)
    found, said = drain_within(mine, {})
    assert found is mine
    assert "--shutdown-timeout 130" in said
    short = settings(drain_timeout_s=5.0)
    assert drain_within(short, {}) == (short, "")
