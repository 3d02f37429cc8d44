# SPDX-License-Identifier: Apache-2.0
"""Roles of torchrun's processes: from what, where they meet, what is refused."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.settings import ServeSettings
from tandemkv.server.torchrun_roles import (
    SHUTDOWN_VARIABLE,
    Role,
    Worker,
    agent_of,
    check_processes,
    drain_within,
    forget_torchrun,
    open_cache_ranks,
)

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


def test_the_first_process_has_sglang_and_the_second_the_cache_rank(second: Worker) -> None:
    assert second.role is Role.CACHE
    assert replace(second, rank=0, local_rank=0).role is Role.INFERENCE


@pytest.mark.parametrize("name", ["RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"])
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
    [({}, 1), ({"cache_ranks": 0}, None), ({"transport": "local"}, None)],
)
def test_cache_ranks_follow_from_the_processes_if_open(
    second: Worker, given: dict[str, Any], implied: int | None
) -> None:
    assert open_cache_ranks(settings(**given), second) == implied


def test_each_other_process_is_a_cache_rank(second: Worker) -> None:
    last = replace(second, rank=3, local_rank=3, local_world_size=4)
    assert open_cache_ranks(settings(), last) == 3
    check_processes(settings(cache_ranks=3), last)
    assert (second.cache_rank, last.cache_rank) == (0, 2)


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ({"cache_ranks": 1}, 2),
        ({"cache_ranks": 4}, 5),
        ({"transport": "shared"}, 2),
        ({"cache_ranks": 0}, 1),
        ({"cache_ranks": 0, "tensor_parallel": 4}, 1),
    ],
)
def test_there_is_a_process_for_each_role(
    second: Worker, given: dict[str, Any], count: int
) -> None:
    check_processes(settings(**given), replace(second, local_world_size=count))
    for other in {1, 2, 3, 5} - {count}:
        with pytest.raises(SettingsError) as error:
            check_processes(settings(**given), replace(second, local_world_size=other))
        assert f"torchrun started {other} processes" in str(error.value)
        assert f"use --nproc-per-node {count}" in str(error.value)


def test_tensor_parallel_ranks_with_cache_ranks_are_refused_in_words(second: Worker) -> None:
    for count, given in ((3, {"cache_ranks": 2}), (3, {}), (2, {"transport": "shared"})):
        worker = replace(second, local_world_size=count)
        parallel = settings(tensor_parallel=2, **given)
        assert open_cache_ranks(parallel, worker) is None
        with pytest.raises(SettingsError, match=r"under torchrun .*`tandemkv serve`, .*ranks 0"):
            check_processes(parallel, worker)
    alone = replace(second, local_world_size=1)
    assert open_cache_ranks(settings(tensor_parallel=2), alone) == 0


def test_nodes_beyond_one_are_refused_in_words(second: Worker) -> None:
    with pytest.raises(SettingsError, match=r"--nnodes 2: .* memory of one host.*--standalone"):
        check_processes(settings(cache_ranks=1), replace(second, num_nodes=2))


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
