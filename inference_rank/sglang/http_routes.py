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
from tandemkv.cache_rank.protocol.fault_points import enable_faults
from tandemkv.cache_rank.protocol.heartbeat import request_status
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.inference_rank import runtime as runtime_module
from tandemkv.inference_rank.edge.install import install, pause_reason, refusals

from .contract import check_hooks_applied
from .drain import DrainMiddleware
from .nodes import follow_end
from .shutdown import create as create_shutdown

_TIMEOUT_S = 1.0
_STATUS, _READY = "/tandemkv/status", "/tandemkv/ready"
_WARMING_UP = "SGLang warms up; at a machine's first start it compiles kernels, for minutes"


def serve_http(
    server_args: Any, manager: Any, *args: Any, execute_warmup_func: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add our routes to SGLang's application and the edge around it (BEFORE hook).

    Raises `SettingsError` if the edge cannot be as it is set, and `ContractError` if SGLang did not
    apply a hook: it only logs that.
    """
    from .hooks import http_hooks

    check_hooks_applied([target for target, _, _ in http_hooks()])
    from sglang.srt.entrypoints.http_server import app

    add_routes(app, manager)
    with_key = install(app, server_args, manager, execute_warmup_func=execute_warmup_func)
    return (server_args, manager, *args), kwargs | {"execute_warmup_func": with_key}


def add_routes(app: Any, manager: Any) -> None:
    """Add our routes to SGLang's application, before its HTTP server starts."""
    from fastapi.responses import JSONResponse

    run_dir = runtime_module.run_dir_from_environment()
    enable_faults("http", run_dir.path)
    shutdown, nodes = create_shutdown(), runtime_module.nodes_from_environment()
    drain = shutdown.drain

    def on_startup() -> None:
        shutdown.install()
        if nodes is not None:
            loop = asyncio.get_running_loop()
            follow_end(nodes, lambda: loop.call_soon_threadsafe(shutdown.begin))

    app.add_middleware(DrainMiddleware, drain=drain, on_startup=on_startup)

    async def collect() -> dict[str, Any]:
        reason = drain.reason or (None if _is_warm(manager) else _WARMING_UP)
        return await collect_status(run_dir, not_ready=reason or pause_reason(manager))

    @app.get(_STATUS)
    async def status() -> JSONResponse:
        """State of all ranks, and what the edge before them has refused."""
        return JSONResponse(await collect() | refusals())

    @app.get(_READY)
    async def ready() -> JSONResponse:
        """200 when both ranks are connected and SGLang has answered a request, else 503."""
        if drain.reason is not None:  # at once: the ranks may be ending
            return JSONResponse(readiness({"ready": False, "reason": drain.reason}, run_dir), 503)
        collected = await collect()
        return JSONResponse(readiness(collected, run_dir), 200 if collected["ready"] else 503)


def readiness(collected: dict[str, Any], run_dir: RunDir) -> dict[str, Any]:
    """Return what ``/tandemkv/ready`` says: ``ready``, else the ``reason``, and whose answer it is.

    A launcher whose SGLang could not bind its port would take another server there for its own.
    """
    shown = {key: collected[key] for key in ("ready", "reason") if key in collected}
    if not collected["ready"]:
        rank = collected.get("inference_rank", {})
        state = rank.get("info", {}).get("state", "serving")
        if rank.get("error"):  # its text is for `status`
            state = "it does not answer"
        why = "SGLang starts" if state == "serving" else state
        shown.setdefault("reason", f"inference rank: {why}")
    return shown | {"instance": run_dir.instance}


def _is_warm(manager: Any) -> bool:
    """Whether SGLang's own first request is through, or was not asked for.

    On a GPU it compiles what the model still lacks: minutes, on a machine's first start.
    """
    from sglang.srt.managers.tokenizer_manager import ServerStatus

    return bool(manager.server_status is not ServerStatus.Starting)


async def collect_status(run_dir: RunDir, *, not_ready: str | None) -> dict[str, Any]:
    """Ask both ranks; `not_ready` says why this process answers no requests, whatever they say.

    Returns ``ready``, ``inference_rank`` and ``cache_ranks``; a rank that does not answer has an
    ``error`` instead of values. If this process alone is not ready also a ``reason``.
    """
    placement = runtime_module.settings_from_environment().placement
    # Of other hosts the run directories are out of reach; each has metrics of its own.
    sockets = [run_dir.of_rank(rank).heartbeat_socket for rank in placement.engines_of(0)]
    inference, *cache_ranks = await asyncio.gather(
        *(asyncio.to_thread(_ask, socket) for socket in (run_dir.inference_socket, *sockets))
    )
    is_ready = bool(inference.get("ready"))  # requests wait while a lost cache rank comes back
    collected = {"ready": is_ready, "inference_rank": inference, "cache_ranks": cache_ranks}
    if is_ready and not_ready is not None:
        collected |= {"ready": False, "reason": not_ready}
    return collected


def _ask(socket_path: Path) -> dict[str, Any]:
    """Return what a rank says; no text names the folder of its sockets, for probes have no key."""
    folder = f"{socket_path.parent}/"
    try:
        reply = request_status(socket_path, timeout_s=_TIMEOUT_S)
    except TandemKVError as error:
        return {"ready": False, "error": str(error).replace(folder, "")}
    info = {name: text.replace(folder, "") for name, text in reply.info.items()}
    return msgspec.structs.asdict(reply) | {"info": info}
