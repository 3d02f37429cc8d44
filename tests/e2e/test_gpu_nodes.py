# SPDX-License-Identifier: Apache-2.0
"""SGLang over two nodes with GPUs, played on one machine, gives the tokens of ``--tp 2``.

Each node sees one GPU, or with a cache rank of its own two, and has a loopback address. NCCL takes
it for another host, whose sums come by TCP. Where fewer than four GPUs are, nodes with cache ranks
have the same two, one for both models and one for both cache ranks: by turns, without CUDA MPS,
where a process that is killed ends others on its GPU. ``TANDEMKV_TEST_DEVICE=cpu`` does the same on
a CPU, by gloo.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import Nodes, schedulers, two_nodes, workers
from exactness import flush, run
from nothing_lost import Stream, read, values, wait_for
from random_model import make_random_model
from rank_servers import Server, ours
from stock_agreement import (
    DEVICE,
    DTYPE,
    NEW_TOKENS,
    agreement,
    check,
    killed_while,
    prompts_of,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

_TWO_GPUS = [pytest.mark.multi_gpu(2)] if DEVICE == "cuda" else []
_SELECTION: dict[str, Any] = {"policy": "look_ahead", "dense_tokens": 0, "exact_layers": []}
# Of cache ranks' GPUs the defaults are others, which choose other tokens.
_SELECTION |= {"late_layers": 0, "predictor_dtype": "native"}
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
_LONG = 256 if DEVICE == "cuda" else 64
"""Tokens of an answer in the middle of which a process is killed."""


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


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(0, marks=_TWO_GPUS, id="in_process"),
        pytest.param(1, marks=_TWO_GPUS, id="cache_ranks"),
    ],
)
def nodes(
    of_one_node: list[dict[str, Any]], request: pytest.FixtureRequest
) -> Iterator[tuple[Nodes, int]]:
    """Two nodes, and how many cache ranks each has."""
    del of_one_node  # that server has ended: never two at a time
    count: int = request.param
    visible, each = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(","), 1 + count
    apart = each if torch.cuda.device_count() >= 2 * each else 0
    near, far = (
        {
            "CUDA_VISIBLE_DEVICES": ",".join(visible[n * apart :][:each]),
            "NCCL_HOSTID": f"node{n}",
            "NCCL_IB_DISABLE": "1",
        }
        for n in range(2)
    )
    settings = _SETTINGS | {"cache_ranks": 2 * count}
    with two_nodes(settings, processes=1 + count, device=DEVICE, environs=(near, far)) as found:
        yield found, count


def check_answers(
    nodes: Nodes, prompts: list[list[int]], want: list[dict[str, Any]], what: str
) -> None:
    flush(nodes.server)
    found = run(nodes.server, prompts, new_tokens=NEW_TOKENS, at_once=1)
    check(agreement(found, want), what)


def test_tokens_are_those_of_one_node(
    nodes: tuple[Nodes, int], prompts: list[list[int]], of_one_node: list[dict[str, Any]]
) -> None:
    both, num_cache_ranks = nodes
    check_answers(both, prompts, of_one_node, "two nodes and one")
    assert values(both.server)["sparse_rows_total"] > 0
    place = both.server.get("/tandemkv/status")[1]["inference_rank"]["info"]["placement"]
    assert ("link shared" if num_cache_ranks else "link local") in place
    assert "on 2 nodes" in place
    engine = both.server.values()[1 if num_cache_ranks else 0]
    assert engine["fetched_rows_total"] > 0


def test_requests_go_on_where_a_cache_rank_of_one_node_was_killed(
    nodes: tuple[Nodes, int], prompts: list[list[int]]
) -> None:
    both, num_cache_ranks = nodes
    if not num_cache_ranks:
        pytest.skip("without cache ranks none is killed")
    longest = sorted(prompts, key=len)[-1:]
    flush(both.server)  # the prompt is computed alike: chunks round otherwise than prefixes
    want = run(both.server, longest, new_tokens=_LONG, at_once=1)
    flush(both.server)
    pid = both.server.cache_rank_pid()
    found = killed_while(both.server, longest, pid, new_tokens=_LONG, at_once=1)
    assert [answer["ids"] for answer in found] == [answer["ids"] for answer in want]
    assert values(both.server)["pauses_total"] == 1


def is_ready(server: Server) -> bool:
    try:
        return bool(server.get("/tandemkv/ready")[0] == 200)
    except OSError:
        return False


def test_sglang_of_both_nodes_starts_again_if_one_dies_while_it_decodes(
    nodes: tuple[Nodes, int], prompts: list[list[int]], of_one_node: list[dict[str, Any]]
) -> None:
    """NCCL's sums of the other node wait for the one that is gone."""
    both, _ = nodes
    schedulers_there = [s for worker in workers(both.agent.pid) for s in schedulers(worker)]
    (scheduler,) = schedulers_there
    flush(both.server)
    stream = Stream()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(read, both.server, prompts[0], 3000, stream)
        wait_for(lambda: len(stream.tokens) > 1, "nothing decodes", 60.0)
        scheduler.kill()
        future.result()
    assert stream.error
    wait_for(lambda: not is_ready(both.server), "node 0 is ready", 120.0)
    wait_for(lambda: is_ready(both.server), "not ready again", _READY_S)
    check_answers(both, prompts, of_one_node, "after a restart")


def test_sigterm_to_the_agent_of_node_1_ends_both_nodes(nodes: tuple[Nodes, int]) -> None:
    """The last one: it ends the server."""
    both, _ = nodes
    agents, processes = both.agents, both.processes()
    agents[1].send_signal(signal.SIGTERM)
    for agent in agents:
        agent.wait(60.0)
    wait_for(lambda: not any(p.is_running() for p in processes), "processes are left", 10.0)
    assert "another node has ended the server\nstopped\n" in both.server.log.read_text()
