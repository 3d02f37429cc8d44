# SPDX-License-Identifier: Apache-2.0
"""SGLang over two nodes with a GPU each, played on one machine, gives the tokens of ``--tp 2``.

Each node sees one of two GPUs and has a loopback address, and NCCL takes it for another host, whose
sums come by TCP. ``TANDEMKV_TEST_DEVICE=cpu`` does the same on a CPU, by gloo.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from agents import Nodes, schedulers, two_nodes, workers
from exactness import flush, run
from nothing_lost import Stream, read, values, wait_for
from random_model import make_random_model
from rank_servers import Server, ours
from stock_agreement import DEVICE, DTYPE, NEW_TOKENS, agreement, check, prompts_of

pytestmark = [
    pytest.mark.e2e,
    *([pytest.mark.multi_gpu(2)] if DEVICE == "cuda" else []),
    pytest.mark.timeout(1800),
]

_SELECTION: dict[str, Any] = {"policy": "look_ahead", "dense_tokens": 0, "exact_layers": []}
_SELECTION |= (
    {"budget_tokens": 256} if DEVICE == "cuda" else {"budget_tokens": 64, "num_recent_tokens": 16}
)
_SETTINGS = {
    "tensor_parallel": 2,
    "cache_ranks": 0,
    "dtype": DTYPE,
    "selection": _SELECTION,
    "sglang_args": ["--sampling-backend", "pytorch", "--grammar-backend", "none"],
}
_READY_S = 600.0


@pytest.fixture(scope="module")
def prompts(token_ids: list[int]) -> list[list[int]]:
    return prompts_of(token_ids)


@pytest.fixture(scope="module")
def of_one_node(
    prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[dict[str, Any]]]:
    """What ``serve --tp 2 --cache-ranks 0`` says; the model stays for the nodes."""
    folder: Path = tmp_path_factory.mktemp("model")
    make_random_model(folder, head_dim=64)  # which is one of FlashInfer's
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEMKV_TEST_MODEL", str(folder))
        with ours(_SETTINGS, device=DEVICE) as server:
            found = run(server, prompts, new_tokens=NEW_TOKENS, at_once=1)
        yield found


@pytest.fixture(scope="module")
def nodes(of_one_node: list[dict[str, Any]]) -> Iterator[Nodes]:
    del of_one_node  # that server has ended: never two at a time
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    near, far = (
        {"CUDA_VISIBLE_DEVICES": visible[n], "NCCL_HOSTID": f"node{n}", "NCCL_IB_DISABLE": "1"}
        for n in range(2)
    )
    with two_nodes(_SETTINGS, processes=1, device=DEVICE, environs=(near, far)) as found:
        yield found


def check_answers(
    nodes: Nodes, prompts: list[list[int]], want: list[dict[str, Any]], what: str
) -> None:
    found = run(nodes.server, prompts, new_tokens=NEW_TOKENS, at_once=1)
    check(agreement(found, want), what)


def test_tokens_are_those_of_one_node(
    nodes: Nodes, prompts: list[list[int]], of_one_node: list[dict[str, Any]]
) -> None:
    check_answers(nodes, prompts, of_one_node, "two nodes and one")
    found = values(nodes.server)
    assert found["sparse_rows_total"] > 0
    assert found["fetched_rows_total"] > 0
    info = nodes.server.get("/tandemkv/status")[1]["inference_rank"]["info"]
    assert "link local" in info["placement"]
    assert "on 2 nodes" in info["placement"]


def is_ready(server: Server) -> bool:
    try:
        return bool(server.get("/tandemkv/ready")[0] == 200)
    except OSError:
        return False


def test_sglang_of_both_nodes_starts_again_if_one_dies_while_it_decodes(
    nodes: Nodes, prompts: list[list[int]], of_one_node: list[dict[str, Any]]
) -> None:
    """NCCL's sums of the other node wait for the one that is gone."""
    (worker,) = workers(nodes.agent.pid)
    (scheduler,) = schedulers(worker)
    flush(nodes.server)
    stream = Stream()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(read, nodes.server, prompts[0], 3000, stream)
        wait_for(lambda: len(stream.tokens) > 1, "nothing decodes", 60.0)
        scheduler.kill()
        future.result()
    assert stream.error
    wait_for(lambda: not is_ready(nodes.server), "node 0 is ready", 120.0)
    wait_for(lambda: is_ready(nodes.server), "not ready again", _READY_S)
    check_answers(nodes, prompts, of_one_node, "after a restart")


def test_sigterm_to_the_agent_of_node_1_ends_both_nodes(nodes: Nodes) -> None:
    """The last one: it ends the server."""
    agents, processes = nodes.agents, nodes.processes()
    agents[1].send_signal(signal.SIGTERM)
    for agent in agents:
        agent.wait(60.0)
    wait_for(lambda: not any(p.is_running() for p in processes), "processes are left", 10.0)
    assert "another node has ended the server\nstopped\n" in nodes.server.log.read_text()
