# SPDX-License-Identifier: Apache-2.0
"""``/tandemkv/status`` and ``/tandemkv/ready`` on SGLang's HTTP server.

They run in the HTTP process and ask both ranks over their status sockets, so that they say
what is, not what this process believes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tandemkv.cache_rank.protocol.errors import TandemKVError
from tandemkv.cache_rank.protocol.heartbeat import request_status
from tandemkv.cache_rank.protocol.run_dir import RunDir

from . import runtime as runtime_module
from .drain import Drain, DrainMiddleware
from .shutdown import create as create_shutdown

_TIMEOUT_S = 1.0
_STATUS, _READY = "/tandemkv/status", "/tandemkv/ready"
_WARMING_UP = "SGLang warms up; at a machine's first start it compiles kernels, for minutes"


def add_routes(*_: Any, **__: Any) -> None:
    """Add our routes to SGLang's application, before its HTTP server starts."""
    from fastapi.responses import JSONResponse
    from sglang.srt.entrypoints.http_server import app

    run_dir = runtime_module.run_dir_from_environment()
    shutdown = create_shutdown()
    drain = shutdown.drain
    app.add_middleware(DrainMiddleware, drain=drain, on_startup=shutdown.install)

    @app.get(_STATUS)
    async def status() -> JSONResponse:
        """State of both ranks."""
        return JSONResponse(await collect_status(run_dir, is_warm=_is_warm(), drain=drain))

    @app.get(_READY)
    async def ready() -> JSONResponse:
        """200 when both ranks are connected and SGLang has answered a request, else 503."""
        if drain.reason is not None:  # at once: the ranks may be ending
            return JSONResponse(readiness({"ready": False, "reason": drain.reason}, run_dir), 503)
        collected = await collect_status(run_dir, is_warm=_is_warm(), drain=drain)
        return JSONResponse(readiness(collected, run_dir), 200 if collected["ready"] else 503)


def let_probes_in(original: Callable[..., Any], *, path: str, **kwargs: Any) -> Any:
    """Answer our routes without SGLang's ``--api-key``, as it does with /health and /metrics.

    Who waits for a server (launcher, load balancer, kubelet) has no key.
    """
    if path in (_STATUS, _READY):
        kwargs["api_key"] = None
    return original(path=path, **kwargs)


def readiness(collected: dict[str, Any], run_dir: RunDir) -> dict[str, Any]:
    """Return what ``/tandemkv/ready`` says: ``ready``, maybe ``reason``, and whose answer it is.

    A launcher whose SGLang could not bind its port would take another server there for its own.
    """
    shown = {key: collected[key] for key in ("ready", "reason") if key in collected}
    return shown | {"instance": run_dir.instance}


def _is_warm() -> bool:
    """Whether SGLang's own first request is through, or was not asked for.

    On a GPU it compiles what the model still lacks: minutes, on a machine's first start.
    """
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.tokenizer_manager import ServerStatus

    status = http_server.get_global_state().tokenizer_manager.server_status
    return bool(status is not ServerStatus.Starting)


async def collect_status(
    run_dir: RunDir, *, is_warm: bool, drain: Drain | None = None
) -> dict[str, Any]:
    """Ask both ranks.

    Parameters
    ----------
    run_dir : RunDir
        Where their sockets are.
    is_warm : bool
        Whether SGLang answers requests without delay; else the server is not ready.
    drain : Drain, optional
        Of this process; a server that drains is not ready.

    Returns
    -------
    dict
        ``ready``, ``inference_rank`` and ``cache_ranks``; a rank that does not answer has an
        ``error`` instead of values. Before SGLang is warm, and while it drains, also a
        ``reason``.
    """
    collected = await _collect_ranks(run_dir)
    if drain is not None and drain.reason is not None:
        return collected | {"ready": False, "reason": drain.reason}
    if collected["ready"] and not is_warm:
        collected |= {"ready": False, "reason": _WARMING_UP}
    return collected


async def _collect_ranks(run_dir: RunDir) -> dict[str, Any]:
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
