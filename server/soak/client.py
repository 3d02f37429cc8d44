# SPDX-License-Identifier: Apache-2.0
"""Sends one request and says how it ended. Proxies are never used."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
import urllib.parse
from dataclasses import dataclass, field
from typing import Any, Literal

from .requests import Request

Ending = Literal["complete", "hung up", "error event", "cut", "unreachable", "timeout"]
_MAX_TEXT = 4096
_SILENCE_S = 120.0
"""Longest silence of the server within an answer."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How a request ended."""

    request: Request
    started: float
    ended: float = 0.0
    """Seconds since the epoch."""
    status: int = 0
    """Of HTTP, or of the error event that ended a stream; 0 if there was no answer."""
    ending: Ending = "cut"
    """``complete``; ``hung up`` by us; ``error event`` in a stream; ``cut``: the connection ended
    before the answer did; ``unreachable``: nobody listened; ``timeout``."""
    retry_after: bool = False
    """Whether the answer says when to come again."""
    text: str = ""
    """What was generated, or the error."""
    first_s: float | None = None
    """Seconds to the first event of a stream."""
    gaps_s: list[float] = field(default_factory=list)
    """Seconds between its events."""
    body: Any = None


class Client:
    """Talks to one server; any thread may use it."""

    def __init__(
        self, url: str, *, api_key: str | None = None, admin_key: str | None = None
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._api_key, self._admin_key = api_key, admin_key

    def ask(self, method: str, path: str, *, is_admin: bool = False) -> tuple[int, bytes]:
        """Send a request without a body, and return status and answer.

        Raises `OSError` or `http.client.HTTPException` if there is none.
        """
        with contextlib.closing(self._connection(30.0)) as connection:
            connection.request(method, path, headers=self._headers(is_admin=is_admin))
            reply = connection.getresponse()
            return reply.status, reply.read()

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)

    def _headers(self, *, is_admin: bool = False) -> dict[str, str]:
        key = self._admin_key if is_admin and self._admin_key else self._api_key
        return {"authorization": f"Bearer {key}"} if key else {}

    def send(self, request: Request) -> Outcome:
        """Send `request`; never raises for what the server does."""
        outcome = Outcome(request=request, started=time.time())
        connection = self._connection(_SILENCE_S)
        try:
            connection.connect()
        except OSError:
            outcome.ending = "unreachable"
        else:
            try:
                self._exchange(connection, request, outcome)
            except TimeoutError:
                outcome.ending = "timeout"
            except (OSError, http.client.HTTPException, ValueError) as error:
                outcome.text += f" [{type(error).__name__}]"
        finally:
            connection.close()
            outcome.ended = time.time()
        return outcome

    def _exchange(
        self, connection: http.client.HTTPConnection, request: Request, outcome: Outcome
    ) -> None:
        data = request.raw if request.raw is not None else json.dumps(request.body).encode()
        headers = self._headers() | {"content-type": "application/json"}
        connection.request("POST", request.path, data, headers)
        if request.hang_up_after == 0:
            time.sleep(0.05)
            outcome.ending = "hung up"
            return
        reply = connection.getresponse()
        outcome.status = reply.status
        outcome.retry_after = reply.headers.get("retry-after") is not None
        if (reply.headers.get("content-type") or "").startswith("text/event-stream"):
            self._read_stream(connection, reply, outcome)
            return
        text = reply.read()
        outcome.ending = "complete"
        outcome.body = json.loads(text) if reply.status == 200 else None
        told = text[:300].decode("utf-8", "replace")
        outcome.text = _texts(outcome.body) if outcome.body else told

    def _read_stream(
        self,
        connection: http.client.HTTPConnection,
        reply: http.client.HTTPResponse,
        outcome: Outcome,
    ) -> None:
        last, seen = time.time(), 0
        texts: dict[int, str] = {}
        while line := reply.readline():
            if not line.startswith(b"data:"):
                continue
            now = time.time()
            if outcome.first_s is None:
                outcome.first_s = now - outcome.started
            else:
                outcome.gaps_s.append(now - last)
            last, seen = now, seen + 1
            event = line.removeprefix(b"data:").strip()
            if event == b"[DONE]":
                outcome.ending = "complete"
                break
            found = json.loads(event)
            if "error" in found:
                outcome.ending = "error event"
                outcome.status = int(found["error"].get("code") or 500)
                outcome.text = str(found["error"].get("message"))[:300]
                return
            for choice in found.get("choices", ()):
                texts[choice["index"]] = texts.get(choice["index"], "") + _text(choice)
            if seen == outcome.request.hang_up_after:
                if connection.sock is not None:
                    connection.sock.shutdown(socket.SHUT_RDWR)
                outcome.ending = "hung up"
                break
        outcome.text = "\n".join(texts[index][:_MAX_TEXT] for index in sorted(texts))


def _texts(body: Any) -> str:
    choices = body.get("choices", ()) if isinstance(body, dict) else ()
    return "\n".join(_text(choice)[:_MAX_TEXT] for choice in choices)


def _text(choice: Any) -> str:
    part = choice.get("delta") or choice.get("message") or {}
    return str(choice.get("text") or part.get("content") or "")
