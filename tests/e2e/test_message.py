# SPDX-License-Identifier: Apache-2.0
"""Link ``message``: the cache rank is met by messages, here between addresses of one machine."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from exactness import compare, run
from nothing_lost import wait_for
from rank_servers import CAPACITY_TOKENS, Server, environment, free_port, model_dir, ours

from tandemkv.cache_rank.protocol.ipc import server_pid
from tandemkv.cache_rank.protocol.message.keys import make_keys

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

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
_SMALL = {"policy": "look_ahead", "budget_tokens": 96, "resident_factor": 1.0, "fetch_cap": 8}


def _tokens(
    server: Server, prompts: list[list[int]], num_tokens: int = 24, *, at_once: int = 2
) -> list[list[int]]:
    return [x["ids"] for x in run(server, prompts, new_tokens=num_tokens, at_once=at_once)]


def test_tokens_equal_stock(
    prompts: list[list[int]], new_tokens: int, reference: list[Any]
) -> None:
    """Also when the K/V are lost in the middle, with the process that holds them."""
    with ours({"transport": "message", "selection": _COVERING}) as server:
        alone = compare(run(server, prompts, new_tokens=new_tokens, at_once=1), reference)
        assert alone["pass"], alone
        together = compare(run(server, prompts, new_tokens=new_tokens, at_once=4), reference)
        assert together["pass"], f"with radix hits, four at a time: {together}"
        for wait_s in (1.5, 1.0, 0.5):  # until it has met a request in decode
            killer = threading.Timer(wait_s, _kill_holder, [server])
            killer.start()
            after = compare(run(server, prompts, new_tokens=new_tokens, at_once=4), reference)
            assert after["pass"], f"with K/V that were lost: {after}"
            killer.join()
            inference, _ = server.values()
            if inference["recomputed_requests_total"]:
                break
        _, status = server.get("/tandemkv/status")
    assert inference["recomputed_requests_total"] > 0
    assert inference["sparse_rows_total"] > 0
    assert inference["exact_layer_rows_total"] > 0
    assert status["inference_rank"]["info"]["link"] == "message"


def _kill_holder(server: Server) -> None:
    """Kill the process that has the K/V of a link on one host."""
    (holder,) = [p for p in server.processes() if "--address" in p.cmdline()]
    holder.kill()


@contextmanager
def _cache_rank(work: Path, tree: dict[str, Any], address: str) -> Iterator[int]:
    """Start ``tandemkv cache-rank --address``, as on another host."""
    config, log = work / "cache_rank.yaml", work / "cache_rank.log"
    config.write_text(yaml.safe_dump({"model": model_dir(), "device": "cpu", **tree}))
    argv = [
        *(sys.executable, "-P", "-m", "tandemkv.server", "cache-rank", "--config", str(config)),
        *("--run-dir", str(work / "far"), "--address", address, "--allow", "127.0.0.1,127.0.0.2"),
        "--standby",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=output, env=environment())
    try:
        yield process.pid
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, log.read_text()


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("link")


@pytest.fixture(scope="module")
def pair(work: Path) -> Iterator[tuple[Server, int]]:
    keys = work / "keys"
    make_keys(keys)
    shared = {
        "max_running_requests": 6,
        "cache": {"capacity_tokens": CAPACITY_TOKENS},
        "selection": _SMALL,
        "link_keys": str(keys),
    }
    address = f"tcp://127.0.0.3:{free_port()}"
    with (
        _cache_rank(work, shared, address) as pid,
        ours({**shared, "cache_rank_address": address}) as server,
    ):
        yield server, pid


def _long_prompts(token_ids: list[int]) -> list[list[int]]:
    rng = random.Random(5)
    starts = [rng.randrange(len(token_ids) - 600) for _ in range(4)]
    return [token_ids[start : start + 400 + 30 * i] for i, start in enumerate(starts)]


def test_tokens_equal_those_of_one_process(pair: tuple[Server, int], token_ids: list[int]) -> None:
    """Asked once, and again with prefixes that come back from the other host.

    A prefix that is there leaves fewer queries to seed a resident set by, so the second answers may
    differ from the first: those of one process do likewise.
    """
    server, _ = pair
    prompts = _long_prompts(token_ids)
    found = [_tokens(server, prompts, at_once=1) for _ in range(2)]
    with ours({"cache_ranks": 0, "selection": _SMALL}) as local:
        assert found == [_tokens(local, prompts, at_once=1) for _ in range(2)]


def test_a_killed_cache_rank_costs_a_pause(
    pair: tuple[Server, int], work: Path, token_ids: list[int]
) -> None:
    """The standby on its host takes its place."""
    server, pid = pair
    prompts = _long_prompts(token_ids)
    want = _tokens(server, prompts, 48)
    engine = server_pid(work / "far/heartbeat.sock")
    (standby,) = {
        p.pid for p in psutil.Process(pid).children() if "cache-rank" in p.cmdline()
    } - {engine}  # fmt: skip
    assert engine
    log = work / "far/standby.log"
    wait_for(lambda: f"process {engine} serves" in log.read_text(), "no cache rank waits")
    results: list[list[int]] = []

    def ask() -> None:
        results.extend(_tokens(server, prompts, 48))

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(2.0)
    os.kill(engine, signal.SIGKILL)
    thread.join()
    assert results == want
    assert server_pid(work / "far/heartbeat.sock") == standby
    inference, _ = server.values()
    assert inference["cache_rank_lost_total"] == 1


def test_it_listens_on_the_given_addresses_only(pair: tuple[Server, int]) -> None:
    server, pid = pair
    processes = [*server.processes(), psutil.Process(pid), *psutil.Process(pid).children(True)]
    found = {
        (connection.laddr.ip, connection.laddr.port)
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    http = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    others = {ip for ip, port in found - {http}}
    assert others <= {"127.0.0.3", "127.0.0.1"}, found
    assert len(found) == 4, found  # HTTP, the door, and the two ends for K/V
