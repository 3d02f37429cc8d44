# SPDX-License-Identifier: Apache-2.0
"""SGLang over two nodes: a tensor-parallel rank on each, from two torchruns.

Each has a cache rank; one server for all of that, in this order. Then one without cache ranks.
"""

from __future__ import annotations

import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from agents import Nodes, schedulers, segments_of, two_nodes, workers
from exactness import flush
from nothing_lost import (
    begin,
    cache_ranks,
    killed_while_decoding,
    make_prompts,
    pids,
    settings_of,
    undisturbed,
    values,
    wait_for,
)
from rank_servers import ours

from tandemkv.cache_rank.protocol.ipc import server_pid
from tandemkv.cache_rank.protocol.run_dir import RunDir

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NODES, REQUESTS, NEW_TOKENS = 2, 5, 100
END_S = 60.0


def far_cache_rank(nodes: Nodes) -> int:
    """Process id of the cache rank of node 1."""
    return server_pid(RunDir.open(nodes.far_run_dir).of_rank(1).heartbeat_socket) or 0


def far_metrics(nodes: Nodes) -> str:
    try:
        with urllib.request.urlopen(f"{nodes.far_url}/metrics", timeout=10.0) as reply:
            return str(reply.read(), "utf-8")
    except urllib.error.URLError:
        return ""


def settings(cache_ranks: int) -> dict[str, Any]:
    given = {"tensor_parallel": NODES, "cache_ranks": cache_ranks}
    return settings_of(num_requests=REQUESTS, standby=False, **given)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts(REQUESTS)


