# SPDX-License-Identifier: Apache-2.0
"""Draining: new work is refused, work under way finishes or ends with an error, never mute."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tandemkv.inference_rank.sglang import shutdown
from tandemkv.inference_rank.sglang.drain import Drain, DrainMiddleware
from tandemkv.inference_rank.sglang.shutdown import Shutdown

Messages = list[dict[str, Any]]


async def _receive() -> dict[str, Any]:
    return {"type": "http.request", "body": b"", "more_body": False}


async def call(
    app: Callable[..., Awaitable[None]], drain: Drain, path: str = "/v1/completions"
) -> Messages:
    sent: Messages = []

    async def send(message: Any) -> None:
        sent.append(dict(message))

    scope = {"type": "http", "method": "POST", "path": path}
    await DrainMiddleware(app, drain)(scope, _receive, send)
    return sent


def answer(status: int, *, content_type: bytes = b"application/json", wait: Any = None) -> Any:
    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        headers = [(b"content-type", content_type)]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        if wait is not None:
            await wait.wait()
        await send({"type": "http.response.body", "body": b"last"})

    return app


async def mute(_scope: Any, _receive: Any, _send: Any) -> None:
    await asyncio.Event().wait()


def header(messages: Messages, name: bytes) -> bytes:
    return dict(messages[0]["headers"])[name]


def test_new_work_is_refused_and_probes_are_answered() -> None:
    async def scenario() -> None:
        drain = Drain()
        drain.refuse("shutting down")
        refused = await call(answer(200), drain)
        assert refused[0]["status"] == 503
        assert int(header(refused, b"retry-after")) > 0
        assert json.loads(refused[1]["body"])["error"]["message"] == "shutting down"
        for path in ("/tandemkv/ready", "/health", "/metrics"):
            assert (await call(answer(200), drain, path))[0]["status"] == 200

    asyncio.run(scenario())


def test_each_503_says_when_to_come_back() -> None:
    async def scenario() -> None:
        assert int(header(await call(answer(503), Drain()), b"retry-after")) > 0
        found = await call(answer(200), Drain())
        assert b"retry-after" not in dict(found[0]["headers"])

    asyncio.run(scenario())


def test_work_under_way_may_finish() -> None:
    async def scenario() -> None:
        drain, gate = Drain(), asyncio.Event()
        stream = asyncio.ensure_future(call(answer(200, wait=gate), drain))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        drain.refuse("shutting down")
        assert drain.num_in_flight == 1
        assert not await drain.finish(0.1)
        gate.set()
        assert await drain.finish(5.0)
        assert (await stream)[-1]["body"] == b"last"

    asyncio.run(scenario())


def test_what_does_not_finish_ends_with_an_error() -> None:
    async def scenario() -> None:
        drain, never = Drain(), asyncio.Event()
        unanswered = asyncio.ensure_future(call(mute, drain))
        stream = asyncio.ensure_future(
            call(answer(200, content_type=b"text/event-stream", wait=never), drain)
        )
        await asyncio.sleep(0.05)
        drain.cut("the scheduler died")
        assert await drain.finish(5.0)
        messages = await unanswered
        assert messages[0]["status"] == 503
        assert header(messages, b"retry-after")
        event = (await stream)[-1]
        assert event["body"].startswith(b'data: {"object":"error"')
        assert b"the scheduler died" in event["body"]
        assert not event.get("more_body")

    asyncio.run(scenario())


def test_a_client_that_leaves_is_not_answered() -> None:
    async def scenario() -> None:
        drain = Drain()
        request = asyncio.ensure_future(call(mute, drain))
        await asyncio.sleep(0.05)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert drain.num_in_flight == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("finishes", [True, False])
def test_sigterm_ends_the_process_after_the_last_answer(
    monkeypatch: pytest.MonkeyPatch, finishes: bool
) -> None:
    steps: list[str] = []
    for name in ("kill_below", "remove_temporary_files"):
        monkeypatch.setattr(shutdown, name, lambda name=name: steps.append(name))

    async def end_scheduler() -> None:
        steps.append("_end_scheduler")
        raise RuntimeError("it does not listen")  # then it is killed, and the process still ends

    monkeypatch.setattr(shutdown, "_end_scheduler", end_scheduler)

    async def scenario() -> None:
        drain, gate, ended = Drain(), asyncio.Event(), asyncio.Event()
        ender = Shutdown(drain, 5.0 if finishes else 0.2, ended.set)
        ender.install()
        stream = asyncio.ensure_future(call(answer(200, wait=gate), drain))
        await asyncio.sleep(0.05)
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(0.05)
        assert drain.reason is not None
        assert not steps
        if finishes:
            gate.set()
        await asyncio.wait_for(ended.wait(), 5.0)
        messages = await stream
        assert (messages[-1]["body"] == b"last") is finishes
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            loop.remove_signal_handler(number)

    asyncio.run(scenario())
    assert steps == ["_end_scheduler", "kill_below", "remove_temporary_files"]


def test_a_second_signal_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "kill_below", lambda: None)

    async def scenario() -> None:
        drain, ended = Drain(), asyncio.Event()
        ender = Shutdown(drain, 60.0, ended.set)
        request = asyncio.ensure_future(call(mute, drain))
        await asyncio.sleep(0.05)
        ender.begin()  # another node has asked for it, before the signal comes here as well
        assert drain.reason is not None
        ender.on_stop_signal()
        assert not ended.is_set()
        ender.on_stop_signal()
        assert ended.is_set()
        request.cancel()

    asyncio.run(scenario())
