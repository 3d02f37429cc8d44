# SPDX-License-Identifier: Apache-2.0
"""What ended or blocked a server before there was an edge, sent to a real one."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from rank_servers import Server, ours

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CONNECTIONS, FD_SLACK = 20_000, 8
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
ATTACKS: dict[str, tuple[str, dict[str, Any], int]] = {
    "top_logprobs": (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 100000}, 400),
    "negative id": (COMPLETIONS, {"prompt": [-1, 5]}, 400),
    "id of vocabulary size": (COMPLETIONS, {"prompt": [49152]}, 400),
    "huge id": (COMPLETIONS, {"prompt": [10**9]}, 400),
    "native": ("/generate", {"input_ids": [-1, 5]}, 400),
    "n": (COMPLETIONS, {"prompt": "hi", "n": 20000}, 400),
    "50 MB": (COMPLETIONS, {"prompt": "hello world " * (50 * 2**20 // 12)}, 413),
    "model": (COMPLETIONS, {"prompt": "hi", "model": "other"}, 404),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with ours() as running:
        yield running


def still_serves(server: Server) -> None:
    assert server.get("/tandemkv/ready", 1.0)[0] == 200
    body = {"prompt": "The capital of France is", "max_tokens": 2, "temperature": 0}
    assert server.post(COMPLETIONS, body, 30.0)[0] == 200


@pytest.mark.parametrize("name", ATTACKS)
def test_is_refused_at_once(server: Server, name: str) -> None:
    path, body, code = ATTACKS[name]
    rss = max(process.memory_info().rss for process in server.processes())
    start = time.monotonic()
    found = server.post(path, body, 30.0)
    assert found[0] == code, found
    # One second is what is asked for; CI's machine may stall.
    assert time.monotonic() - start < 5.0
    still_serves(server)
    assert max(process.memory_info().rss for process in server.processes()) < 1.2 * rss


def test_a_list_of_log_probabilities_beside_a_request_without_one(server: Server) -> None:
    """Such a pass ended SGLang's scheduler, with every request of the server."""
    body: dict[str, Any] = {
        "text": "The capital of France is",
        "sampling_params": {"max_new_tokens": 200, "ignore_eos": True, "temperature": 0},
    }
    listing = body | {"return_logprob": True, "token_ids_logprob": [5, 77]}
    with ThreadPoolExecutor(2) as pool:
        pending = [pool.submit(server.post, "/generate", each) for each in (listing, body)]
        (code, found), (plain_code, plain) = (item.result() for item in pending)
    assert (code, plain_code) == (200, 200), (found, plain)
    listed = found["meta_info"]["output_token_ids_logprobs"]
    assert [[token for _, token, *_ in each] for each in listed] == [[5, 77]] * 200
    assert found["output_ids"] == plain["output_ids"]
    still_serves(server)


def test_an_id_whose_client_left_gives_the_next_request_its_own_answer(server: Server) -> None:
    """It got what was left of the first one's, and two of one id in a batch ended the server."""
    sampling = {"max_new_tokens": 400, "ignore_eos": True, "temperature": 0}
    first = {"rid": "again", "text": "A long story:", "sampling_params": sampling, "stream": True}
    short = first | {"sampling_params": sampling | {"max_new_tokens": 3}, "stream": False}
    for _ in range(3):
        with httpx.stream("POST", f"{server.url}/generate", json=first, timeout=60.0) as stream:
            assert next(stream.iter_lines()).startswith("data: ")
        deadline = time.monotonic() + 30.0
        while (found := server.post("/generate", short, 60.0))[0] != 200:
            assert found[0] == 400, found
            assert "Duplicate request ID" in str(found[1])
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert found[1]["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
        assert len(found[1]["output_ids"]) == 3
    still_serves(server)


def test_readiness_answers_while_long_prompts_are_tokenised(server: Server) -> None:
    text = ("hello world " * 11000)[:130_000]
    bodies = [
        (COMPLETIONS, {"prompt": text}),
        (CHAT, {"messages": [MESSAGES[0] | {"content": text}]}),
    ]
    with ThreadPoolExecutor(8) as pool:
        pending = [pool.submit(server.post, *bodies[index % 2]) for index in range(8)]
        while not all(item.done() for item in pending):
            assert server.get("/tandemkv/ready", 2.0)[0] == 200
    for item in pending:
        code, found = item.result()
        assert code == 400, found
        assert "longer than the model's context" in str(found)


def test_a_paused_server_is_not_ready_and_only_administrators_pause(server: Server) -> None:
    stranger = Server(server.url, server.pid, server.log)
    for path in ("/pause_generation", "/configure_logging", "/flush_cache"):
        assert stranger.post(path, {})[0] == 403
    assert server.get("/tandemkv/ready")[0] == 200
    assert server.post("/pause_generation", {})[0] == 200
    code, found = server.get("/tandemkv/ready")
    assert (code, "paused" in str(found)) == (503, True)
    assert server.post(COMPLETIONS, {"prompt": "hi"}, 5.0)[0] == 503
    assert server.post("/continue_generation", {})[0] == 200
    still_serves(server)


def test_20000_connections_that_are_closed_at_once_leave_nothing(server: Server) -> None:
    address = urlsplit(server.url)
    before = sum(process.num_fds() for process in server.processes())
    for _ in range(CONNECTIONS):
        with socket.socket() as stranger:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            stranger.connect((address.hostname, address.port))
    begun = time.monotonic()
    assert server.get("/tandemkv/ready")[0] == 200
    # One second is what is asked for; CI's machine may stall.
    assert time.monotonic() - begun < 5.0
    still_serves(server)
    deadline = time.monotonic() + 10.0
    while sum(process.num_fds() for process in server.processes()) > before + FD_SLACK:
        assert time.monotonic() < deadline, "descriptors leak"
        time.sleep(0.2)


def test_the_key_is_shown_nowhere(server: Server) -> None:
    assert server.admin_key is not None
    assert server.run_dir is not None
    assert server.post("/configure_logging", {"log_requests": True})[0] == 200
    still_serves(server)
    for process in server.processes():
        shown = [*process.cmdline(), *process.environ().values()]
        assert not any(server.admin_key in text for text in shown)
    for log in (server.log, *server.run_dir.glob("*.log"), *server.run_dir.glob("*.yaml")):
        assert server.admin_key not in log.read_text()
    assert psutil.pid_exists(server.pid)
