# SPDX-License-Identifier: Apache-2.0
"""Link ``message``: the cache rank is met by messages, here between addresses of one machine.

All tests but the first ask the pods of deploy/kubernetes/two-nodes: processes with the arguments of
the manifests, of which model, sizes, the HTTP port and addresses are this machine's, and mounts are
folders. They go in this order.
"""

from __future__ import annotations

import random
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
from containers import Container, await_ready, can_be_apart
from exactness import check_with_hits, run
from manifests import CACHE_RANK_POD, TWO_NODES, containers_of, manifest, pod_of
from nothing_lost import wait_for
from rank_servers import CAPACITY_TOKENS, CHUNK_TOKENS, Server, free_port, model_dir, ours

from tandemkv.cache_rank.protocol.message.keys import make_keys

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.usefixtures("deep_model")]

_COVERING = {
    "policy": "look_ahead",
    "budget_tokens": 600,
    "resident_factor": 2.0,
    "num_recent_tokens": 32,
    "dense_while_fits": False,
    "index_dtype": "int8",
    "predictor_dtype": "int8",
    "exact_layers": [1],
    "late_layers": 1,
}
"""Selects in every step; a late layer, samples, and an exact layer that attends where K/V are."""
_NEAR, _FAR = "127.0.0.1", "127.0.0.3"
_SERVICE, _PORT = "tandemkv-cache-rank", 7400
_MANY = 48
"""Tokens of an answer in whose midst something happens."""
_SMALL = {"policy": "look_ahead", "budget_tokens": 96, "resident_factor": 1.0, "fetch_cap": 8}


def _tokens(
    server: Server, prompts: list[list[int]], num_tokens: int = 24, *, at_once: int = 2
) -> list[list[int]]:
    return [x["ids"] for x in run(server, prompts, new_tokens=num_tokens, at_once=at_once)]


@pytest.mark.usefixtures("on_random_model")
def test_tokens_equal_stock(
    prompts: list[list[int]], new_tokens: int, random_reference: list[Any]
) -> None:
    with ours({"transport": "message", "selection": _COVERING}) as server:
        check_with_hits(server, prompts, random_reference, new_tokens=new_tokens)
        inference, _ = server.values()
        _, status = server.get("/tandemkv/status")
    assert inference["sparse_rows_total"] > 0
    assert inference["exact_layer_rows_total"] > 0
    assert status["inference_rank"]["info"]["link"] == "message"


@dataclass(frozen=True)
class Nodes:
    """The two pods of deploy/kubernetes/two-nodes, and the server that they make."""

    inference_rank: Container
    cache_rank: Container
    server: Server


def _settings_here(port: int) -> dict[str, Any]:
    """The deployed settings, for the model and the size of this machine."""
    deployed = manifest(f"{TWO_NODES}/settings")
    del deployed["max_context"]
    found: dict[str, Any] = deployed | {
        "model": model_dir(),
        "host": "127.0.0.1",
        "allow_remote": False,
        "port": port,
        "max_running_requests": 6,
        "chunked_prefill_size": CHUNK_TOKENS,
        "cache": {"capacity_tokens": CAPACITY_TOKENS},
        "selection": _SMALL,
    }
    if not can_be_apart():  # no names of its own
        address = deployed["cache_rank_address"].replace(_SERVICE, _FAR)
        found["cache_rank_address"] = address
    return found


def _container(pod: str, work: Path, settings: dict[str, Any], address: str) -> Container:
    """Return the rank of a pod, whose init container has run."""
    paths = {"/run/tandemkv": "run", "/settings": "settings", "/secret": "s", "/keys": "k"}
    made = {mount: work / folder for mount, folder in paths.items()}
    for path in made.values():
        path.mkdir(parents=True)
    own = settings | {"link_keys": str(made["/keys"])}
    (made["/settings"] / "settings.yaml").write_text(yaml.safe_dump(own))
    for word in containers_of(pod)["keys"]["args"]:  # as the kubelet has it for a group
        file = made["/secret"] / Path(word).name
        shutil.copyfile(work.parent / "keys" / file.name, file)
        file.chmod(0o640)
    hosts = work / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{_FAR} {_SERVICE}\n")
    keys, rank = (
        Container(spec, made, work, address=address, hosts=hosts)
        for spec in containers_of(pod).values()
    )
    keys.run()
    return rank


@pytest.fixture(scope="module")
def nodes(of_one_process: list[list[list[int]]]) -> Iterator[Nodes]:
    """Both pods. The cache rank's comes when the inference rank waits for it already."""
    del of_one_process  # that server has ended: never two at a time
    work, port = Path(tempfile.mkdtemp(prefix="tkv-")), free_port()
    make_keys(work / "keys")
    settings = _settings_here(port)
    inference = _container(TWO_NODES, work / "near", settings, _NEAR)
    cache_rank = _container(CACHE_RANK_POD, work / "far", settings, _FAR)
    try:
        inference.start()
        log = work / "near" / "run" / "link" / "pump.log"
        wait_for(
            lambda: log.exists() and "nobody listens there" in log.read_text(), "no pump", 120.0
        )
        cache_rank.start()
        cache_rank.await_start()
        server = Server(f"http://127.0.0.1:{port}", inference.main.pid, inference.log, log.parent)
        await_ready(server, cache_rank, inference)
        yield Nodes(inference, cache_rank, server)
    finally:
        for container in (inference, cache_rank):
            container.kill()
        shutil.rmtree(work)


