# SPDX-License-Identifier: Apache-2.0
"""Bodies, places and probes under load; tokenising beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import orjson
import pytest
from edge_world import COMPLETIONS, JSON, Behind, World, make_world
from sglang.srt.entrypoints.openai.protocol import TokenizeRequest
from sglang.srt.entrypoints.openai.serving_tokenize import OpenAIServingTokenize

from tandemkv.inference_rank.edge import tokenizing
from tandemkv.inference_rank.edge.install import PAUSED, pause_reason

BODY = {"prompt": "x"}


async def send_parts(world: World, parts: AsyncIterator[bytes]) -> httpx.Response:
    transport = httpx.ASGITransport(app=world.edge)
    async with httpx.AsyncClient(transport=transport, base_url="http://edge") as client:
        return await client.post(COMPLETIONS, content=parts, headers=JSON)


def test_a_long_body_is_refused_by_its_stated_length() -> None:
    world = make_world()
    reply = world.post(COMPLETIONS, b"{" * (2 << 20))
    assert reply.status_code == 413
    assert "at most 1056768" in reply.json()["error"]["message"]  # 2 x 16 x 256 + 1 MiB
    assert reply.headers["connection"] == "close"


def test_a_long_body_is_not_read_to_its_end() -> None:
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        while True:
            read += 1
            yield b"x" * 65536

    world = make_world(max_body_bytes=1 << 20)
    assert asyncio.run(send_parts(world, endless())).status_code == 413
    assert read < 1100  # 64 MiB are taken off the connection, so that the answer can be read
    assert not world.behind.seen


def test_a_slow_body_is_refused() -> None:
    world = make_world(body_timeout_s=0.05)
    told: list[Any] = []

    async def never() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        told.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": COMPLETIONS,
        "headers": [(b"content-type", b"application/json")],
    }
    asyncio.run(world.edge(scope, never, send))
    assert told[0]["status"] == 408
    assert world.edge.admission.taken == 0


@pytest.mark.parametrize(
    "headers", [{"content-type": "text/plain"}, {**JSON, "content-encoding": "gzip"}]
)
def test_other_kinds_of_body(headers: dict[str, str]) -> None:
    assert make_world().post(COMPLETIONS, b"{}", **headers).status_code == 415


def test_more_than_may_wait_is_refused() -> None:
    """2 run, 3 may wait: a request takes as many places as it asks for completions."""

    async def work() -> None:
        behind = Behind(hold=asyncio.Event())
        world = make_world(behind=behind, max_queued_requests=3)
        four = asyncio.create_task(world.send("POST", COMPLETIONS, body={**BODY, "n": 4}))
        while not behind.seen:
            await asyncio.sleep(0)
        two = await world.send("POST", COMPLETIONS, body={**BODY, "n": 2})
        assert two.status_code == 429
        assert two.headers["retry-after"] == "1"
        assert "completions run or wait" in two.json()["error"]["message"]
        one = asyncio.create_task(world.send("POST", COMPLETIONS, body=BODY))
        while len(behind.seen) < 2:
            await asyncio.sleep(0)
        assert (await world.send("POST", COMPLETIONS, body=BODY)).status_code == 429
        assert behind.hold is not None
        behind.hold.set()
        assert (await four).status_code == (await one).status_code == 200
        assert world.edge.admission.taken == 0
        assert (await world.send("POST", COMPLETIONS, body={**BODY, "n": 5})).status_code == 200

    asyncio.run(work())


def test_a_client_that_does_not_read_loses_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandemkv.inference_rank.edge.middleware.TAKE_TIMEOUT_S", 0.05)
    world = make_world()

    async def body() -> Any:
        return {"type": "http.request", "body": b'{"prompt": "x"}', "more_body": False}

    async def never(_message: Any) -> None:
        await asyncio.Event().wait()

    scope = {
        "type": "http",
        "method": "POST",
        "path": COMPLETIONS,
        "headers": [(b"content-type", b"application/json")],
    }
    asyncio.run(asyncio.wait_for(world.edge(scope, body, never), 10))
    assert len(world.behind.seen) == 1
    assert world.edge.admission.taken == 0


def test_nothing_is_admitted_while_paused() -> None:
    manager = SimpleNamespace(is_pause=True)
    world = make_world(closed=lambda: pause_reason(manager))
    reply = world.post(COMPLETIONS, BODY)
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "5"
    assert reply.json()["error"]["message"] == PAUSED
    manager.is_pause = False
    assert world.post(COMPLETIONS, BODY).status_code == 200


def test_probes_at_one_time_share_an_answer() -> None:
    async def work() -> None:
        behind = Behind(hold=asyncio.Event())
        world = make_world(behind=behind)
        many = [asyncio.create_task(world.send("GET", f"/health?x={i}")) for i in range(50)]
        other = asyncio.create_task(world.send("GET", "/metrics"))
        for _ in range(50):
            await asyncio.sleep(0)
        many[0].cancel()  # who asked first leaves; the others get their answer
        assert behind.hold is not None
        behind.hold.set()
        replies = await asyncio.gather(*many[1:], other)
        assert {reply.status_code for reply in replies} == {200}
        assert len(behind.seen) == 2
        assert (await world.send("GET", "/health")).status_code == 200
        assert len(behind.seen) == 3

    asyncio.run(work())


def test_tokenising_leaves_the_event_loop_free() -> None:
    release, threads = threading.Event(), []

    async def original(_manager: Any, texts: str) -> list[int]:
        threads.append(threading.current_thread())
        assert release.wait(30), "the event loop waited for the tokenizer"
        return [len(texts)]

    async def work() -> list[int]:
        manager = SimpleNamespace(async_dynamic_batch_tokenizer=None)
        task = asyncio.create_task(tokenizing.tokenize_texts(original, manager, "four"))
        await asyncio.sleep(0.01)
        release.set()  # only a free loop gets here
        found: list[int] = await task
        return found

    assert asyncio.run(work()) == [4]
    assert threads[0] is not threading.main_thread()


def test_a_tokenizer_that_waits_is_an_error() -> None:
    async def original(_manager: Any) -> None:
        await asyncio.sleep(0)

    manager = SimpleNamespace(async_dynamic_batch_tokenizer=None)
    with pytest.raises(RuntimeError, match="waits for something"):
        asyncio.run(tokenizing.tokenize_texts(original, manager))


@pytest.mark.parametrize(("stated", "told"), [(int(1e30), 256), (1 << 64, 256), (8192, 8192)])
def test_a_tokenizer_that_states_no_length_is_told_with_the_model_s_context(
    stated: int, told: int
) -> None:
    """Hugging Face's number for none has 100 bits: SGLang 0.5.17 could not write the answer."""
    tokenizer = SimpleNamespace(model_max_length=stated, encode=lambda _text, **_: [1, 2])
    manager = SimpleNamespace(tokenizer=tokenizer, model_config=SimpleNamespace(context_len=256))
    serving = SimpleNamespace(tokenizer_manager=manager)
    original = OpenAIServingTokenize._handle_non_streaming_request
    request = TokenizeRequest(prompt="x")
    answer = asyncio.run(tokenizing.handle_tokenize(original, serving, request, request, None))
    assert orjson.loads(orjson.dumps(answer.model_dump()))["max_model_len"] == told


class Serving:
    """As SGLang's: converts, then answers."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.threads = error, []  # type: ignore[var-annotated]

    def _validate_request(self, request: Any) -> str | None:
        self.threads.append(threading.current_thread())
        return "refused" if request == "bad" else None

    def _convert_to_internal_request(self, request: str, _raw: Any) -> str:
        self.threads.append(threading.current_thread())
        if self.error is not None:
            raise self.error
        return request.upper()

    async def handle(self, request: str, raw: Any) -> str:
        try:
            return self._validate_request(request) or self._convert_to_internal_request(
                request, raw
            )
        except ValueError as error:
            return str(error)


def test_requests_are_checked_and_converted_in_the_thread_once() -> None:
    for serving, request, said, calls in (
        (Serving(), "hi", "HI", 2),
        (Serving(), "bad", "refused", 1),
        (Serving(ValueError("wrong")), "hi", "wrong", 2),
    ):
        found = asyncio.run(tokenizing.handle_request(Serving.handle, serving, request, None))
        assert found == said
        assert [thread.name for thread in serving.threads] == ["tandemkv-tokenizer_0"] * calls
