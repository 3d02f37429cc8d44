# SPDX-License-Identifier: Apache-2.0
"""The cache rank ends, hangs or is away for long: a pause, the same tokens, or a clear error.

One server for all but the last; what is done at fault points comes from a file, which is empty at
first.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fault_matrix
import psutil
import pytest
from exactness import flush
from mapped_memory import kv_inode
from nothing_lost import (
    LIMITS_S,
    Stream,
    begin,
    fetched_rows,
    killed_while_prompts_are_computed,
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
from workbench import Checks

from tandemkv.cache_rank.protocol.fault_points import FAULTS_VARIABLE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.usefixtures("deep_model")]

REQUESTS, NEW_TOKENS = fault_matrix.REQUESTS, fault_matrix.NEW_TOKENS
PATIENCE_S = 2.0
SLOWER = 4.0
"""CI machines are shared: what is promised of an idle one is taken so many times."""


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts(REQUESTS)


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of what is to be done at fault points."""
    return tmp_path_factory.mktemp("faults") / "rules"


@pytest.fixture(scope="module")
def server(rules: Path) -> Iterator[Server]:
    settings = settings_of(num_requests=REQUESTS, standby=True)
    with ours(settings, environ={FAULTS_VARIABLE: f"@{rules}"}) as found:
        yield found


@pytest.fixture(scope="module")
def want(server: Server, prompts: list[list[int]], once: Any) -> list[list[int]]:
    def ask() -> list[Any]:
        return [undisturbed(server, prompts, NEW_TOKENS), fetched_rows(server)]

    found: list[list[int]] = once("one cache rank", ask)[0]  # test_shards compares with it
    return found


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_in_the_middle_of_a_step(
    server: Server, prompts: list[list[int]], want: list[list[int]], seed: int
) -> None:
    wait_for(lambda: waiting_ranks(server) > 0, "no cache rank waits")
    found = repeat(server, prompts, want, NEW_TOKENS, random.Random(seed))
    assert found["in_flight"] == found["ended"] == found["same_tokens"] == REQUESTS, found
    assert found["restored_rows"] == REQUESTS, found
    assert found["reseeded_rows"] == found["rows_left"] == found["slots_left"] == 0, found
    assert found["longest_gap_s"] < SLOWER * LIMITS_S["standby"], found


def test_killed_while_prompts_are_computed(
    server: Server, prompts: list[list[int]], want: list[list[int]]
) -> None:
    killed_while_prompts_are_computed(server, prompts, want)


def test_stopped_for_a_moment_is_a_pause_and_for_long_a_loss(
    server: Server, prompts: list[list[int]], want: list[list[int]]
) -> None:
    for stop_s in (0.7, None):
        flush(server)
        wait_for(lambda: waiting_ranks(server) > 0, "no cache rank waits")
        before = values(server)
        with ThreadPoolExecutor(REQUESTS + 1) as pool:
            streams, futures = begin(pool, server, prompts, NEW_TOKENS)
            wait_until_all_decode(streams)
            pid = serving_pid(server)
            os.kill(pid, signal.SIGSTOP)
            if stop_s is not None:
                time.sleep(stop_s)
                os.kill(pid, signal.SIGCONT)
            for future in futures:
                future.result()
        assert [stream.error for stream in streams] == [""] * REQUESTS
        assert [stream.tokens for stream in streams] == want
        losses = values(server)["cache_rank_lost_total"] - before["cache_rank_lost_total"]
        assert losses == (1 if stop_s is None else 0)
        if stop_s is None:  # what still maps the memory was ended first
            assert not psutil.pid_exists(pid) or (
                psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
            )


def test_faults_of_the_cache_rank_lose_nothing(
    server: Server, rules: Path, prompts: list[list[int]], want: list[list[int]]
) -> None:
    chosen, checks = fault_matrix.sample(5), Checks()
    assert len({case.action for case in chosen}) > 1
    rows = fault_matrix.put_through(server, chosen, rules, prompts, want)
    fault_matrix.judge(checks, chosen, rows)
    result = checks.result()
    assert result["pass"], result


def test_cache_ranks_that_end_while_they_are_asked_cost_no_patience(
    server: Server, rules: Path, prompts: list[list[int]], want: list[list[int]]
) -> None:
    """What is said to one that ends does not come to the next, which has to be asked anew.

    Three that are waited for, for ten seconds each, are more than `--recovery-timeout-s`.
    """
    flush(server)
    wait_for(lambda: waiting_ranks(server) > 0, "no cache rank waits")
    before = values(server)
    with ThreadPoolExecutor(REQUESTS + 1) as pool:
        streams, futures = begin(pool, server, prompts, NEW_TOKENS)
        wait_until_all_decode(streams)
        text = "seed=1;cache_rank.step=kill@1x1;cache_rank.hello=kill@1x3"
        fault_matrix.replace_rules(rules, text)
        for future in futures:
            future.result()
        fault_matrix.replace_rules(rules, "")
    assert [stream.error for stream in streams] == [""] * REQUESTS
    assert [stream.tokens for stream in streams] == want
    assert values(server)["cache_rank_lost_total"] - before["cache_rank_lost_total"] == 1


