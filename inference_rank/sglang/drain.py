# SPDX-License-Identifier: Apache-2.0
"""Drain: new work is refused, work under way may finish, and nobody's connection is just cut.

Runs in the process that serves HTTP, on its event loop, as ASGI middleware before SGLang's
routes. It knows nothing of SGLang; `shutdown` says when to drain, and ends the processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandemkv.cache_rank.protocol.fault_points import reach
from tandemkv.inference_rank.edge.refusal import error_body

DRAIN_TIMEOUT_VARIABLE = "TANDEMKV_DRAIN_TIMEOUT_S"
DEFAULT_DRAIN_TIMEOUT_S = 30.0
RETRY_AFTER_S = 5
"""What clients are told to wait: a cache rank is back in seconds, SGLang within a minute."""

_FREE_PREFIXES = ("/tandemkv/", "/health", "/metrics")
"""Paths of probes: answered also while draining, and not waited for."""
_TICK_S = 0.05
_LOG = logging.getLogger(__name__)


class Drain:
    """State of one HTTP process. Belongs to its event loop."""

    def __init__(self) -> None:
        self.reason: str | None = None
        """Why new work is refused; None while it is not."""
        self._exchanges: set[_Exchange] = set()

    @property
    def num_in_flight(self) -> int:
        """Requests that have no complete answer yet."""
        return len(self._exchanges)

    def refuse(self, reason: str) -> None:
        """Refuse new work from now on, with 503 and `reason`."""
        self.reason = reason

    async def finish(self, timeout_s: float) -> bool:
        """Wait until no request is in flight; False if `timeout_s` were not enough."""
        deadline = time.monotonic() + timeout_s
        while self._exchanges and time.monotonic() < deadline:
            await asyncio.sleep(_TICK_S)
        return not self._exchanges

    def cut(self, reason: str) -> None:
        """End every request in flight: 503 where no answer has begun, else an error event."""
        self.refuse(reason)
        for exchange in list(self._exchanges):
            exchange.cut(reason)

    @contextlib.contextmanager
    def counted(self, exchange: _Exchange) -> Iterator[None]:
        """Count a request until it has its answer, or has lost its client."""
        self._exchanges.add(exchange)
        try:
            yield
        finally:
            self.forget(exchange)

    def forget(self, exchange: _Exchange) -> None:
        """Do not wait for a request: SGLang's routes return two seconds after a stream's end."""
        self._exchanges.discard(exchange)


class DrainMiddleware:
    """ASGI middleware that counts, refuses and cuts as its `Drain` says.

    It also adds ``Retry-After`` to each 503 that lacks it, such as those of a lost cache rank.
    `on_startup` is called on the event loop before the first request.
    """

    def __init__(
        self, app: ASGIApp, drain: Drain, on_startup: Callable[[], None] = lambda: None
    ) -> None:
        self._app = app
        self._drain = drain
        self._on_startup = on_startup

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] == "lifespan":
            self._on_startup()
        if scope["type"] != "http" or _is_free(scope):
            await self._app(scope, receive, send)
            return
        reach("http.request")
        exchange = _Exchange(send, self._drain.forget)
        if self._drain.reason is not None:
            await exchange.refuse(self._drain.reason)
            return
        with self._drain.counted(exchange):
            await exchange.run(self._app(scope, receive, exchange.send))


def _is_free(scope: Scope) -> bool:
    """Whether a request is a probe, or the question of a browser whether a page may send one.

    A browser that is answered 503 to that shows its page nothing, not even that it is a 503.
    """
    return scope["method"] == "OPTIONS" or str(scope["path"]).startswith(_FREE_PREFIXES)


class _Exchange:
    """One request and what of its answer has been sent."""

    def __init__(self, send: Send, on_end: Callable[[_Exchange], None]) -> None:
        self._send, self._on_end = send, on_end
        self._task: asyncio.Task[None] | None = None
        self._reason: str | None = None
        self._is_stream = False
        self._has_begun = False
        self._is_complete = False

    async def run(self, answer: Awaitable[None]) -> None:
        """Run the application; complete the answer in its place if `cut` is called."""
        self._task = asyncio.ensure_future(answer)
        try:
            await self._task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self._reason is None or (current is not None and current.cancelling()):
                raise
        if self._reason is not None and not self._is_complete:
            await self.refuse(self._reason)

    def cut(self, reason: str) -> None:
        """End the request with `reason`. Its application is cancelled."""
        if self._reason is None and self._task is not None:
            self._reason = reason
            self._task.cancel()

    async def send(self, message: Message) -> None:
        """Pass on what the application sends."""
        if message["type"] == "http.response.start":
            self._has_begun = True
            headers = list(message.get("headers", []))
            names = {bytes(name).lower(): bytes(value) for name, value in headers}
            self._is_stream = names.get(b"content-type", b"").startswith(b"text/event-stream")
            if message["status"] == 503 and b"retry-after" not in names:
                message = {**message, "headers": [*headers, _RETRY_AFTER]}
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self._is_complete = True
        await self._send(message)
        if self._is_complete:
            self._on_end(self)

    async def refuse(self, reason: str) -> None:
        """Send an error, as far as what was sent before allows."""
        body = error_body(503, reason, code=503)
        if self._has_begun:
            # A body that is no stream stays short of its end: the server closes the connection.
            if self._is_stream:
                event = b"data: " + body + b"\n\n"
                await self._send({"type": "http.response.body", "body": event})
            return
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            _RETRY_AFTER,
        ]
        await self._send({"type": "http.response.start", "status": 503, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


_RETRY_AFTER = (b"retry-after", str(RETRY_AFTER_S).encode())
