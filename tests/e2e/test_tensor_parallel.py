# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel ranks, a cache rank each or one: tokens of one rank, also when it is killed.

The model is small and random; its weights are large enough that tokens depend on what is attended
to. In SGLang's processes of a CPU the ranks exchange sums over gloo.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from agents import ENVIRONMENT, torchrun, workers
from nothing_lost import (
    cache_ranks,
    killed_while_decoding,
    make_prompts,
    pids,
    settings_of,
    undisturbed,
    values,
    wait_for,
)
from rank_servers import Server, ours

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

RANKS, REQUESTS, NEW_TOKENS = 2, 5, 100


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts(REQUESTS)


def settings(**more: Any) -> dict[str, Any]:
    return settings_of(num_requests=REQUESTS, standby=False, **more)


@pytest.fixture(scope="module")
def of_one_rank(random_model: Path, prompts: list[list[int]]) -> list[list[int]]:
    del random_model  # the servers of this module serve it
    with ours(settings()) as server:
        return undisturbed(server, prompts, NEW_TOKENS)


@pytest.fixture(scope="module")
def server(of_one_rank: list[list[int]]) -> Iterator[Server]:
    del of_one_rank  # that server has ended: never two at a time
    with ours(settings(tensor_parallel=RANKS, cache_ranks=RANKS)) as found:
        yield found


def test_tokens_are_those_of_one_rank(
    server: Server, prompts: list[list[int]], of_one_rank: list[list[int]]
) -> None:
    assert undisturbed(server, prompts, NEW_TOKENS) == of_one_rank
    assert values(server)["sparse_rows_total"] > 0


def test_status_and_metrics_have_each_cache_rank(server: Server) -> None:
    ranks = cache_ranks(server)
    assert len({rank["info"]["pid"] for rank in ranks}) == RANKS
    for rank in ranks:
        assert rank["ready"] is True
        assert rank["epoch"] > 0
        assert rank["values"]["fetched_rows_total"] > 0
    assert server.run_dir is not None
    own = [server.run_dir, server.run_dir / "tp1"]
    assert all((folder / "heartbeat.sock").exists() for folder in own)
    text: Any = None

    def is_published() -> bool:
        nonlocal text
        text = server.get("/metrics")[1]
        names = [f'tandemkv_cache_selections_total{{cache_rank="{n}"' for n in range(RANKS)]
        return all(name in text for name in names)

    wait_for(is_published, "metrics lack a cache rank", 20.0)


@pytest.mark.slow  # minutes; what is agreed is in unit/inference_rank/test_recovery_of_ranks.py
@pytest.mark.parametrize("killed", [1, 0])
def test_one_of_two_killed_while_requests_decode(
    server: Server, prompts: list[list[int]], of_one_rank: list[list[int]], killed: int
) -> None:
    found = pids(server)
    grown = killed_while_decoding(server, prompts, of_one_rank, pid=found[killed])
    names = ("pauses_total", "restored_rows_total", "reseeded_rows_total")
    assert [grown[name] for name in names] == [1, REQUESTS, 0]
    now = pids(server)
    assert now[killed] != found[killed]
    assert now[1 - killed] == found[1 - killed]  # it was told, and not ended


def test_nothing_is_left(server: Server) -> None:
    """The last one with this server: it ends it."""
    processes, run_dir = server.processes(), server.run_dir
    os.kill(server.pid, signal.SIGINT)
    for process in processes:
        process.wait(60)
    assert run_dir is not None
    logs = {"cache_rank.log", "cache_rank1.log", "sglang.log"}
    assert {path.name for path in run_dir.iterdir()} == logs


@pytest.mark.slow  # one more server of five processes
def test_processes_of_torchrun_answer_the_same(
    prompts: list[list[int]], of_one_rank: list[list[int]], tmp_path: Path
) -> None:
    """Left open, --cache-ranks follows from the processes. It comes when the server has ended."""
    start = torchrun(tmp_path / "store", 1 + RANKS)
    environ = ENVIRONMENT | {"TMPDIR": str(tmp_path)}
    with ours(settings(tensor_parallel=RANKS), environ=environ, start=start) as found:
        assert undisturbed(found, prompts, NEW_TOKENS) == of_one_rank
        first, *others = workers(found.pid)
        parents = [psutil.Process(pid).ppid() for pid in pids(found)]
        assert parents == [other.pid for other in others]
        assert len(parents) == RANKS
        argvs = [child.cmdline() for child in first.children()]
        assert sum("sglang.launch_server" in argv for argv in argvs) == 1
        processes, run_dir = found.processes(), found.run_dir
        os.kill(found.pid, signal.SIGTERM)
        for process in processes:
            process.wait(60)
    assert run_dir is not None
    assert {path.suffix for path in run_dir.iterdir()} == {".log"}


@pytest.mark.slow  # a server each; the first has seven processes
@pytest.mark.parametrize("more", [{"transport": "message"}, {"cache_ranks": 2 * RANKS}])
def test_other_cache_ranks_give_the_same_tokens(
    prompts: list[list[int]], of_one_rank: list[list[int]], more: dict[str, Any]
) -> None:
    """On hosts of their own, and two for each tensor-parallel rank."""
    given = {"tensor_parallel": RANKS, "cache_ranks": RANKS} | more
    with ours(settings(**given)) as server:
        assert undisturbed(server, prompts, NEW_TOKENS) == of_one_rank
        assert values(server)["sparse_rows_total"] > 0
        assert len(cache_ranks(server)) == given["cache_ranks"]


def test_one_cache_rank_serves_both(prompts: list[list[int]], of_one_rank: list[list[int]]) -> None:
    """With an engine for each: the same tokens, also when it is killed; a clean end."""
    with ours(settings(tensor_parallel=RANKS, cache_ranks=1)) as server:
        assert undisturbed(server, prompts, NEW_TOKENS) == of_one_rank
        assert all(rank["values"]["fetched_rows_total"] > 0 for rank in cache_ranks(server))
        (pid,) = set(found := pids(server))
        assert len(found) == RANKS
        grown = killed_while_decoding(server, prompts, of_one_rank, pid=pid)
        names = ("pauses_total", "restored_rows_total", "reseeded_rows_total")
        assert [grown[name] for name in names] == [1, REQUESTS, 0]
        assert pid not in pids(server)
        processes, run_dir = server.processes(), server.run_dir
        os.kill(server.pid, signal.SIGINT)
        for process in processes:
            process.wait(60)
    assert run_dir is not None
    assert {path.name for path in run_dir.iterdir()} == {"cache_rank.log", "sglang.log"}