@pytest.mark.slow  # in CI test_life does so with policy exact
def test_a_scheduler_that_is_started_again_gets_the_same_memory(
    server: Server, prompts: list[list[int]], want: list[list[int]]
) -> None:
    memory = kv_inode(server)
    for process in server.processes():
        with contextlib.suppress(psutil.Error):
            if "scheduler" in process.name() + " ".join(process.cmdline()):
                process.kill()
    wait_for(lambda: values(server)["epochs_total"] == 1, "SGLang does not come back", 300.0)
    wait_for(lambda: server.get("/tandemkv/ready")[0] == 200, "not ready", 300.0)
    assert kv_inode(server) == memory
    assert undisturbed(server, prompts, NEW_TOKENS) == want


def wait_until_all_decode(streams: Sequence[Stream]) -> None:
    wait_for(lambda: all(s.tokens for s in streams), "requests do not begin", 300.0)


STREAMS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "The"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
}


def test_patience_has_an_end(prompts: list[list[int]]) -> None:
    """Without a cache rank for too long: errors, then service again on the same server."""
    settings = settings_of(num_requests=4, standby=False)
    exchange = {"recovery_timeout_s": PATIENCE_S}
    with ours(settings | {"exchange": exchange}) as server:
        before = server.generate(
            input_ids=prompts[0], sampling_params={"max_new_tokens": 8, "temperature": 0}
        )
        whole = {
            "input_ids": prompts[1],
            "sampling_params": {"max_new_tokens": 600, "temperature": 0, "ignore_eos": True},
        }
        with ThreadPoolExecutor(4) as pool:
            pending = pool.submit(server.post, "/generate", whole)
            streams, futures = begin(pool, server, prompts[2:4], 600)
            wait_until_all_decode(streams)
            events: list[dict[str, Any]] = []
            futures.append(pool.submit(follow_openai, server, events))
            wait_for(lambda: events, "the stream of OpenAI's route does not begin")
            stopped = launcher_held(server)
            os.kill(serving_pid(server), signal.SIGKILL)
            begun = time.monotonic()
            code, text = pending.result()
            for future in futures:
                future.result()
            took = time.monotonic() - begun
            assert code == 503, text
            assert "cache rank" in json.dumps(text)
            assert all(
                stream.error.startswith("503") and "cache rank" in stream.error
                for stream in streams
            ), streams
            assert events[-1]["error"]["code"] == 503, events[-1]
            assert "cache rank" in events[-1]["error"]["message"]
            assert PATIENCE_S <= took < SLOWER * PATIENCE_S
            assert server.get("/tandemkv/ready")[0] == 503
            code, text = server.post("/generate", whole)
            assert code == 503, text
            for route, asked in STREAMS.items():  # whoever repeats goes by the status
                code, found = server.post(route, asked | {"stream": True})
                assert (code, found["error"]["code"]) == (503, 503), found
                assert "cache rank" in found["error"]["message"]
            os.kill(stopped, signal.SIGCONT)
        wait_for(lambda: server.get("/tandemkv/ready")[0] == 200, "not ready again")
        flush(server)  # what a prompt seeds depends on how much of it is computed, as before
        after = server.generate(
            input_ids=prompts[0], sampling_params={"max_new_tokens": 8, "temperature": 0}
        )
        assert after["text"] == before["text"]
        assert values(server)["request_rows"] == 0
        assert values(server)["requests_failed_total"] == 4


def follow_openai(server: Server, events: list[dict[str, Any]]) -> None:
    """Append each event of a stream of `/v1/completions`, to its end."""
    model = server.get("/v1/models")[1]["data"][0]["id"]
    body = {"model": model, "prompt": "Once", "max_tokens": 600}
    body |= {"stream": True, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        server.url + "/v1/completions", json.dumps(body).encode(), server.headers
    )
    with urllib.request.urlopen(request, timeout=600) as reply:
        for line in reply:
            text = line.decode().removeprefix("data: ").strip()
            if text and text != "[DONE]":
                events.append(json.loads(text))


def launcher_held(server: Server) -> int:
    """Stop the launcher, so that nobody starts a cache rank; returns its process id."""
    os.kill(server.pid, signal.SIGSTOP)
    return server.pid
