# SPDX-License-Identifier: Apache-2.0
"""The routes that are served. All others answer 404, whatever SGLang adds to its application."""

from __future__ import annotations

from dataclasses import dataclass

from .administration import AdminCheck, check_logging, check_profile
from .keys import Role
from .refusal import RequestRefusedError
from .requests import (
    RequestCheck,
    check_chat,
    check_completion,
    check_detokenize,
    check_native,
    check_tokenize,
)


@dataclass(frozen=True, slots=True)
class Route:
    """How the edge treats a route."""

    methods: tuple[str, ...]
    role: Role
    check: RequestCheck | None = None
    """Of its JSON body; such a route counts as load."""
    admin_check: AdminCheck | None = None
    """Of its JSON body, an empty one if there is none."""
    is_probe: bool = False
    """Whether callers at one time share one answer."""
    opens_in_evaluation: bool = False
    """Whether ``--evaluation`` opens it to users."""


def _post(check: RequestCheck) -> Route:
    return Route(("POST",), Role.USER, check)


_PROBE = Route(("GET",), Role.ANYONE, is_probe=True)
_READ = Route(("GET",), Role.USER)
_ADMIN_READ, _ADMIN = Route(("GET",), Role.ADMIN), Route(("POST",), Role.ADMIN)

ROUTES: dict[str, Route] = {
    # Probes have no key: launcher, load balancer, kubelet, Prometheus.
    "/tandemkv/ready": _PROBE,
    "/tandemkv/status": _PROBE,
    "/health": _PROBE,
    "/metrics": _PROBE,
    "/metrics/": _PROBE,
    "/v1/completions": _post(check_completion),
    "/v1/chat/completions": _post(check_chat),
    "/generate": _post(check_native),
    "/tokenize": _post(check_tokenize),
    "/v1/tokenize": _post(check_tokenize),
    "/detokenize": _post(check_detokenize),
    "/v1/detokenize": _post(check_detokenize),
    "/v1/models": _READ,
    "/model_info": _READ,
    "/get_model_info": _READ,
    "/server_info": _ADMIN_READ,
    "/get_server_info": _ADMIN_READ,
    "/get_load": _ADMIN_READ,
    "/v1/loads": _ADMIN_READ,
    "/health_generate": _ADMIN_READ,
    "/flush_cache": Route(("POST",), Role.ADMIN, opens_in_evaluation=True),
    "/abort_request": _ADMIN,
    "/pause_generation": _ADMIN,
    "/continue_generation": _ADMIN,
    "/configure_logging": Route(("POST",), Role.ADMIN, admin_check=check_logging),
    "/start_profile": Route(("POST",), Role.ADMIN, admin_check=check_profile),
    "/stop_profile": _ADMIN,
    "/freeze_gc": _ADMIN,
}
"""Not there, even for administrators: what changes weights (the cache rank predicts with those of
the start, and SGLang reads some of them with pickle), sessions, adapters, HiCache, tracing."""

_MODEL_PREFIX = "/v1/models/"


def find_route(method: str, path: str) -> Route:
    """Return how to treat a request.

    Raises `RequestRefusedError`: 404 if the route is not served, 405 if not with this method.
    """
    route = ROUTES.get(path) if model_of(path) is None else _READ
    if route is None:
        raise RequestRefusedError(
            404,
            "this server does not serve that route; docs/security.md lists those that it serves",
            code="unknown_route",
        )
    if method not in route.methods:
        allowed = ", ".join(route.methods)
        raise RequestRefusedError(
            405, f"method {method[:20]}: use {allowed}", headers={"allow": allowed}
        )
    return route


def model_of(path: str) -> str | None:
    """Return the model that ``/v1/models/<name>`` names; None for other routes."""
    name = path.removeprefix(_MODEL_PREFIX)
    return name if name and name != path else None
