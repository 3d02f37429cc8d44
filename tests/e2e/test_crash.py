# SPDX-License-Identifier: Apache-2.0
"""Each process of a server killed outright: one server for all of it, in this order.

In CI `test_life` kills the scheduler, too, and `test_nothing_lost` the cache rank.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import pytest
from rank_servers import Server, ours

from tandemkv.server.soak.processes import CACHE_RANK, HTTP, SCHEDULER, ServerProcesses

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

READY_AGAIN_S = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with ours({"transport": "shared"}) as started:
        while "Ctrl-C stops" not in started.log.read_text():  # from then on it supervises
            time.sleep(0.1)
        yield started


def ready_limit_s() -> float:
    """A minute, where at most two processes a core want to run; as much longer as more do."""
    return READY_AGAIN_S * max(1.0, os.getloadavg()[0] / (2 * (os.cpu_count() or 1)))


def complete(server: Server) -> int:
    body = {"prompt": "The capital of France is", "max_tokens": 2, "temperature": 0}
    return server.post("/v1/completions", body, 60.0)[0]


def is_ready(server: Server) -> bool:
    with contextlib.suppress(OSError):
        return bool(server.get("/tandemkv/ready", 5.0)[0] == 200)
    return False


@pytest.mark.parametrize(
    "role",
    [*(pytest.param(role, marks=pytest.mark.slow) for role in (CACHE_RANK, SCHEDULER)), HTTP],
)
def test_it_is_ready_again_within_a_minute_of_a_crash(server: Server, role: str) -> None:
    processes = ServerProcesses(server.pid, server.run_dir)
    killed = processes.pids()[role]
    os.kill(killed, 9)
    begun = time.monotonic()
    while True:
        waited = time.monotonic() - begun
        log = server.log.read_text()
        assert waited < ready_limit_s(), log
        is_another = processes.pids().get(role, killed) != killed
        if is_another and is_ready(server) and complete(server) == 200:
            break
        time.sleep(0.2)
    print(f"{role}: ready after {waited:.1f} s")
