# SPDX-License-Identifier: Apache-2.0
"""Probes that come while one is answered share its answer.

They need no key, and each costs a generated token (``/health``) or threads that wait for a rank:
without this a stranger's flood would be load, and would starve the probes that matter.
"""

from __future__ import annotations

import asyncio

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Scope

from .body import replay


class SharedProbes:
    """Asks the application once for all who wait.

    `app` sees neither the query nor the headers of a caller.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._tasks: dict[str, asyncio.Task[Response]] = {}

    async def answer(self, scope: Scope) -> Response:
        """Return the answer of the probe that `scope` names."""
        path: str = scope["path"]
        task = self._tasks.get(path)
        if task is None:
            task = asyncio.create_task(self._ask(scope))
            self._tasks[path] = task
            task.add_done_callback(lambda _: self._tasks.pop(path))
        return await asyncio.shield(task)

    async def _ask(self, scope: Scope) -> Response:
        bare = {**scope, "query_string": b"", "headers": [(b"host", b"localhost")], "state": {}}
        messages: list[Message] = []

        async def stay() -> Message:  # nobody leaves as long as it takes
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Message) -> None:
            messages.append(message)

        await self._app(bare, replay(b"", stay), send)
        start, *rest = messages
        response = Response(b"".join(part.get("body", b"") for part in rest), start["status"])
        response.raw_headers = list(start["headers"])
        return response
