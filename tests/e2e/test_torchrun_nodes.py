# SPDX-License-Identifier: Apache-2.0
"""Two agents of torchrun, as on two nodes: the ranks meet by messages between two addresses.

One server for all of it, in this order.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from agents import ENVIRONMENT, other_agent, segments_of, torchrun, workers
from exactness import compare, run
from nothing_lost import wait_for
from rank_servers import (
    SIZES,
    SMALL_SELECTION,
    Server,
    free_port,
    model_dir,
    ours,
)

from tandemkv.cache_rank.protocol.message.keys import make_keys

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.usefixtures("deep_model")]

NEAR, FAR = "127.0.0.1", "127.0.0.3"
LONG_TOKENS = 24
END_S = 40.0
"""30 s until torchrun kills, and some to end."""
SELECTION = SMALL_SELECTION | {"late_layers": 0}
"""Else the first layer is selected for a step ahead, as it is not where both map one memory."""


@dataclass(frozen=True)
class Nodes:
    """The server, whose agent is the first node's, and the agent of the cache rank's node."""

    server: Server
    agent: psutil.Process
    work: Path

    @property
    def agents(self) -> tuple[psutil.Process, psutil.Process]:
        return psutil.Process(self.server.pid), self.agent

    @property
    def run_dir(self) -> Path:
        """Run directory of the cache rank, which torchrun's process chose."""
        (found,) = self.work.glob("tandemkv-*-cache0")
        return found

    def engine(self) -> psutil.Process:
        """The process of the cache rank."""
        (worker,) = workers(self.agent.pid)
        (found,) = [child for child in worker.children() if "cache-rank" in child.cmdline()]
        return found


@pytest.fixture(scope="module")
def nodes(of_serve: list[Any]) -> Iterator[Nodes]:
    del of_serve  # that server has ended: never two at a time
    work = Path(tempfile.mkdtemp(prefix="tkv-"))  # short: sockets lie in it
    store, config = work / "store", work / "settings.yaml"
    make_keys(work / "keys")
    settings = {
        "cache_rank_address": f"tcp://{FAR}:{free_port()}",
        "link_keys": str(work / "keys"),
        "selection": SELECTION,
    }
    config.write_text(yaml.safe_dump(SIZES | settings))
    environ = ENVIRONMENT | {"TMPDIR": str(work), "XDG_RUNTIME_DIR": str(work)}
    start = torchrun(store, 1, nodes=2, node=FAR)
    argv = [*start, model_dir(), "--device", "cpu", "--config", str(config)]
    near = torchrun(store, 1, nodes=2, node=NEAR)
    try:
        with (
            other_agent(argv, work, environ) as far,
            ours(settings, environ=environ, start=near) as server,
        ):
            wait_for(lambda: "Ctrl-C stops" in server.log.read_text(), "no banner", 30.0)
            yield Nodes(server, psutil.Process(far), work)
    finally:
        shutil.rmtree(work)


def long_answer(server: Server, prompt: list[int]) -> list[int]:
    body = {"max_new_tokens": LONG_TOKENS, "temperature": 0, "ignore_eos": True}
    found = server.generate(input_ids=prompt, sampling_params=body)
    return list(found["output_ids"])


def answer_over(server: Server, prompt: list[int], disturb: Callable[[], object]) -> list[int]:
    """Return the answer to a request that is being answered when `disturb` is called."""
    steps = server.values()[0]["decode_steps_total"]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(long_answer, server, prompt)
        wait_for(lambda: server.values()[0]["decode_steps_total"] > steps + 2, "no step", 60.0)
        disturb()
        return answer.result(timeout=120.0)


def test_tokens_are_those_of_serve(
    nodes: Nodes, of_serve: list[Any], small_asked: list[list[int]], new_tokens: int
) -> None:
    found = compare(run(nodes.server, small_asked, new_tokens=new_tokens, at_once=1), of_serve)
    assert found["pass"], found
    assert nodes.server.values()[0]["sparse_rows_total"] > 0
    _, status = nodes.server.get("/tandemkv/status")
    assert status["inference_rank"]["info"]["link"] == "message"


def test_each_node_has_its_ranks(nodes: Nodes) -> None:
    (first,), (second,) = (workers(agent.pid) for agent in nodes.agents)
    assert [worker.environ()["RANK"] for worker in (first, second)] == ["0", "1"]
    below = [" ".join(child.cmdline()) for child in first.children()]
    assert sum("sglang.launch_server" in words for words in below) == 1
    assert not any("cache-rank" in words for words in below)
    assert nodes.engine().ppid() == second.pid
    assert [path.name for path in nodes.run_dir.glob("*.log")] == ["cache_rank.log"]


def test_a_killed_cache_rank_costs_a_pause_and_no_token(
    nodes: Nodes, small_asked: list[list[int]]
) -> None:
    want, killed = long_answer(nodes.server, small_asked[-1]), nodes.engine()
    before = [worker.pid for agent in nodes.agents for worker in workers(agent.pid)]
    assert answer_over(nodes.server, small_asked[-1], killed.kill) == want
    assert [worker.pid for agent in nodes.agents for worker in workers(agent.pid)] == before
    assert nodes.engine().pid != killed.pid
    inference, _ = nodes.server.values()
    assert inference["cache_rank_lost_total"] == 1
    assert inference["recomputed_requests_total"] == 0


def test_sigterm_to_both_agents_drains_and_leaves_nothing(
    nodes: Nodes, small_asked: list[list[int]]
) -> None:
    run_dir, agents = nodes.run_dir, nodes.agents
    processes = [p for agent in agents for p in (agent, *agent.children(recursive=True))]
    segments = segments_of(processes)

    def stop() -> None:
        for agent in reversed(agents):
            agent.send_signal(signal.SIGTERM)

    assert len(answer_over(nodes.server, small_asked[-1], stop)) == LONG_TOKENS
    for agent in agents:
        agent.wait(END_S)
    wait_for(lambda: not any(p.is_running() for p in processes), "processes are left", 5.0)
    assert nodes.server.log.read_text().count("\nstopped\n") == 1
    assert not run_dir.exists()
    assert nodes.server.run_dir is not None
    assert {path.suffix for path in nodes.server.run_dir.iterdir()} == {".log"}
    left = {path.name for path in nodes.work.iterdir() if "torchelastic" not in path.name}
    assert left == {"keys", "store", "settings.yaml", "far.log"}  # and torchrun's own folder
    assert [path for path in segments if path.exists()] == []