def _long_prompts(token_ids: list[int], seed: int = 5) -> list[list[int]]:
    rng = random.Random(seed)
    starts = [rng.randrange(len(token_ids) - 600) for _ in range(4)]
    return [token_ids[start : start + 400 + 30 * i] for i, start in enumerate(starts)]


def _rounds(server: Server, token_ids: list[int]) -> list[list[list[int]]]:
    prompts = _long_prompts(token_ids)
    return [_tokens(server, prompts, 12, at_once=1) for _ in range(2)]


@pytest.fixture(scope="module")
def of_one_process(token_ids: list[int]) -> list[list[list[int]]]:
    """What a server of one process answers, in two rounds and to other prompts."""
    with ours({"cache_ranks": 0, "selection": _SMALL}) as local:
        others = _tokens(local, _long_prompts(token_ids, 6)[:2], at_once=1)
        return [*_rounds(local, token_ids), others]


def test_each_pod_has_keys_that_nobody_else_reads(nodes: Nodes) -> None:
    for container in (nodes.inference_rank, nodes.cache_rank):
        files = list((container.log.parent / "k").iterdir())
        assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
        secret = [file.stem for file in files if file.suffix == ".key_secret"]
        assert secret == [container.name.replace("-", "_")]
    assert nodes.cache_rank.probe("readinessProbe") == 0


def test_tokens_equal_those_of_one_process(
    nodes: Nodes, token_ids: list[int], of_one_process: list[list[list[int]]]
) -> None:
    """Asked once, and again with prefixes that come back from the other host.

    A prefix that is there leaves fewer queries to seed a resident set by, so the second answers may
    differ from the first: those of one process do likewise.
    """
    assert _rounds(nodes.server, token_ids) == of_one_process[:2]


def test_it_listens_on_the_given_addresses_only(nodes: Nodes) -> None:
    mains = (nodes.inference_rank.main, nodes.cache_rank.main)
    found = {
        (connection.laddr.ip, connection.laddr.port)
        for main in mains
        for process in (main, *main.children(recursive=True))
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    http = (_NEAR, int(nodes.server.url.rpartition(":")[2]))
    assert (_FAR, _PORT) in found
    assert {ip for ip, _ in found - {http}} <= {_NEAR, _FAR}, found
    assert len(found) == 4, found  # HTTP, the door, and the two ends for K/V


def _answers_over(
    nodes: Nodes, token_ids: list[int], disturb: Callable[[], None]
) -> list[list[int]]:
    """Return the answers to requests that are being answered when `disturb` is called."""
    steps = nodes.server.values()[0]["decode_steps_total"]
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(_tokens, nodes.server, _long_prompts(token_ids)[:2], _MANY)
        wait_for(
            lambda: nodes.server.values()[0]["decode_steps_total"] > steps + 2, "no step", 60.0
        )
        disturb()
        return answers.result(timeout=180.0)


def test_a_killed_cache_rank_costs_a_pause(nodes: Nodes, token_ids: list[int]) -> None:
    asked = _long_prompts(token_ids)[:2]
    _tokens(nodes.server, asked, 1)  # from here on the radix tree has the prompts
    want = _tokens(nodes.server, asked, _MANY)
    (engine,) = [p for p in nodes.cache_rank.main.children() if "cache-rank" in p.cmdline()]
    assert _answers_over(nodes, token_ids, engine.kill) == want
    inference, _ = nodes.server.values()
    assert inference["cache_rank_lost_total"] == 1
    assert inference["recomputed_requests_total"] == 0


def test_a_pod_that_is_lost_with_the_k_and_v_is_made_again(
    nodes: Nodes, token_ids: list[int], of_one_process: list[list[list[int]]]
) -> None:
    """Requests go on, computed again from their tokens, and later ones are answered as ever."""

    def make_again() -> None:
        nodes.cache_rank.kill()
        shutil.rmtree(nodes.cache_rank.log.parent / "run" / "link")  # it was the pod's
        nodes.cache_rank.start()

    answers = _answers_over(nodes, token_ids, make_again)
    assert [len(answer) for answer in answers] == [_MANY] * 2
    inference, _ = nodes.server.values()
    assert inference["recomputed_requests_total"] >= 1
    assert inference["requests_failed_total"] == 0
    found = _tokens(nodes.server, _long_prompts(token_ids, 6)[:2], at_once=1)
    assert found == of_one_process[2]


def test_sigterm_to_both_pods_drains(nodes: Nodes, token_ids: list[int]) -> None:
    every = [
        process
        for container in (nodes.inference_rank, nodes.cache_rank)
        for process in (container.main, *container.main.children(recursive=True))
    ]

    def stop() -> None:
        nodes.cache_rank.main.send_signal(signal.SIGTERM)
        nodes.inference_rank.stop(pod_of(TWO_NODES)["terminationGracePeriodSeconds"])

    answers = _answers_over(nodes, token_ids, stop)
    assert [len(answer) for answer in answers] == [_MANY] * 2
    nodes.cache_rank.await_end(pod_of(CACHE_RANK_POD)["terminationGracePeriodSeconds"])
    wait_for(lambda: not any(p.is_running() for p in every), "processes are left", 5.0)
