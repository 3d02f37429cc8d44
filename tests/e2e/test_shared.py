# SPDX-License-Identifier: Apache-2.0
"""Link ``shared``: the engine in a process of its own, in memory that both ranks map."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from exactness import compare, flush, run
from mapped_memory import Memory, mapped, scheduler_pid
from rank_servers import Server, ours

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

COVERING = {
    "policy": "look_ahead",
    "budget_tokens": 600,
    "num_recent_tokens": 32,
    "dense_while_fits": False,
}
RESIDENT = 4 + 2 * 600


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Everything is selected, nothing skipped: what the engine does decides every token."""
    with ours({"selection": COVERING}) as found:
        yield found


def test_tokens_equal_stock(
    server: Server, prompts: list[list[int]], new_tokens: int, reference: list[Any]
) -> None:
    alone = compare(run(server, prompts, new_tokens=new_tokens, at_once=1), reference)
    assert alone["pass"], alone
    warm = compare(run(server, prompts, new_tokens=new_tokens, at_once=4), reference)
    assert warm["pass"], f"with radix hits, four at a time: {warm}"
    assert warm["cached_tokens"] > 0
    flush(server)
    cold = compare(run(server, prompts, new_tokens=new_tokens, at_once=4), reference)
    assert cold["pass"], f"after a flush, four at a time: {cold}"
    inference, cache = server.values()
    assert inference["sparse_rows_total"] > 0
    assert inference["exchange_wait_us_total"] > 0
    assert cache["fetched_rows_total"] > 0
    assert cache["selections_total"] > 0


def test_nothing_between_the_ranks_is_tcp(server: Server) -> None:
    """One listener in all: the HTTP port. Nothing is sent; memory is mapped by both."""
    port = int(server.url.rpartition(":")[2])
    found = set()
    for process in server.processes():
        for connection in psutil.Process(process.pid).net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                found.add(connection.laddr.port)
    assert found == {port}
    holding = [process.pid for process in server.processes() if "kv" in mapped(process.pid)]
    assert sorted(holding) == sorted([scheduler_pid(server), server.cache_rank_pid()])


def test_memory_outlives_the_cache_rank(server: Server, token_ids: list[int]) -> None:
    """K/V, and the engine's own books, are read after it was killed; then its successor goes on."""
    flush(server)
    memory = Memory(server, num_resident=RESIDENT)
    before = memory.snapshot()
    body: dict[str, Any] = {
        "input_ids": token_ids[:700],
        "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
    }
    answer = server.generate(**body)["text"]
    (row,) = memory.changed_rows(before)
    slots = memory.table[row, :700]
    keys = memory.pool[:, :, slots].copy()
    assert (keys != 0).any((1, 2, 3, 4)).all()
    kill_cache_rank(server)
    after = Memory(server, num_resident=RESIDENT)  # found by their descriptors, not kept by us
    assert after.mismatches(row) == 0
    assert (after.positions[:, row] >= 0).sum() > 30 * 3 * 600
    assert (after.pool[:, :, slots] == keys).all()
    wait_ready(server)
    assert server.generate(**body)["text"] == answer


def kill_cache_rank(server: Server) -> None:
    """Kill it, and return when nothing of it runs any more."""
    process = psutil.Process(server.cache_rank_pid())
    process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 5.0
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_ready(server: Server) -> None:
    deadline = time.monotonic() + 60
    while server.get("/tandemkv/ready")[0] != 200:
        assert time.monotonic() < deadline, "the server does not come back"
        time.sleep(0.1)


def test_kill_in_mid_stream(server: Server, prompts: list[list[int]], token_ids: list[int]) -> None:
    """Clear errors at once, then the same answers from the next engine on the same memory."""
    body = {
        "input_ids": token_ids[:400],
        "sampling_params": {"max_new_tokens": 600, "temperature": 0, "ignore_eos": True},
    }
    short = {"input_ids": prompts[0], "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
    before = server.generate(**short)
    with ThreadPoolExecutor(2) as pool:
        pending = [pool.submit(server.post, "/generate", body) for _ in range(2)]
        steps = server.values()[1]["steps_total"]
        while server.values()[1]["steps_total"] < steps + 20:
            time.sleep(0.1)
        os.kill(server.cache_rank_pid(), signal.SIGKILL)
        killed = time.monotonic()
        answers = [p.result(timeout=60) for p in pending]
        took = time.monotonic() - killed
    assert took < 5.0, f"requests ended {took:.1f} s after the kill"
    for code, text in answers:
        assert code == 503, (code, text)
        assert "cache rank" in str(text)
    wait_ready(server)
    assert server.generate(**short)["text"] == before["text"]
    assert server.values()[0]["cache_rank_lost_total"] >= 1