@pytest.fixture(scope="module")
def of_one_node(random_model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What ``tandemkv serve --tp 2 --cache-ranks 0`` says on one node."""
    del random_model  # all servers serve it
    with ours(settings(cache_ranks=0)) as server:
        return undisturbed(server, prompts, NEW_TOKENS)


@pytest.fixture(scope="module")
def nodes(of_one_node: list[list[int]]) -> Iterator[Nodes]:
    del of_one_node  # that server has ended: never two at a time
    with two_nodes(settings(cache_ranks=NODES), processes=2) as found:
        yield found


def test_tokens_are_those_of_one_node(
    nodes: Nodes, prompts: list[list[int]], of_one_node: list[list[int]]
) -> None:
    assert undisturbed(nodes.server, prompts, NEW_TOKENS) == of_one_node
    assert values(nodes.server)["sparse_rows_total"] > 0
    (own,) = cache_ranks(nodes.server)  # that of node 1 is not asked from here
    assert own["values"]["fetched_rows_total"] > 0
    info = nodes.server.get("/tandemkv/status")[1]["inference_rank"]["info"]
    assert "2 processes on 2 nodes" in info["placement"]


def listening(nodes: Nodes) -> set[str]:
    """Addresses at which something listens."""
    found = [each for process in nodes.processes() for each in process.net_connections("tcp")]
    return {each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN}


def check_schedulers(nodes: Nodes) -> list[list[psutil.Process]]:
    """Fail unless each node has its scheduler; returns torchrun's processes below each agent."""
    below = [workers(agent.pid) for agent in nodes.agents]
    for number, (sglang, *_) in enumerate(below):
        titles = [" ".join(process.cmdline()).strip() for process in schedulers(sglang)]
        assert titles == [f"sglang::scheduler_TP{number}"]
    assert listening(nodes) == {"127.0.0.1"}
    return below


def test_each_node_has_a_scheduler_and_its_cache_rank(nodes: Nodes) -> None:
    for _, cache in check_schedulers(nodes):
        assert sum("cache-rank" in " ".join(child.cmdline()) for child in cache.children()) == 1
    assert {path.name for path in nodes.far_run_dir.glob("*.log")} == {
        "cache_rank1.log",
        "sglang.log",
    }


def test_each_node_has_metrics_of_its_own(nodes: Nodes) -> None:
    name = 'tandemkv_cache_selections_total{cache_rank="%d"'
    wait_for(lambda: name % 1 in far_metrics(nodes), "node 1 has no metrics", 20.0)
    wait_for(lambda: name % 0 in nodes.server.get("/metrics")[1], "node 0 has no metrics", 20.0)
    assert name % 0 not in far_metrics(nodes)


def test_the_cache_rank_of_node_1_killed_while_requests_decode(
    nodes: Nodes, prompts: list[list[int]], of_one_node: list[list[int]]
) -> None:
    killed, (own,) = far_cache_rank(nodes), pids(nodes.server)
    grown = killed_while_decoding(nodes.server, prompts, of_one_node, pid=killed)
    names = ("pauses_total", "restored_rows_total", "reseeded_rows_total")
    assert [grown[name] for name in names] == [1, REQUESTS, 0]
    assert far_cache_rank(nodes) not in (0, killed)
    assert pids(nodes.server) == [own]


@pytest.mark.slow  # SGLang starts again
def test_sglang_of_both_nodes_starts_again_if_one_has_died(
    nodes: Nodes, prompts: list[list[int]], of_one_node: list[list[int]]
) -> None:
    sglang = [workers(agent.pid)[0] for agent in nodes.agents]
    before = [schedulers(worker) for worker in sglang]
    (scheduler,) = schedulers(sglang[1])
    scheduler.kill()
    wait_for(lambda: nodes.server.get("/tandemkv/ready")[0] != 200, "node 0 is ready", 30.0)

    def is_ready() -> bool:
        try:
            return nodes.server.get("/tandemkv/ready")[0] == 200
        except OSError:
            return False

    wait_for(is_ready, "not ready again", 120.0)
    for worker, old in zip(sglang, before, strict=True):
        assert worker.is_running()
        assert not set(schedulers(worker)) & set(old)
    assert undisturbed(nodes.server, prompts, NEW_TOKENS) == of_one_node


def check_end(nodes: Nodes, prompts: list[list[int]], want: list[list[int]]) -> None:
    """Fail unless a signal to node 1 ends both: requests are finished, and nothing is left."""
    agents, processes = nodes.agents, nodes.processes()
    segments = segments_of(processes)
    flush(nodes.server)
    with ThreadPoolExecutor(len(prompts) + 1) as pool:
        streams, futures = begin(pool, nodes.server, prompts, NEW_TOKENS)
        wait_for(lambda: all(stream.tokens for stream in streams), "no request begins", 60.0)
        assert values(nodes.server)["sparse_rows_total"] > 0
        agents[1].send_signal(signal.SIGTERM)
        for future in futures:
            future.result()
    assert [stream.error for stream in streams] == [""] * REQUESTS
    assert [stream.tokens for stream in streams] == want
    for agent in agents:
        agent.wait(END_S)
    wait_for(lambda: not any(p.is_running() for p in processes), "processes are left", 5.0)
    assert "another node has ended the server\nstopped\n" in nodes.server.log.read_text()
    for run_dir in (nodes.server.run_dir, nodes.far_run_dir):
        assert run_dir is not None
        assert {path.suffix for path in run_dir.iterdir()} == {".log"}
    assert [path for path in segments if path.exists()] == []


def test_sigterm_to_the_agent_of_node_1_ends_both_nodes(
    nodes: Nodes, prompts: list[list[int]], of_one_node: list[list[int]]
) -> None:
    """The last one with this server."""
    check_end(nodes, prompts, of_one_node)


def test_without_cache_ranks_tokens_are_those_of_one_node(
    prompts: list[list[int]], of_one_node: list[list[int]]
) -> None:
    """torchrun has one process on each node: SGLang's. It ends as with cache ranks."""
    with two_nodes(settings(cache_ranks=0), processes=1) as nodes:
        assert [len(processes) for processes in check_schedulers(nodes)] == [1, 1]
        assert cache_ranks(nodes.server) == []
        name = "tandemkv_inference_sparse_rows_total"
        wait_for(lambda: name in far_metrics(nodes), "node 1 has no metrics", 20.0)
        check_end(nodes, prompts, of_one_node)
