# SPDX-License-Identifier: Apache-2.0
"""What a client on a real connection sees of a refusal that comes before its body."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
import uvicorn
from edge_world import ADMIN_KEY, API_KEY, COMPLETIONS, World, make_world

from tandemkv.inference_rank.edge.keys import Keys

_LONG = 5_000_000
"""More bytes than the sockets of both ends hold."""


def _head(path: str, *lines: str, version: str = "1.1", length: int = _LONG) -> bytes:
    """The lines before a body of JSON, with a user's key unless `lines` have one."""
    given = [f"POST {path} HTTP/{version}", "Host: a", f"Content-Length: {length}", *lines]
    for name, value in (("Content-Type", "application/json"), ("Authorization", API_KEY)):
        if not any(line.startswith(name) for line in given):
            given.append(f"{name}: {'Bearer ' * (name == 'Authorization')}{value}")
    return "\r\n".join([*given, "", ""]).encode()


def _ask(port: int, head: bytes, num_bytes: int) -> bytes:
    """Send `head` and a body, and only then read the answer, to its end."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(head + b" " * num_bytes)
        answer = b""
        while part := client.recv(65536):
            answer += part
    return answer


def _answer(world: World, head: bytes, num_bytes: int = _LONG) -> bytes:
    async def work() -> bytes:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            config = uvicorn.Config(world.edge, lifespan="off", log_level="critical")
            server = uvicorn.Server(config)
            task = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                port = listener.getsockname()[1]
                return await asyncio.to_thread(_ask, port, head, num_bytes)
            finally:
                server.should_exit = True
                await task

    return asyncio.run(asyncio.wait_for(work(), 60))


def _world(**settings: Any) -> World:
    return make_world(keys=Keys(api=API_KEY, admin=ADMIN_KEY), **settings)


@pytest.mark.parametrize(
    ("path", "lines", "status"),
    [
        ("/nope", (), 404),
        ("/v1/models", (), 405),
        (COMPLETIONS, ("Authorization: Bearer nobody-knows-this-one",), 401),
        ("/flush_cache", (), 403),
        (COMPLETIONS, ("Origin: https://other.example",), 403),
        (COMPLETIONS, ("Content-Type: text/plain",), 415),
        (COMPLETIONS, (), 429),
        (COMPLETIONS, (), 503),
    ],
)
def test_a_client_that_wants_the_connection_closed_sees_an_early_refusal(
    path: str, lines: tuple[str, ...], status: int
) -> None:
    """To close it with the body unread would reset it, and the answer would be lost."""
    closed = "paused" if status == 503 else None
    world = _world(closed=lambda: closed, max_queued_requests=0)
    if status == 429:
        world.edge.admission.take(2)
    answer = _answer(world, _head(path, *lines, "Connection: close"))
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert b'"error":' in answer
    assert world.refused == [status]


def test_a_client_of_http_1_0_sees_an_early_refusal() -> None:
    assert b" 404 " in _answer(_world(), _head("/nope", version="1.0")).partition(b"\r\n")[0]


def test_a_body_that_does_not_come_is_not_waited_for_long() -> None:
    world = _world(body_timeout_s=0.1)
    assert b" 404 " in _answer(world, _head("/nope", "Connection: close"), 10)
    waits = _world(body_timeout_s=50)
    asked = _head("/nope", "Connection: close", "Expect: 100-continue")
    answer = _answer(waits, asked, 0)
    assert answer.startswith(b"HTTP/1.1 404 "), "it is not told to send a body"


@pytest.mark.parametrize("num_digits", [19, 20])
def test_a_body_of_any_stated_length_is_refused_at_once(num_digits: int) -> None:
    world = _world(body_timeout_s=50)
    length = int("9" * num_digits)
    answer = _answer(world, _head(COMPLETIONS, "Connection: close", length=length), 0)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert f"a body of {length} bytes or more".encode() in answer
