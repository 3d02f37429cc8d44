# SPDX-License-Identifier: Apache-2.0
"""What SGLang answers, on its way to one client: errors in one form, and no place kept for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
from starlette.types import Message, Receive, Send

from .refusal import error_body

_MOST_REWRITTEN = 1 << 20
"""Bytes of an error that is given another form; a longer one goes as it is."""

_EVENT = b"data: "
_WHERE = "\n\n  File "
"""What FastAPI puts behind the reason that a body is wrong: a place in the server's files."""

_OF_BODIES = (b"content-type", b"content-length", b"cache-control")
"""Headers that are about the body that is replaced."""


class Answer:
    """A ``send`` and, behind the body, a ``receive`` for SGLang's application, for one request.

    A client that does not take a part of its answer within `timeout_s` has left, as SGLang is told:
    what follows is dropped, and the request is aborted. `on_end` is called when the answer is
    complete, for SGLang's application returns two seconds after a stream (`sglang.aborts`).

    An error has the form of the edge's own (`error_body`), so that clients find
    ``error.message`` in each. With `holds_streams` a stream begins with its first event, and one
    that begins with an error is an answer with that status: whoever repeats after a 503 sees it.
    """

    def __init__(
        self,
        receive: Receive,
        send: Send,
        *,
        timeout_s: float,
        on_end: Callable[[], None],
        holds_streams: bool,
    ) -> None:
        self._receive, self._send = receive, send
        self._timeout_s, self._on_end, self._holds_streams = timeout_s, on_end, holds_streams
        self._left = asyncio.Event()
        self._watch: asyncio.Future[None] | None = None
        self._start: Message | None = None
        self._parts: list[bytes] = []
        self._is_over = False

    async def send(self, message: Message) -> None:
        """Pass on what the application sends."""
        if self._is_over:
            return
        if message["type"] == "http.response.start" and self._is_held(message):
            self._start = message
        elif message["type"] == "http.response.body" and self._start is not None:
            await self._send_held(self._start, message)
        else:
            await self._pass(message)

    async def receive(self) -> Message:
        """Return, once the client has left, or was given up, that it has left.

        Whoever asks again after that is answered without a wait, as SGLang's polls need it.
        """
        if self._watch is None:
            self._watch = asyncio.ensure_future(self._await_leave())
        await self._left.wait()
        return {"type": "http.disconnect"}

    def close(self) -> None:
        """Look after the client no longer."""
        if self._watch is not None:
            self._watch.cancel()

    async def _await_leave(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left.set()

    def _is_held(self, start: Message) -> bool:
        return start["status"] >= 400 or (self._holds_streams and _is_stream(start))

    async def _send_held(self, start: Message, message: Message) -> None:
        """Send `start`, and what came after it, once it is seen whether that is an error."""
        self._parts.append(message.get("body", b""))
        body, has_more = b"".join(self._parts), bool(message.get("more_body", False))
        if start["status"] < 400:
            if has_more and not body:
                return
            event = _mapping(body.partition(b"\n\n")[0].removeprefix(_EVENT))
            error = event.get("error")
            if isinstance(error, dict) and _is_failure(error.get("code")):
                await self._fail(start, error["code"], error)
                return
        else:
            if has_more and len(body) <= _MOST_REWRITTEN:
                return
            found = _mapping(body)
            if not has_more and not isinstance(found.get("error"), dict):
                if start["status"] < 500 and not _kind(start).startswith(b"application/json"):
                    found = {"message": body.decode(errors="replace").strip()}
                await self._fail(start, start["status"], found)
                return
        self._start = None
        await self._pass(start)
        await self._pass({**message, "body": body})

    async def _fail(self, start: Message, status: int, error: Mapping[str, Any]) -> None:
        """Send an error in the place of what the application sends."""
        said = error.get("message", error.get("detail"))
        text = said.partition(_WHERE)[0] if isinstance(said, str) else ""
        text = text or "the server failed; its log says why"
        body = error_body(status, text, error.get("param"), error.get("code"))
        headers = [
            *((name, value) for name, value in start["headers"] if name.lower() not in _OF_BODIES),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await self._pass({"type": "http.response.start", "status": status, "headers": headers})
        await self._pass({"type": "http.response.body", "body": body})

    async def _pass(self, message: Message) -> None:
        if self._is_over:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(message)
        except TimeoutError:
            self._is_over = True
            self._left.set()
            return
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._is_over = True
            self._on_end()


def _is_stream(start: Message) -> bool:
    return _kind(start).startswith(b"text/event-stream")


def _kind(start: Message) -> bytes:
    """Return the content type of an answer; SGLang gives its plain text none."""
    kinds: Iterator[bytes] = (
        value for name, value in start["headers"] if name.lower() == b"content-type"
    )
    return next(kinds, b"")


def _is_failure(code: object) -> bool:
    return isinstance(code, int) and 400 <= code < 600


def _mapping(text: bytes) -> dict[str, Any]:
    """Return the JSON mapping in `text`, an empty one if there is none."""
    try:
        found = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return {}
    return found if isinstance(found, dict) else {}
