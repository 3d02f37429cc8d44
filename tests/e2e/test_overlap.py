# SPDX-License-Identifier: Apache-2.0
"""``--overlap-passes``: a cache rank is killed while one pass is under way behind another."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from nothing_lost import (
    killed_while_prompts_are_computed,
    make_prompts,
    repeat,
    settings_of,
    undisturbed,
    wait_for,
    waiting_ranks,
)
from rank_servers import Server, ours

# On CPUs nobody serves so, and it takes a server of its own.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

_REQUESTS, _NEW_TOKENS = 8, 24


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts(_REQUESTS)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    settings = settings_of(num_requests=_REQUESTS, standby=True, overlap_passes=True)
    with ours(settings) as found:
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
    killed_while_prompts_are_computed(server, prompts, want)
