# SPDX-License-Identifier: Apache-2.0
"""Each process of a server killed outright: one server for all of it, in this order.

In CI `test_life` kills the scheduler and the HTTP process, and `test_nothing_lost` the cache rank.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from life_cycle import ready_after_crash
from rank_servers import Server, ours

from tandemkv.server.soak.processes import CACHE_RANK, HTTP, SCHEDULER

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with ours({"transport": "shared"}) as started:
        while "Ctrl-C stops" not in started.log.read_text():  # from then on it supervises
            time.sleep(0.1)
        yield started


@pytest.mark.parametrize("role", [CACHE_RANK, SCHEDULER, HTTP])
def test_it_is_ready_again_within_a_minute_of_a_crash(server: Server, role: str) -> None:
    print(f"{role}: ready after {ready_after_crash(server, role):.1f} s")
