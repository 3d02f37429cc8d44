# SPDX-License-Identifier: Apache-2.0
"""What ``/tandemkv/status`` and ``/tandemkv/ready`` say before and after SGLang is warm."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import prometheus_client
import pytest
from fastapi import FastAPI
from sglang.srt.plugins.hook_registry import HookRegistry

from tandemkv.cache_rank.protocol.errors import ContractError
from tandemkv.cache_rank.protocol.heartbeat import StatusServer
from tandemkv.cache_rank.protocol.messages import StatusReply
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings.placement import Placement
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings
from tandemkv.inference_rank import runtime as runtime_module
from tandemkv.inference_rank.edge import install as install_module
from tandemkv.inference_rank.sglang import http_routes
from tandemkv.inference_rank.sglang.hooks import http_hooks


def collect(
    monkeypatch: pytest.MonkeyPatch, *, rank_ready: bool, reason: str | None
) -> dict[str, Any]:
    settings = RankSettings(placement=Placement(link="local"))
    monkeypatch.setattr(runtime_module, "settings_from_environment", lambda: settings)
    monkeypatch.setattr(http_routes, "_ask", lambda _path: {"ready": rank_ready})
    run_dir: Any = SimpleNamespace(inference_socket=Path("none"))
    return asyncio.run(http_routes.collect_status(run_dir, not_ready=reason))


@pytest.mark.parametrize(
    "lost", ["TokenizerManager.create_abort_task", "SignalHandler.sigterm_handler"]
)
def test_each_hook_of_the_http_process_is_proven(
    lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them a stream's end may abort a later request, and SIGTERM does not drain."""
    applied = {target for target, _, _ in http_hooks() if not target.endswith(lost)}
    monkeypatch.setattr(HookRegistry, "_patched", applied)
    with pytest.raises(ContractError, match=f"did not apply the hooks on [a-z_.]*{lost};"):
        http_routes.serve_http(None, None, execute_warmup_func=None)


def test_not_ready_before_sglang_is_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first request would wait for what the warm-up compiles."""
    found = collect(monkeypatch, rank_ready=True, reason="SGLang warms up")
    assert found["ready"] is False
    assert "SGLang warms up" in found["reason"]


def test_a_warm_server_is_as_ready_as_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert collect(monkeypatch, rank_ready=True, reason=None)["ready"] is True
    found = collect(monkeypatch, rank_ready=False, reason=None)
    assert found["ready"] is False
    assert "reason" not in found


@pytest.mark.parametrize("engines_per_rank", [1, 2])
def test_each_cache_rank_is_asked(
    engines_per_rank: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Requests wait while one of them is away: that is no reason to send clients elsewhere."""
    placement = Placement(link="shared", tp_size=2, engines_per_rank=engines_per_rank)
    settings = RankSettings(placement=placement)
    monkeypatch.setattr(runtime_module, "settings_from_environment", lambda: settings)
    run_dir = RunDir.create(tmp_path / "run")
    asked: list[Path] = []

    def ask(path: Path) -> dict[str, Any]:
        asked.append(path)
        return {"ready": path == run_dir.inference_socket, "path": path}

    monkeypatch.setattr(http_routes, "_ask", ask)
    found = asyncio.run(http_routes.collect_status(run_dir, not_ready=None))
    sockets = [run_dir.heartbeat_socket, run_dir.path / "tp1" / "heartbeat.sock"]
    assert [rank["path"] for rank in found["cache_ranks"]] == sockets
    assert set(asked) == {run_dir.inference_socket, *sockets}
    assert found["ready"] is True


def test_status_counts_what_the_edge_refuses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As `/metrics` does, for those who look at `tandemkv status` alone."""
    registry = prometheus_client.CollectorRegistry()
    counter = partial(prometheus_client.Counter, registry=registry)
    monkeypatch.setattr(prometheus_client, "Counter", counter)
    monkeypatch.setattr(install_module, "_refused", Counter())
    run_dir = RunDir.create(tmp_path / "run")
    monkeypatch.setattr(runtime_module, "run_dir_from_environment", lambda: run_dir)
    monkeypatch.setattr(runtime_module, "nodes_from_environment", lambda: None)

    async def collect_ranks(*_: Any, **__: Any) -> dict[str, Any]:
        return {"ready": True}

    monkeypatch.setattr(http_routes, "collect_status", collect_ranks)
    monkeypatch.setattr(http_routes, "_is_warm", lambda _: True)
    app = FastAPI()
    http_routes.add_routes(app, SimpleNamespace(is_pause=False))

    async def ask() -> dict[str, Any]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            found: dict[str, Any] = (await client.get("/tandemkv/status")).json()
            return found

    assert asyncio.run(ask()) == {"ready": True, "edge_refused_total": 0}
    count = install_module._refusal_counter()
    for status in (429, 401, 429):
        count(status)
    refused = {"edge_refused_total": 3, "edge_refused_401": 1, "edge_refused_429": 2}
    assert asyncio.run(ask()) == {"ready": True, **refused}
    on_metrics = registry.get_sample_value("tandemkv_edge_refused_total", {"status": "429"})
    assert on_metrics == refused["edge_refused_429"]


def test_status_names_no_folder_of_sockets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It needs no key; the run directory's path may have the user's name."""
    monkeypatch.setattr(http_routes, "_TIMEOUT_S", 0.05)
    path = RunDir.create(tmp_path / "run").inference_socket
    error = http_routes._ask(path)["error"]
    assert error == f"{path.name}: nobody serves it; has the process started?"
    path.touch()
    assert http_routes._ask(path)["error"] == f"{path.name}: no answer within 0.05 s"
    path.unlink()
    monkeypatch.setattr(http_routes, "_TIMEOUT_S", 30.0)
    reply = StatusReply(
        role="inference_rank", epoch=0, ready=False, values={}, info={"lost_reason": f"{path}: no"}
    )
    with closing(StatusServer(path, status=lambda: reply)):
        assert http_routes._ask(path)["info"] == {"lost_reason": f"{path.name}: no"}


def test_readiness_says_whose_it_is(tmp_path: Path) -> None:
    one, two = (RunDir.create(tmp_path / name) for name in ("one", "two"))
    found = http_routes.readiness({"ready": True, "cache_ranks": []}, one)
    assert found == {"ready": True, "instance": one.instance}
    assert one.instance == RunDir.open(one.path).instance != two.instance
    assert one.token.hex() not in one.instance
    waiting = http_routes.readiness({"ready": False, "reason": "warms up"}, one)
    assert waiting["reason"] == "warms up"
    for rank, why in (
        ({"ready": False, "error": f"no answer at {tmp_path}"}, "it does not answer"),
        ({"ready": False, "info": {"state": "no cache rank"}}, "no cache rank"),
        ({"ready": False, "info": {}}, "SGLang starts"),
    ):
        found = http_routes.readiness({"ready": False, "inference_rank": rank}, one)
        assert found["reason"] == f"inference rank: {why}"


def test_warmth_is_what_sglang_says() -> None:
    pytest.importorskip("sglang")
    from sglang.srt.managers.tokenizer_manager import ServerStatus

    for status, is_warm in ((ServerStatus.Starting, False), (ServerStatus.Up, True)):
        assert http_routes._is_warm(SimpleNamespace(server_status=status)) is is_warm
