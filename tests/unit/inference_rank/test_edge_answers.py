# SPDX-License-Identifier: Apache-2.0
"""Answers of SGLang on their way: errors, streams, and clients that leave or do not read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from edge_world import ADMIN_KEY, CHAT, COMPLETIONS, JSON, NATIVE, make_limits
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.background import BackgroundTask
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandemkv.inference_rank.edge.keys import Keys
from tandemkv.inference_rank.edge.middleware import Edge
from tandemkv.inference_rank.sglang.drain import Drain, DrainMiddleware

BODY = {CHAT: {"messages": [{"role": "user", "content": "hi"}]}, COMPLETIONS: {"prompt": "x"}}
BODY[NATIVE] = {"text": "x"}
SGLANGS = {"object": "error", "message": "too long", "type": "BadRequestError", "code": 400}


def edge_of(app: ASGIApp, **settings: Any) -> Edge:
    return Edge(
        app, make_limits(**settings), Keys(), closed=lambda: None, count_refusal=lambda _: None
    )


def ask(app: ASGIApp, path: str = CHAT, **headers: str) -> httpx.Response:
    async def work() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://edge") as client:
            return await client.post(path, json=BODY[path], headers=headers)

    return asyncio.run(work())


def stream_of(*events: object, background: Any = None) -> Response:
    async def said() -> AsyncIterator[bytes]:
        for event in events:
            yield f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()

    return StreamingResponse(said(), media_type="text/event-stream", background=background)


@pytest.mark.parametrize(
    ("given", "status", "said"),
    [
        (JSONResponse(SGLANGS, 400), 400, {"message": "too long", "code": 400}),
        (JSONResponse({"error": {"message": "own form"}}, 400), 400, {"message": "own form"}),
        (
            JSONResponse(SGLANGS | {"message": '1 error:\n\n  File "/app/x.py", line 3'}, 400),
            400,
            {"message": "1 error:"},
        ),
        (JSONResponse({"detail": "Not Found"}, 404), 404, {"message": "Not Found"}),
        (JSONResponse([], 400), 400, {"message": "the server failed; its log says why"}),
        (
            PlainTextResponse("Internal Server Error", 500),
            500,
            {"message": "the server failed; its log says why", "type": "server_error"},
        ),
    ],
)
def test_errors_have_one_form(given: Response, status: int, said: dict[str, Any]) -> None:
    found = ask(edge_of(given))
    assert found.status_code == status
    assert said.items() <= found.json()["error"].items()
    assert int(found.headers["content-length"]) == len(found.content)


def _administered() -> FastAPI:
    """Routes of an administrator, and what SGLang says of a wrong body."""
    app = FastAPI()

    @app.post("/continue_generation")
    async def go_on(body: dict[str, int]) -> None: ...

    @app.post("/flush_cache")
    async def flush() -> Response:
        return Response("Flush cache failed.\n", 400)

    @app.get("/v1/loads")
    async def loads() -> Response:
        raise ZeroDivisionError

    @app.exception_handler(RequestValidationError)
    async def explain(_: Request, error: RequestValidationError) -> Response:
        message = f"{error} {error.errors()}"
        assert __file__ in message
        return JSONResponse(SGLANGS | {"message": message}, 400)

    return app


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "said"),
    [
        ("POST", "/continue_generation", None, 400, "Field required"),
        ("POST", "/continue_generation", {"x": "y"}, 400, "valid integer"),
        ("POST", "/flush_cache", None, 400, "Flush cache failed."),
        ("GET", "/v1/loads", None, 500, "the server failed; its log says why"),
        ("GET", "/model_info", None, 404, "Not Found"),
    ],
)
def test_errors_of_administration_have_that_form_and_no_path(
    method: str, path: str, body: Any, status: int, said: str
) -> None:
    keys = Keys(admin=ADMIN_KEY)
    edge = Edge(
        _administered(), make_limits(), keys, closed=lambda: None, count_refusal=lambda _: None
    )

    async def work() -> httpx.Response:
        transport = httpx.ASGITransport(app=edge, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://edge") as client:
            head = {"authorization": f"Bearer {ADMIN_KEY}"}
            return await client.request(method, path, json=body, headers=head)

    found = asyncio.run(work())
    assert found.status_code == status
    assert said in found.json()["error"]["message"]
    assert ".py" not in found.text
    assert "File" not in found.text


def test_a_very_long_error_goes_as_it_is() -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"x" * (1 << 20)

    found = ask(edge_of(StreamingResponse(parts(), 500, media_type="text/plain")))
    assert (found.status_code, len(found.content)) == (500, 3 << 20)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_that_begins_with_an_error_is_an_answer_with_its_status(path: str) -> None:
    """As the drain around it is asked to, a 503 says when to come again."""
    lost = {"error": SGLANGS | {"message": "the cache rank is away", "code": 503}}
    found = ask(DrainMiddleware(edge_of(stream_of(lost, "[DONE]")), Drain()), path)
    assert found.status_code == 503
    assert found.headers["retry-after"] == "5"
    assert found.headers["content-type"] == "application/json"
    assert found.json()["error"]["message"] == "the cache rank is away"


@pytest.mark.parametrize(
    ("path", "events"),
    [
        (CHAT, [{"choices": []}, {"error": SGLANGS}, "[DONE]"]),
        (CHAT, [{"error": "no mapping"}]),
        (CHAT, [{"error": {"code": "no status"}}]),
        (CHAT, ["[DONE]"]),
        (NATIVE, [{"error": SGLANGS}, "[DONE]"]),
    ],
)
def test_other_streams_go_as_they_are(path: str, events: list[object]) -> None:
    found = ask(edge_of(stream_of(*events)), path)
    assert found.status_code == 200
    assert found.headers["content-type"].startswith("text/event-stream")
    assert found.content.count(b"data: ") == len(events)


def test_an_ended_stream_gives_its_place_back_at_once() -> None:
    """SGLang's routes return two seconds later; nobody waits for them."""

    async def work() -> None:
        returned = asyncio.Event()
        edge = edge_of(
            stream_of({"choices": []}, background=BackgroundTask(returned.wait)),
            max_queued_requests=0,
        )
        drain = Drain()
        transport = httpx.ASGITransport(app=DrainMiddleware(edge, drain))
        async with httpx.AsyncClient(transport=transport, base_url="http://edge") as client:
            asked = asyncio.create_task(client.post(CHAT, json=BODY[CHAT] | {"n": 2}))
            while not drain.num_in_flight:
                await asyncio.sleep(0)
            assert edge.admission.taken <= 2
            while edge.admission.taken or drain.num_in_flight:
                await asyncio.sleep(0)
            assert not asked.done()  # a transport in memory returns with the route
            returned.set()
            assert (await asked).status_code == 200
        assert edge.admission.taken == 0

    asyncio.run(asyncio.wait_for(work(), 20))


