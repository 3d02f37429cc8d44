# SPDX-License-Identifier: Apache-2.0
"""Both ranks as processes of torchrun, over HTTP, beside what ``tandemkv serve`` answers.

One server for all of it, in this order.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import sockets
from agents import ENVIRONMENT, segments_of, torchrun, workers
from exactness import compare, run
from nothing_lost import wait_for
from rank_servers import SMALL_SELECTION, Server, ours

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.usefixtures("deep_model")]

END_S, PATIENCE_S = 30.0, 30.0
LONG_TOKENS = 32
SETTINGS = {"selection": SMALL_SELECTION}
OF_TORCHRUN = ("TORCHELASTIC_", "MASTER_", "RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE")


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("t")


@pytest.fixture(scope="module")
def server(of_serve: list[Any], temporary: Path, tmp_path_factory: Any) -> Iterator[Server]:
    del of_serve  # that server has ended: never two at a time
    store = tmp_path_factory.mktemp("store") / "file"
    environ = ENVIRONMENT | {"TMPDIR": str(temporary)}
    with ours(SETTINGS, environ=environ, start=torchrun(store, 2)) as started:
        wait_for(lambda: "Ctrl-C stops" in started.log.read_text(), "no banner", PATIENCE_S)
        yield started


def long_answer(server: Server, prompt: list[int]) -> list[int]:
    body = {"max_new_tokens": LONG_TOKENS, "temperature": 0, "ignore_eos": True}
    found = server.generate(input_ids=prompt, sampling_params=body)
    return list(found["output_ids"])


def rows(server: Server) -> float:
    return server.values()[0]["request_rows"]


def test_tokens_are_those_of_serve(
    server: Server, of_serve: list[Any], small_asked: list[list[int]], new_tokens: int
) -> None:
    found = compare(run(server, small_asked, new_tokens=new_tokens, at_once=1), of_serve)
    assert found["pass"], found
    inference, cache = server.values()
    assert inference["sparse_rows_total"] > 0
    assert cache["fetched_rows_total"] > 0


def test_each_process_has_its_role_and_sglang_hears_nothing_of_torchrun(server: Server) -> None:
    first, second = workers(server.pid)
    children = {first.pid: "sglang.launch_server", second.pid: "cache-rank"}
    for worker in (first, second):
        for child in worker.children():
            assert not [name for name in child.environ() if name.startswith(OF_TORCHRUN)]
        argvs = [child.cmdline() for child in worker.children()]
        assert sum(children[worker.pid] in argv for argv in argvs) == 1
    assert server.run_dir is not None
    assert {path.name for path in server.run_dir.glob("*.log")} == {"cache_rank.log", "sglang.log"}


def test_nothing_listens_on_tcp_but_http(server: Server) -> None:
    found = sockets.listening(server)  # torchrun's own process included
    tcp = [each for each in found if each.kind.startswith("tcp")]
    assert [each.port for each in tcp] == [int(server.url.rpartition(":")[2])]
    assert [each for each in found if sockets.purpose(each, server) is None] == []


def test_a_killed_cache_rank_is_started_again_by_its_process(
    server: Server, small_asked: list[list[int]]
) -> None:
    want = long_answer(server, small_asked[-1])
    before, killed = workers(server.pid), server.cache_rank_pid()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(long_answer, server, small_asked[-1])
        wait_for(lambda: rows(server) > 0, "the request does not start", PATIENCE_S)
        os.kill(killed, signal.SIGKILL)
        assert answer.result(timeout=120) == want
    assert workers(server.pid) == before
    again = psutil.Process(server.cache_rank_pid())
    assert again.pid != killed
    assert again.ppid() == before[1].pid
    assert "cache rank ended: signal SIGKILL" in server.log.read_text()


def test_sigterm_drains_and_leaves_nothing(
    server: Server, small_asked: list[list[int]], temporary: Path
) -> None:
    agent, processes = psutil.Process(server.pid), server.processes()
    segments = segments_of(processes)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(long_answer, server, small_asked[-1])
        wait_for(lambda: rows(server) > 0, "the request does not start", PATIENCE_S)
        agent.send_signal(signal.SIGTERM)
        assert len(answer.result(timeout=END_S)) == LONG_TOKENS
    agent.wait(END_S)
    wait_for(lambda: not any(map(psutil.Process.is_running, processes)), "processes are left", 5.0)
    assert server.log.read_text().count("\nstopped\n") == 1  # one speaks for all
    assert server.run_dir is not None
    assert {path.suffix for path in server.run_dir.iterdir()} == {".log"}
    # torchrun removes its own folder at no signal.
    assert [path for path in temporary.iterdir() if "torchelastic" not in path.name] == []
    assert [path for path in segments if path.exists()] == []
