# SPDX-License-Identifier: Apache-2.0
"""A cache rank is killed while SGLang's overlap scheduler has one pass under way behind another.

`serve` runs it with an engine in SGLang's process only; this is what has to hold before it does so
with one in a process of its own.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from exactness import flush
from nothing_lost import (
    begin,
    make_prompts,
    repeat,
    serving_pid,
    settings_of,
    undisturbed,
    values,
    wait_for,
    waiting_ranks,
)
from rank_servers import Server, ours

# On CPUs nobody serves so, and it takes a server of its own.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

_START = (str(Path(__file__).with_name("overlapped_server.py")), "serve")
_REQUESTS, _NEW_TOKENS = 8, 24


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts(_REQUESTS)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    settings = settings_of(num_requests=_REQUESTS, standby=True)
    with ours(settings, start=_START) as found:
        assert found.run_dir is not None
        log = (found.run_dir / "sglang.log").read_text()
        assert "disable_overlap_schedule=False" in log
        yield found


@pytest.fixture(scope="module")
def want(server: Server, prompts: list[list[int]]) -> list[list[int]]:
    return undisturbed(server, prompts, _NEW_TOKENS)


@pytest.mark.parametrize("seed", range(4))
def test_killed_in_the_middle_of_a_step(
    server: Server, prompts: list[list[int]], want: list[list[int]], seed: int
) -> None:
    wait_for(lambda: waiting_ranks(server) > 0, "no cache rank waits")
    found = repeat(server, prompts, want, _NEW_TOKENS, random.Random(seed))
    assert found["in_flight"] == found["ended"] == found["same_tokens"] == _REQUESTS, found
    assert found["restored_rows"] == _REQUESTS, found
    assert found["reseeded_rows"] == found["rows_left"] == found["slots_left"] == 0, found


def test_killed_while_prompts_are_computed(
    server: Server, prompts: list[list[int]], want: list[list[int]]
) -> None:
    flush(server)
    wait_for(lambda: waiting_ranks(server) > 0, "no cache rank waits")
    before = values(server)
    with ThreadPoolExecutor(_REQUESTS + 1) as pool:
        streams, futures = begin(pool, server, prompts, _NEW_TOKENS)
        wait_for(
            lambda: values(server)["extend_steps_total"] > before["extend_steps_total"] + 1,
            "no prompt begins",
        )
        os.kill(serving_pid(server), signal.SIGKILL)
        for future in futures:
            future.result()
    assert [stream.error for stream in streams] == [""] * _REQUESTS
    assert [stream.tokens for stream in streams] == want
    assert values(server)["pauses_total"] > before["pauses_total"]
