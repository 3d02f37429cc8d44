# SPDX-License-Identifier: Apache-2.0
"""``/tandemkv/status`` and ``/tandemkv/ready`` on SGLang's HTTP server.

They run in the HTTP process and ask both ranks over their status sockets, so that they say
what is, not what this process believes.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from tandemkv.cache_rank.protocol.errors import TandemKVError
from tandemkv.cache_rank.protocol.heartbeat import request_status
from tandemkv.cache_rank.protocol.run_dir import RunDir

from . import runtime as runtime_module

_TIMEOUT_S = 1.0


def add_routes(*_: Any, **__: Any) -> None:
    """Add our routes to SGLang's application, before its HTTP server starts."""
    from fastapi.responses import JSONResponse
    from sglang.srt.entrypoints.http_server import app

    run_dir = runtime_module.run_dir_from_environment()

    @app.get("/tandemkv/status")
    async def status() -> JSONResponse:
        """State of both ranks."""
        return JSONResponse(await collect_status(run_dir))

    @app.get("/tandemkv/ready")
    async def ready() -> JSONResponse:
        """200 when hooks are applied and the cache rank's handshake is done, else 503."""
        collected = await collect_status(run_dir)
        code = 200 if collected["ready"] else 503
        return JSONResponse({"ready": collected["ready"]}, status_code=code)


async def collect_status(run_dir: RunDir) -> dict[str, Any]:
    """Ask both ranks.

    Returns
    -------
    dict
        ``ready``, ``inference_rank`` and ``cache_ranks``; a rank that does not answer has an
        ``error`` instead of values.
    """
    if runtime_module.settings_from_environment().exchange.is_in_process:
        inference = await asyncio.to_thread(_ask, run_dir.inference_socket)
        return {
            "ready": bool(inference.get("ready")),
            "inference_rank": inference,
            "cache_ranks": [],
        }
    inference, cache = await asyncio.gather(
        asyncio.to_thread(_ask, run_dir.inference_socket),
        asyncio.to_thread(_ask, run_dir.heartbeat_socket),
    )
    return {
        "ready": bool(inference.get("ready") and cache.get("ready")),
        "inference_rank": inference,
        "cache_ranks": [cache],
    }


def _ask(socket_path: Path) -> dict[str, Any]:
    try:
        reply = request_status(socket_path, timeout_s=_TIMEOUT_S)
    except TandemKVError as error:
        return {"ready": False, "error": str(error)}
    found: dict[str, Any] = msgspec.to_builtins(
        {
            "role": reply.role,
            "ready": reply.ready,
            "epoch": reply.epoch,
            "values": reply.values,
            "info": reply.info,
        }
    )
    return found
