# SPDX-License-Identifier: Apache-2.0
"""Questions to the running server over HTTP. Proxies are never used: it is this machine."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any, NamedTuple

from tandemkv.cache_rank.protocol.errors import TandemKVError

_MAX_REPLY_BYTES = 1 << 22


class StatusUnavailableError(TandemKVError):
    """No status could be had from the server."""


class ServerState(NamedTuple):
    """What ``/tandemkv/ready`` says; `detail` is the reason while not ready.

    `is_other`: another server answers than the one that was asked for.
    """

    reachable: bool
    ready: bool
    detail: str
    is_other: bool = False


def server_address(url: str) -> str:
    """Return the address without the /v1 of the API, with which `serve` prints it."""
    return url.rstrip("/").removesuffix("/v1")


def server_state(url: str, timeout_s: float = 2.0, *, instance: str | None = None) -> ServerState:
    """Ask whether the server at `url` is ready. Never raises for a server that is not there.

    `instance` names the one that is meant (`RunDir.instance`); None: whichever answers.
    """
    try:
        code, body = _get(f"{url}/tandemkv/ready", timeout_s)
    except (OSError, http.client.HTTPException) as error:
        return ServerState(reachable=False, ready=False, detail=_reason(error))
    if code == 404:
        return ServerState(
            reachable=True, ready=False, detail="the server runs without the tandemkv plugin"
        )
    reply = _object_in(body) or {}
    found = str(reply.get("instance", ""))
    # An error may come from SGLang itself, which knows no instance.
    if instance is not None and found != instance and (found or code == 200):
        who = "a server of tandemkv" if found else "a server"
        return ServerState(
            reachable=True,
            ready=False,
            detail=f"{who} that was started elsewhere answers at {url}: the port is taken; stop it "
            "or choose another --port",
            is_other=True,
        )
    text = str(reply.get("reason", "")) or " ".join(body.decode("utf-8", errors="replace").split())
    return ServerState(reachable=True, ready=code == 200, detail=text[:300] or f"HTTP {code}")


def _object_in(body: bytes) -> dict[str, Any] | None:
    """Return a reply in JSON; None if it is none."""
    try:
        found = json.loads(body)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def fetch_status(url: str) -> dict[str, Any]:
    """Return the status of the server at `url`.

    Raises `StatusUnavailableError` if nothing answers there, or not in the expected form.
    """
    address = f"{server_address(url)}/tandemkv/status"
    try:
        code, body = _get(address, timeout_s=10.0)
    except ValueError as error:
        raise StatusUnavailableError(f"url={url}: {error}; e.g. http://127.0.0.1:30000") from error
    except (OSError, http.client.HTTPException) as error:
        raise StatusUnavailableError(
            f"nothing answers at {address} ({_reason(error)}); is `tandemkv serve` running there? "
            "Give another address with --url"
        ) from error
    if code == 404:
        raise StatusUnavailableError(f"{url} is a server without the tandemkv plugin")
    status = _object_in(body)
    if status is None:
        raise StatusUnavailableError(f"{address} answered HTTP {code} without a status")
    return status


def _get(address: str, timeout_s: float) -> tuple[int, bytes]:
    if not address.startswith(("http://", "https://")):
        raise ValueError("the address must begin with http:// or https://")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(address, timeout=timeout_s) as reply:
            return int(reply.status), reply.read(_MAX_REPLY_BYTES)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(_MAX_REPLY_BYTES)


def _reason(error: Exception) -> str:
    inner = getattr(error, "reason", None) or error
    return str(getattr(inner, "strerror", None) or inner or type(inner).__name__)
