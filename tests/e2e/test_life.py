# SPDX-License-Identifier: Apache-2.0
"""One launch through what may happen to it: a hung cache rank, killed processes, SIGTERM.

One server for all of it, in this order; a start takes half a minute. Its policy is exact, and what
it says before anything happens is compared with stock SGLang.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from exactness import check_everywhere
from life_cycle import ready_after_crash
from mapped_memory import kv_inode
from rank_servers import Server, model_dir, ours

from tandemkv.server.soak.processes import HTTP

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.usefixtures("deep_model")]

HANG_TIMEOUT_S = 6.0
READY_AGAIN_S = 180.0  # a minute where nothing else computes


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TMPDIR of the launch, to see what is left there."""
    return tmp_path_factory.mktemp("t")


@pytest.fixture(scope="module")
def server(temporary: Path) -> Iterator[Server]:
    settings = {
        "selection": {"policy": "exact", "num_recent_tokens": 16},
        "hang_timeout_s": HANG_TIMEOUT_S,
        "drain_timeout_s": 120.0,
    }
    with ours(settings, environ={"TMPDIR": str(temporary)}) as started:
        # The launcher supervises from then on; the server may be ready a moment before.
        eventually(lambda: "Ctrl-C stops" in launch_log(started), 10.0, "no banner")
        yield started


@pytest.fixture(scope="module")
def segments() -> set[str]:
    """Shared memory that any rank of the launch has mapped at some time."""
    return set()


def shared_memory(server: Server) -> set[str]:
    found: set[str] = set()
    for process in server.processes():
        with contextlib.suppress(psutil.Error):
            found |= {item.path for item in process.memory_maps()}
    return {path for path in found if path.startswith("/dev/shm/")}


def post(
    server: Server, *, new_tokens: int, stream: bool, has_begun: threading.Event | None = None
) -> tuple[int, dict[str, str], str]:
    """Return status, headers and body; the body of a stream as far as it came."""
    body = {
        "prompt": "Count: one, two, three",
        "max_tokens": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
        "model": Path(model_dir()).name,
    }
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            if has_begun is not None:  # the headers of a stream come with its first event
                has_begun.set()
            return reply.status, dict(reply.headers), reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read().decode()


def eventually(condition: Callable[[], bool], timeout_s: float, complaint: str) -> float:
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < timeout_s, complaint
        time.sleep(0.1)
    return time.monotonic() - begun


def is_ready(server: Server) -> bool:
    with contextlib.suppress(OSError):
        return bool(server.get("/tandemkv/ready", 5.0)[0] == 200)
    return False


def launch_log(server: Server) -> str:
    return server.log.read_text()


def running(server: Server) -> int:
    """Requests that hold rows."""
    return int(server.values()[0]["request_rows"])


def inference_rank(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.get("/tandemkv/status")[1]["inference_rank"]
    return found


def begin(pool: ThreadPoolExecutor, server: Server, **kwargs: Any) -> Future[Any]:
    before, has_begun = running(server), threading.Event()
    future = pool.submit(post, server, has_begun=has_begun, **kwargs)
    eventually(lambda: running(server) > before, 20.0, "the request does not start")
    if kwargs["stream"]:
        assert has_begun.wait(20.0), "the stream does not begin"
    return future


def scheduler_of(server: Server) -> psutil.Process:
    for process in server.processes():
        with contextlib.suppress(psutil.Error):
            if "scheduler" in (process.name() + " ".join(process.cmdline())).lower():
                return process
    raise AssertionError([process.cmdline() for process in server.processes()])


def test_tokens_equal_stock(
    server: Server, prompts: list[list[int]], new_tokens: int, deep_reference: list[Any]
) -> None:
    check_everywhere(server, prompts, deep_reference, new_tokens=new_tokens)
    assert server.values()[0]["exact_rows_total"] > 0


def test_a_stopped_cache_rank_is_replaced_while_requests_wait(server: Server) -> None:
    stopped = server.cache_rank_pid()
    os.kill(stopped, signal.SIGSTOP)
    eventually(
        lambda: inference_rank(server)["values"]["pauses_total"] > 0, 8.0, "the loss is not noticed"
    )
    assert is_ready(server), "requests are taken in meanwhile"
    code, _, text = post(server, new_tokens=4, stream=False)
    assert code == 200, text
    assert "cache rank ended: signal SIGKILL" in launch_log(server)
    assert server.cache_rank_pid() != stopped
    assert inference_rank(server)["values"]["requests_failed_total"] == 0


def test_a_killed_scheduler_ends_requests_with_503_and_comes_back(
    server: Server, segments: set[str]
) -> None:
    """Its successor gets the same memory, and says the same."""
    segments |= shared_memory(server)
    memory = kv_inode(server)
    before = json.loads(post(server, new_tokens=16, stream=False)[2])["choices"][0]["text"]
    time.sleep(5.0)  # the watchdog looks at them every four seconds
    with ThreadPoolExecutor(2) as pool:
        whole = begin(pool, server, new_tokens=1500, stream=False)
        stream = begin(pool, server, new_tokens=1500, stream=True)
        scheduler_of(server).kill()
        code, headers, text = whole.result(timeout=20)
        assert code == 503, text
        assert int(headers["retry-after"]) > 0
        assert "scheduler died" in text
        code, _, text = stream.result(timeout=20)
        assert code == 200  # it had begun
        last = [line for line in text.splitlines() if line.startswith("data: ")][-1]
        assert "scheduler died" in json.loads(last.removeprefix("data: "))["error"]["message"]
    eventually(lambda: not is_ready(server), 10.0, "still ready")
    eventually(lambda: is_ready(server), READY_AGAIN_S, launch_log(server))
    assert "SGLang ended" in launch_log(server)
    assert kv_inode(server) == memory
    code, _, text = post(server, new_tokens=16, stream=False)
    assert (code, json.loads(text)["choices"][0]["text"]) == (200, before), text


def test_it_is_ready_again_within_a_minute_of_a_crash_of_the_http_process(
    server: Server, segments: set[str]
) -> None:
    segments |= shared_memory(server)
    ready_after_crash(server, HTTP)


def test_sigterm_lets_streams_finish_refuses_new_work_and_leaves_nothing(
    server: Server, temporary: Path, segments: set[str]
) -> None:
    main = psutil.Process(server.pid)
    processes = server.processes()
    segments |= shared_memory(server)
    with ThreadPoolExecutor(1) as pool:
        stream = begin(pool, server, new_tokens=80, stream=True)
        main.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        eventually(lambda: not is_ready(server), 1.0, "ready after SIGTERM")
        code, headers, _ = post(server, new_tokens=4, stream=False)
        assert code == 503
        assert int(headers["retry-after"]) > 0
        assert time.monotonic() - begun < 2.0
        assert not stream.done()
        code, _, text = stream.result(timeout=120)
    assert code == 200
    assert text.rstrip().endswith("data: [DONE]")
    assert text.count("data: ") > 60
    assert main.wait(30) == 0
    eventually(lambda: not any(map(psutil.Process.is_running, processes)), 5.0, "processes left")
    assert "stopped" in launch_log(server)
    assert server.run_dir is not None
    assert {path.suffix for path in server.run_dir.iterdir()} == {".log"}
    assert list(temporary.iterdir()) == []
    assert [path for path in segments if Path(path).exists()] == []
