# SPDX-License-Identifier: Apache-2.0
"""The edge: an ASGI application around SGLang's. Runs in the HTTP process, on its event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .admission import Admission
from .answer import Answer
from .body import Incoming, parse_json_object, read_body, replay, with_body
from .keys import Keys, Role
from .limits import Limits
from .refusal import RequestRefusedError, shown
from .requests import RequestCheck
from .routes import Route, find_route, model_of
from .shared_probes import SharedProbes

_NO_BODY = 1 << 16
"""Bodies of administration routes are small."""

_WAITED = frozenset((408, 413))
"""Statuses of refusals before which a body was taken for as long, or as far, as it may be."""

TAKE_TIMEOUT_S = 60.0
"""Longest wait for a client to take a part of its answer, beyond what the connection buffers."""

_OPENAI_PREFIX = "/v1/"
"""Of these routes SGLang waits for the first event of a stream before it begins an answer."""

_PREFLIGHT = frozenset((b"origin", b"access-control-request-method"))
"""Headers of a browser's question whether a page may send a request. Without the second one
SGLang's application would take it for a request."""

_READABLE_BY = b"access-control-allow-origin"
_FOR_PAGES = (
    (b"access-control-allow-credentials", b"true"),
    (b"access-control-expose-headers", b"retry-after"),
    (b"vary", b"Origin"),
)

_HANDED_ON = frozenset(
    (b"accept", b"connection", b"content-length", b"content-type", b"host", b"origin",
     b"traceparent", b"tracestate", b"transfer-encoding", b"user-agent")
)  # fmt: skip
"""No key, which SGLang's logs must not get at, and no field by another way: SGLang takes a
request's rank, id, priority and labels of metrics from headers too."""


class Edge:
    """Refuses what SGLang must not see; hands on the rest.

    `app` is SGLang's application, with all of its own middleware. `closed` returns why no
    completions are admitted now, or None; `count_refusal` is told the status of each request that
    is refused.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        keys: Keys,
        *,
        closed: Callable[[], str | None],
        count_refusal: Callable[[int], None],
    ) -> None:
        self._app = app
        self._limits = limits
        self._keys = keys
        self._count_refusal = count_refusal
        self._probes = SharedProbes(app)
        self.admission = Admission(limits.max_admitted, closed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; ``lifespan`` goes through, a web socket is closed."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        send = self._to_pages(scope, send)
        headers = {name.lower(): value for name, value in scope["headers"]}
        incoming = Incoming(receive, scope, headers)
        try:
            await self._serve(scope, incoming, send, headers)
        except RequestRefusedError as refusal:
            self._count_refusal(refusal.status)
            if refusal.status not in _WAITED:
                await incoming.discard(timeout_s=self._limits.settings.body_timeout_s)
            await refusal.response()(scope, incoming, send)

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, headers: dict[bytes, bytes]
    ) -> None:
        self._check_origin(headers.get(b"origin"))
        path: str = scope["path"]
        if scope["method"] == "OPTIONS" and headers.keys() >= _PREFLIGHT:
            await self._app(scope, receive, send)  # CORS alone answers it
            return
        route = find_route(scope["method"], path)
        if route.is_probe:
            response = await self._probes.answer(scope)
            await response(scope, receive, send)
            return
        needed = route.role
        if route.opens_in_evaluation and self._limits.is_evaluation:
            needed = Role.USER
        self._keys.require(needed, headers.get(b"authorization"))
        scope = {
            **scope,
            "headers": [item for item in scope["headers"] if item[0].lower() in _HANDED_ON],
        }
        if route.check is not None:
            await self._serve_checked(scope, receive, send, headers, route.check)
            return
        self._check_model(path)
        await self._serve_plain(scope, receive, send, headers, route)

    async def _serve_checked(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        headers: dict[bytes, bytes],
        check: RequestCheck,
    ) -> None:
        with self.admission.enter() as place:
            found = await self._read(receive, headers, self._limits.body_bytes)
            place.grow(check(found, self._limits))
            written = msgspec.json.encode(found)
            del found
            holds = str(scope["path"]).startswith(_OPENAI_PREFIX)
            await self._ask(
                scope, written, receive, send, on_end=place.give_back, holds_streams=holds
            )

    async def _serve_plain(
        self, scope: Scope, receive: Receive, send: Send, headers: dict[bytes, bytes], route: Route
    ) -> None:
        found: dict[str, Any] | None = None
        if "POST" in route.methods and (
            headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        ):
            found = await self._read(receive, headers, _NO_BODY)
        if route.admin_check is not None:
            route.admin_check(found or {}, self._limits)
        body = b"" if found is None else msgspec.json.encode(found)
        await self._ask(scope, body, receive, send)

    async def _ask(
        self,
        scope: Scope,
        body: bytes,
        receive: Receive,
        send: Send,
        *,
        on_end: Callable[[], None] = lambda: None,
        holds_streams: bool = False,
    ) -> None:
        """Let SGLang answer a request with `body`, by way of an `Answer`."""
        answer = Answer(
            receive, send, timeout_s=TAKE_TIMEOUT_S, on_end=on_end, holds_streams=holds_streams
        )
        # An answer that is incomplete when this returns makes uvicorn close the connection.
        try:
            await self._app(with_body(scope, body), replay(body, answer.receive), answer.send)
        finally:
            answer.close()

    async def _read(
        self, receive: Receive, headers: dict[bytes, bytes], max_bytes: int
    ) -> dict[str, Any]:
        settings = self._limits.settings
        timeout_s = settings.body_timeout_s
        body = await read_body(receive, headers, max_bytes=max_bytes, timeout_s=timeout_s)
        return parse_json_object(body, max_depth=settings.max_json_depth)

    def _check_origin(self, origin: bytes | None) -> None:
        """Refuse pages of other origins: SGLang lets each call it from a browser."""
        if origin is None:
            return
        text = origin.decode("latin-1")
        if text not in self._limits.settings.cors_origins:
            raise RequestRefusedError(
                403,
                f"origin={shown(text)}: pages of this origin may not call the server; allow it "
                "with --cors-origins",
                code="origin_not_allowed",
            )

    def _to_pages(self, scope: Scope, send: Send) -> Send:
        """Return a ``send`` that lets a page of an allowed origin read what it is answered.

        SGLang's CORS does so for its routes. Refusals, here and while the server drains, do not
        come by there.
        """
        origin = dict(scope["headers"]).get(b"origin", b"")
        if origin.decode("latin-1") not in self._limits.settings.cors_origins:
            return send

        async def send_readable(message: Message) -> None:
            headers = list(message.get("headers", ()))
            is_start = message["type"] == "http.response.start"
            if is_start and _READABLE_BY not in {name.lower() for name, _ in headers}:
                message = {**message, "headers": [*headers, (_READABLE_BY, origin), *_FOR_PAGES]}
            await send(message)

        return send_readable

    def _check_model(self, path: str) -> None:
        name = model_of(path)
        if name is not None and name not in self._limits.model_names:
            raise RequestRefusedError(
                404, f"model={shown(name)}: this server has no such model", code="model_not_found"
            )
