# SPDX-License-Identifier: Apache-2.0
"""Read a body that is bounded in bytes, time and depth, and hand it on as it was understood.

SGLang gets what the checks saw, written anew: of two keys of one name, or of a number in a string,
two parsers may think differently.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.types import Message, Receive, Scope

from .refusal import RequestRefusedError

_MOST_DISCARDED = 64 << 20
"""Rest of a long body that is still taken from the connection. To close it with bytes unread would
reset it, and a client that is still sending would never see the answer."""

_MOST_CONTAINERS = 1 << 16
"""Lists and mappings of one body. Each is checked on the event loop: millions fit into a body."""


async def read_body(
    receive: Receive, headers: Mapping[bytes, bytes], *, max_bytes: int, timeout_s: float
) -> bytes:
    """Return the body of a request.

    `headers` have lower-case names. The body is complete after `timeout_s`; what is beyond
    `max_bytes` is not kept. Raises `RequestRefusedError`: 413 if it is too long, 415 if it is not
    JSON or is compressed, 408 if it takes too long, 400 if the client leaves.
    """
    _check_headers(headers)
    stated = _stated_length(headers)
    try:
        async with asyncio.timeout(timeout_s):
            body, length = await _receive(receive, stated, max_bytes)
    except TimeoutError:
        raise RequestRefusedError(
            408, f"the body was not complete after {timeout_s:g} s (--body-timeout-s)"
        ) from None
    if body is not None:
        return body
    raise RequestRefusedError(
        413,
        f"a body of {max(stated, length)} bytes or more: at most {max_bytes} are accepted "
        "(--max-body-bytes)",
        code="request_too_large",
        headers={"connection": "close"},
    )


class NoJSONObjectError(RequestRefusedError):
    """What was read is no strict JSON, or no object."""


class Incoming:
    """A `receive` that knows whether the whole body of its request was taken from the connection.

    `headers` have lower-case names.
    """

    def __init__(self, receive: Receive, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        self._receive = receive
        self._headers = headers
        self._is_whole = not headers.keys() & {b"content-length", b"transfer-encoding"}
        asked = headers.get(b"connection", b"").lower().split(b",")
        self._is_closing = scope.get("http_version") == "1.0" or b"close" in map(bytes.strip, asked)

    async def __call__(self) -> Message:
        """Return the next message, as `receive` does."""
        message = await self._receive()
        self._is_whole |= not message.get("more_body", False)
        return message

    async def discard(self, *, timeout_s: float) -> None:
        """Take what is left, for `timeout_s` at most, if the connection is closed after an answer.

        A client that waits for "100 Continue" sends nothing before it is answered.
        """
        if not self._is_closing or b"expect" in self._headers:
            return
        if self._is_whole or _stated_length(self._headers) > _MOST_DISCARDED:
            return
        with contextlib.suppress(TimeoutError, RequestRefusedError):  # it takes too long, or left
            async with asyncio.timeout(timeout_s):
                await _receive(self, 0, 0)


async def _receive(receive: Receive, stated: int, max_bytes: int) -> tuple[bytes | None, int]:
    """Return a body and its length; no body if it is longer than `max_bytes`."""
    parts: list[bytes] = []
    length = 0
    while stated <= max_bytes + _MOST_DISCARDED:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestRefusedError(400, "the client left before its body was complete")
        part = message.get("body", b"")
        length += len(part)
        if max(length, stated) <= max_bytes:
            parts.append(part)
        else:
            parts.clear()
        is_last = not message.get("more_body", False)
        if is_last and length <= max_bytes:
            return b"".join(parts), length
        if is_last or length > max_bytes + _MOST_DISCARDED:
            break
    return None, length


def _check_headers(headers: Mapping[bytes, bytes]) -> None:
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise RequestRefusedError(
            415, f"content-type={kind[:60].decode('latin-1')}: application/json is required"
        )
    if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
        raise RequestRefusedError(415, "content-encoding: a body must not be compressed")


def _stated_length(headers: Mapping[bytes, bytes]) -> int:
    """Return the length that is stated, 0 if none is; of a longer number what 20 digits say."""
    stated = headers.get(b"content-length", b"")
    return int(stated.lstrip(b"0")[:20] or b"0") if stated.isdigit() else 0


def parse_json_object(body: bytes, *, max_depth: int) -> dict[str, Any]:
    """Return the JSON object in `body`.

    Raises `NoJSONObjectError`, 400, if it is no strict JSON (NaN, a lone surrogate) or no object,
    `RequestRefusedError`, 400, if it is nested too deeply or has too many parts.
    """
    too_deep = RequestRefusedError(
        400, f"the JSON is nested more than {max_depth} deep (--max-json-depth)"
    )
    try:
        found = msgspec.json.decode(body)
    except RecursionError:
        raise too_deep from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise NoJSONObjectError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise NoJSONObjectError(400, "the body must be a JSON object")
    level: list[Any] = [found]
    count = 0
    for _ in range(max_depth):
        level = [
            item
            for container in level
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, (dict, list))
        ]
        if not level:
            return found
        count += len(level)
        if count > _MOST_CONTAINERS:
            raise RequestRefusedError(
                400, f"the JSON has more than {_MOST_CONTAINERS} lists and mappings"
            )
    raise too_deep


def with_body(scope: Scope, body: bytes) -> Scope:
    """Return `scope` for a request whose body is `body`."""
    dropped = (b"content-length", b"transfer-encoding")
    headers = [(name, value) for name, value in scope["headers"] if name.lower() not in dropped]
    return {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives `body`, and then what the client does (it leaves)."""
    is_sent = False

    async def receive_again() -> Message:
        nonlocal is_sent
        if is_sent:
            return await receive()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again
