# SPDX-License-Identifier: Apache-2.0
"""SGLang over two nodes: a tensor-parallel rank with its cache rank on each, from two torchruns.

One server for all of it, in this order.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from agents import ENVIRONMENT, other_agent, segments_of, torchrun, workers
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
from rank_servers import SIZES, Server, free_port, ours

from tandemkv.cache_rank.protocol.ipc import server_pid
from tandemkv.cache_rank.protocol.run_dir import RunDir

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NODES, REQUESTS, NEW_TOKENS = 2, 5, 100
NEAR, FAR = "127.0.0.1", "127.0.0.2"
END_S = 60.0


@dataclass(frozen=True)
class Nodes:
    """The server, whose agent is node 0's, and the agent of node 1."""

    server: Server
    agent: psutil.Process
    far_url: str
    far_run_dir: Path

    @property
    def agents(self) -> tuple[psutil.Process, psutil.Process]:
        return psutil.Process(self.server.pid), self.agent

    def far_cache_rank(self) -> int:
        """Process id of the cache rank of node 1."""
        return server_pid(RunDir.open(self.far_run_dir).of_rank(1).heartbeat_socket) or 0

    def far_metrics(self) -> str:
        try:
            with urllib.request.urlopen(f"{self.far_url}/metrics", timeout=10.0) as reply:
                return str(reply.read(), "utf-8")
        except urllib.error.URLError:
            return ""


def schedulers(worker: psutil.Process) -> list[psutil.Process]:
    """Return SGLang's schedulers below one of torchrun's processes."""
    below = worker.children(recursive=True)
    return [child for child in below if "sglang::scheduler" in " ".join(child.cmdline())]


def settings(**more: Any) -> dict[str, Any]:
    given = {"tensor_parallel": NODES, "cache_ranks": NODES} | more
    return settings_of(num_requests=REQUESTS, standby=False, **given)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts(REQUESTS)


@pytest.fixture(scope="module")
def of_one_node(random_model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What ``tandemkv serve --tp 2`` says on one node."""
    del random_model  # both servers serve it
    with ours(settings()) as server:
        return undisturbed(server, prompts, NEW_TOKENS)


@pytest.fixture(scope="module")
def nodes(random_model: Path, of_one_node: list[list[int]]) -> Iterator[Nodes]:
    del of_one_node  # that server has ended: never two at a time
    work = Path(tempfile.mkdtemp(prefix="tkv-"))  # short: sockets lie in it
    store, config, run_dir, port = work / "store", work / "node1.yaml", work / "node1", free_port()
    config.write_text(yaml.safe_dump(SIZES | settings()))
    environ = ENVIRONMENT | {"TMPDIR": str(work), "XDG_RUNTIME_DIR": str(work)}
    start = torchrun(store, 2, nodes=NODES, node=FAR)
    options = ("--device", "cpu", "--config", str(config), "--port", str(port))
    argv = [*start, str(random_model), *options, "--run-dir", str(run_dir)]
    near = torchrun(store, 2, nodes=NODES, node=NEAR)
    try:
        with (
            other_agent(argv, work, environ) as far,
            ours(settings(), environ=environ, start=near) as server,
        ):
            log = work / "far.log"
            wait_for(lambda: "node 0 serves" in log.read_text(), "node 1 is not ready", 30.0)
            yield Nodes(server, psutil.Process(far), f"http://127.0.0.1:{port}", run_dir)
    finally:
        shutil.rmtree(work)


def test_tokens_are_those_of_one_node(
    nodes: Nodes, prompts: list[list[int]], of_one_node: list[list[int]]
) -> None:
    assert undisturbed(nodes.server, prompts, NEW_TOKENS) == of_one_node
    assert values(nodes.server)["sparse_rows_total"] > 0
    (own,) = cache_ranks(nodes.server)  # that of node 1 is not asked from here
    assert own["values"]["fetched_rows_total"] > 0
    info = nodes.server.get("/tandemkv/status")[1]["inference_rank"]["info"]
    assert "2 processes on 2 nodes" in info["placement"]


def test_each_node_has_a_scheduler_and_its_cache_rank(nodes: Nodes) -> None:
    listening = set()
    for number, agent in enumerate(nodes.agents):
        sglang, cache = workers(agent.pid)
        titles = [" ".join(process.cmdline()).strip() for process in schedulers(sglang)]
        assert titles == [f"sglang::scheduler_TP{number}"]
        assert sum("cache-rank" in " ".join(child.cmdline()) for child in cache.children()) == 1
        for process in (agent, *agent.children(recursive=True)):
            found = process.net_connections("tcp")
            listening |= {each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}
    assert {path.name for path in nodes.far_run_dir.glob("*.log")} == {
        "cache_rank1.log",
        "sglang.log",
    }


def test_each_node_has_metrics_of_its_own(nodes: Nodes) -> None:
    name = 'tandemkv_cache_selections_total{cache_rank="%d"'
    wait_for(lambda: name % 1 in nodes.far_metrics(), "node 1 has no metrics", 20.0)
    wait_for(lambda: name % 0 in nodes.server.get("/metrics")[1], "node 0 has no metrics", 20.0)
    assert name % 0 not in nodes.far_metrics()


def test_the_cache_rank_of_node_1_killed_while_requests_decode(
    nodes: Nodes, prompts: list[list[int]], of_one_node: list[list[int]]
) -> None:
    killed, (own,) = nodes.far_cache_rank(), pids(nodes.server)
    grown = killed_while_decoding(nodes.server, prompts, of_one_node, pid=killed)
    names = ("pauses_total", "restored_rows_total", "reseeded_rows_total")
    assert [grown[name] for name in names] == [1, REQUESTS, 0]
    assert nodes.far_cache_rank() not in (0, killed)
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


def test_sigterm_to_the_agent_of_node_1_ends_both_nodes(
    nodes: Nodes, prompts: list[list[int]], of_one_node: list[list[int]]
) -> None:
    """The last one: requests under way are finished, and nothing is left."""
    agents = nodes.agents
    processes = [p for agent in agents for p in (agent, *agent.children(recursive=True))]
    segments = segments_of(processes)
    flush(nodes.server)
    with ThreadPoolExecutor(len(prompts) + 1) as pool:
        streams, futures = begin(pool, nodes.server, prompts, NEW_TOKENS)
        wait_for(lambda: all(stream.tokens for stream in streams), "no request begins", 60.0)
        agents[1].send_signal(signal.SIGTERM)
        for future in futures:
            future.result()
    assert [stream.error for stream in streams] == [""] * REQUESTS
    assert [stream.tokens for stream in streams] == of_one_node
    for agent in agents:
        agent.wait(END_S)
    wait_for(lambda: not any(p.is_running() for p in processes), "processes are left", 5.0)
    assert "another node has ended the server\nstopped\n" in nodes.server.log.read_text()
    run_dirs = (nodes.server.run_dir, nodes.far_run_dir)
    for run_dir in run_dirs:
        assert run_dir is not None
        assert {path.suffix for path in run_dir.iterdir()} == {".log"}
    assert [path for path in segments if path.exists()] == []