async def call(
    app: ASGIApp, send: Callable[[Message], Any], receive: Callable[[], Any] | None = None
) -> None:
    given = [{"type": "http.request", "body": json.dumps(BODY[CHAT]).encode(), "more_body": False}]

    async def body() -> Message:
        if given:
            return given.pop()
        if receive is not None:
            return await receive()  # type: ignore[no-any-return]
        return await asyncio.Event().wait()  # type: ignore[return-value]

    scope = {
        "type": "http",
        "method": "POST",
        "path": CHAT,
        "headers": [(name.encode(), value.encode()) for name, value in JSON.items()],
    }
    await asyncio.wait_for(app(scope, body, send), 10)


def test_what_a_client_that_does_not_read_asked_for_is_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tandemkv.inference_rank.edge.middleware.TAKE_TIMEOUT_S", 0.05)
    ended: list[str] = []

    async def endless() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"data: {}\n\n"
                await asyncio.sleep(0.001)
        finally:
            ended.append("generation")

    async def abort() -> None:
        ended.append("abort")

    async def stuck(message: Message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    edge = edge_of(
        StreamingResponse(
            endless(), media_type="text/event-stream", background=BackgroundTask(abort)
        )
    )
    asyncio.run(call(edge, stuck))
    assert ended == ["generation", "abort"]
    assert edge.admission.taken == 0


def test_a_client_that_leaves_is_noticed_by_polls() -> None:
    """SGLang asks now and then, without a wait, while it generates."""
    noticed: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        assert await request.json()
        while not (noticed and noticed[-1]):
            noticed.append(await request.is_disconnected())
            await asyncio.sleep(0.001)

    async def leave() -> Message:
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def never(_message: Message) -> None:
        raise AssertionError

    asyncio.run(call(edge_of(app), never, leave))
    assert noticed[0] is False
    assert noticed[-1] is True


def test_a_page_of_an_allowed_origin_can_read_a_refusal() -> None:
    edge = edge_of(PlainTextResponse("ok"), cors_origins=("https://page.example",))

    async def work(origin: str) -> httpx.Response:
        transport = httpx.ASGITransport(app=edge)
        async with httpx.AsyncClient(transport=transport, base_url="http://edge") as client:
            return await client.post(CHAT, json={}, headers={"origin": origin})

    found = asyncio.run(work("https://page.example"))
    assert found.status_code == 400
    assert found.headers["access-control-allow-origin"] == "https://page.example"
    assert found.headers["access-control-expose-headers"] == "retry-after"
    other = asyncio.run(work("https://other.example"))
    assert other.status_code == 403
    assert "access-control-allow-origin" not in other.headers


def test_a_page_of_an_allowed_origin_can_read_that_the_server_drains() -> None:
    """The drain is outside of SGLang's CORS, and answers before it."""
    page = "https://page.example"
    behind = CORSMiddleware(
        PlainTextResponse("{}"), allow_origins=["*"], allow_credentials=True, allow_methods=["*"],
        allow_headers=["*"],
    )  # fmt: skip
    drain = Drain()
    edge = edge_of(DrainMiddleware(behind, drain), cors_origins=(page,))
    served = ask(edge, origin=page)
    assert (served.status_code, served.headers["access-control-allow-credentials"]) == (200, "true")
    assert served.headers.get_list("access-control-allow-origin") in ([page], ["*"])
    drain.refuse("shutting down")
    refused = ask(edge, origin=page)
    assert refused.status_code == 503
    assert refused.headers["access-control-allow-origin"] == page
    assert refused.headers["access-control-expose-headers"] == "retry-after"
    assert "access-control-allow-origin" not in ask(edge).headers

    async def preflight() -> httpx.Response:
        transport = httpx.ASGITransport(app=edge)
        asked = {"origin": page, "access-control-request-method": "POST"}
        async with httpx.AsyncClient(transport=transport, base_url="http://edge") as client:
            return await client.options(CHAT, headers=asked)

    assert asyncio.run(preflight()).status_code == 200, "or the page learns nothing"
