# SPDX-License-Identifier: Apache-2.0
"""An edge in front of an application that records what reaches it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from tandemkv.inference_rank.edge.keys import Keys
from tandemkv.inference_rank.edge.limits import Limits
from tandemkv.inference_rank.edge.middleware import Edge
from tandemkv.inference_rank.edge.settings import EdgeSettings

JSON = {"content-type": "application/json"}
API_KEY, ADMIN_KEY = "user-key-0123456789", "admin-key-0123456789"
CHAT, COMPLETIONS, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"


@dataclass
class Behind:
    """Stands for SGLang: answers 200 and remembers."""

    seen: list[dict[str, Any]] = field(default_factory=list)
    hold: asyncio.Event | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        self.seen.append({**scope, "body": message.get("body", b"")})
        if self.hold is not None:
            await self.hold.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


@dataclass
class World:
    """An edge and what it said."""

    edge: Edge
    behind: Behind
    refused: list[int]

    async def send(
        self, method: str, path: str, *, body: Any = None, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        kind = {} if body is None else JSON
        transport = httpx.ASGITransport(app=self.edge)
        async with httpx.AsyncClient(transport=transport, base_url="http://edge") as client:
            return await client.request(
                method, path, content=content, headers=kind | (headers or {})
            )

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return asyncio.run(self.send("POST", path, body=body, headers=headers))

    def get(self, path: str, **headers: str) -> httpx.Response:
        return asyncio.run(self.send("GET", path, headers=headers))


def make_limits(
    *,
    is_evaluation: bool = False,
    has_grammars: bool = True,
    has_suffixes: bool = False,
    **settings: Any,
) -> Limits:
    return Limits(
        settings=EdgeSettings(**settings),
        vocab_size=1000,
        context_tokens=256,
        max_running_requests=2,
        model_names=frozenset({"m", "default"}),
        reasoning_efforts=("none", "low", "xhigh", "max"),
        has_grammars=has_grammars,
        has_suffixes=has_suffixes,
        is_evaluation=is_evaluation,
    )


def make_world(
    *,
    keys: Keys | None = None,
    closed: Callable[[], str | None] = lambda: None,
    behind: ASGIApp | None = None,
    is_evaluation: bool = False,
    has_grammars: bool = True,
    has_suffixes: bool = False,
    **settings: Any,
) -> World:
    refused: list[int] = []
    app = behind or Behind()
    edge = Edge(
        app,
        make_limits(
            is_evaluation=is_evaluation,
            has_grammars=has_grammars,
            has_suffixes=has_suffixes,
            **settings,
        ),
        keys or Keys(),
        closed=closed,
        count_refusal=refused.append,
    )
    assert isinstance(app, Behind)
    return World(edge, app, refused)
