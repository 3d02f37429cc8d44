# SPDX-License-Identifier: Apache-2.0
"""Which routes are served, and to whom; nothing that SGLang has or adds is open by itself."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import pytest
from edge_world import ADMIN_KEY, API_KEY, COMPLETIONS, Behind, World, make_world
from starlette.types import Receive, Scope, Send

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.inference_rank.edge import install as install_module
from tandemkv.inference_rank.edge.keys import Keys, Role
from tandemkv.inference_rank.edge.routes import ROUTES
from tandemkv.inference_rank.edge.settings import EDGE_VARIABLE, EdgeSettings, edge_settings
from tandemkv.inference_rank.sglang import versions as sglang_versions

BEARER = {"authorization": f"Bearer {API_KEY}"}
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
BODY = {"prompt": "x"}


def key_file(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def paths_of(routes: Any) -> set[str]:
    """Return the paths of an application, those of included routers too."""
    found = set()
    for route in routes:
        inner = getattr(route, "original_router", None)
        found |= {route.path} if inner is None else paths_of(inner.routes)
    return found


@pytest.fixture
def locked() -> World:
    return make_world(keys=Keys(api=API_KEY, admin=ADMIN_KEY))


def test_every_route_of_sglang_is_closed_unless_listed() -> None:
    """Walks SGLang's application: what it adds in another version is closed too."""
    http_server = pytest.importorskip("sglang.srt.entrypoints.http_server")
    world = make_world()
    paths = {re.sub(r"\{[^}]*\}", "x", path) for path in paths_of(http_server.app.routes)}
    assert len(paths) > 60
    methods = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD")
    reached = set()
    for path in paths:
        for method in methods:
            before = len(world.behind.seen)
            code = asyncio.run(world.send(method, path)).status_code
            assert code in (200, 401, 403, 404, 405, 415), (method, path, code)
            if len(world.behind.seen) > before or code == 415:
                reached.add((method, path))
    assert {path for _, path in reached} == {
        "/health", "/v1/models", "/model_info", "/get_model_info", "/generate", "/v1/completions",
        "/v1/chat/completions", "/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize",
    }  # fmt: skip
    for path in ("/configure_logging", "/pause_generation", "/flush_cache", "/start_profile"):
        assert world.post(path, {}).status_code == 403
    for path in ("/update_weights_from_tensor", "/update_weights_from_disk", "/load_lora_adapter"):
        assert world.post(path, {}, **ADMIN).status_code == 404


def test_every_listed_route_is_there() -> None:
    http_server = pytest.importorskip("sglang.srt.entrypoints.http_server")
    ours = {path for path in ROUTES if path.startswith(("/tandemkv/", "/metrics"))}
    there = paths_of(http_server.app.routes)
    versions = sglang_versions.VERSIONS
    is_old = versions.index(sglang_versions.installed()) < versions.index("0.5.21")
    assert set(ROUTES) - ours - there == (set() if is_old else {"/get_load"})  # then it is a 404


@pytest.mark.parametrize(
    ("path", "headers", "code"),
    [
        (COMPLETIONS, {}, 401),
        (COMPLETIONS, {"authorization": f"Bearer {API_KEY}x"}, 401),
        (COMPLETIONS, {"authorization": API_KEY}, 401),
        (COMPLETIONS, {"authorization": "Bearer "}, 401),
        (COMPLETIONS, BEARER, 200),
        (COMPLETIONS, ADMIN, 200),
        ("/flush_cache", {}, 401),
        ("/flush_cache", BEARER, 403),
        ("/flush_cache", ADMIN, 200),
        ("/no/such/route", ADMIN, 404),
    ],
)
def test_keys(locked: World, path: str, headers: dict[str, str], code: int) -> None:
    reply = locked.post(path, BODY, **headers)
    assert reply.status_code == code, reply.text
    assert len(locked.behind.seen) == (code == 200)
    for seen in locked.behind.seen:
        assert b"authorization" not in dict(seen["headers"])


def test_fields_do_not_come_in_headers() -> None:
    """SGLang takes some of a request's fields from headers, and does not check all."""
    world = make_world()
    taken = {"x-data-parallel-rank": "0", "x-override-rid": "a", "x-smg-routing-key": "a"}
    assert world.post(COMPLETIONS, BODY, **taken).status_code == 200
    names = {name for name, _ in world.behind.seen[0]["headers"]}
    assert b"content-type" in names
    assert not names & {name.encode() for name in taken}


def test_probes_need_no_key(locked: World) -> None:
    for path in ("/tandemkv/ready", "/tandemkv/status", "/health", "/metrics"):
        assert locked.get(path).status_code == 200
    for path in ("/health/../generate", "/health/", "/health_generate", "/healthx", "//health"):
        assert locked.get(path).status_code in (401, 404, 405)
    assert locked.post("/tandemkv/ready", {}).status_code == 405


def test_evaluation_lets_users_empty_the_cache() -> None:
    assert make_world().post("/flush_cache", {}).status_code == 403
    assert make_world(is_evaluation=True).post("/flush_cache", {}).status_code == 200


def test_key_files(tmp_path: Path) -> None:
    api = key_file(tmp_path / "api", f"{API_KEY}\n")
    admin = key_file(tmp_path / "admin", ADMIN_KEY)
    keys = Keys.read(EdgeSettings(api_key_file=api, admin_key_file=admin))
    assert keys.role_of(BEARER["authorization"].encode()) is Role.USER
    assert keys.role_of(ADMIN["authorization"].encode()) is Role.ADMIN
    assert keys.role_of(None) is Role.ANYONE
    assert not any(key in repr(vars(keys)) for key in (API_KEY, ADMIN_KEY))


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        (API_KEY, 0o640, r"mode 0640 .*0600 is required; chmod 0600"),
        (API_KEY, 0o604, "mode 0604"),
        ("short", 0o600, "at least 16"),
        (f"{API_KEY}\nsecond line", 0o600, "holds no usable key"),
        ("", 0o600, "holds no usable key"),
    ],
)
def test_refuses_key_files(tmp_path: Path, text: str, mode: int, message: str) -> None:
    path = key_file(tmp_path / "key", text, mode)
    with pytest.raises(SettingsError, match=message) as caught:
        Keys.read(EdgeSettings(api_key_file=path))
    assert "--api-key-file" in str(caught.value)
    assert API_KEY not in str(caught.value)


def test_refuses_what_is_no_key_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    for path in (tmp_path / "none", tmp_path, tmp_path / "fifo"):
        with pytest.raises(SettingsError, match=re.escape(f"--admin-key-file={path}")):
            Keys.read(EdgeSettings(admin_key_file=path))
    same = key_file(tmp_path / "same", API_KEY)
    with pytest.raises(SettingsError, match="hold the same key"):
        Keys.read(EdgeSettings(api_key_file=same, admin_key_file=same))


def test_pages_of_other_origins_may_not_call() -> None:
    world = make_world(cors_origins=("https://ui.example",))
    assert world.post(COMPLETIONS, BODY, origin="https://evil.example").status_code == 403
    assert world.post(COMPLETIONS, BODY, origin="null").status_code == 403
    assert world.post(COMPLETIONS, BODY, origin="https://ui.example").status_code == 200
    closed = asyncio.run(make_world().send("OPTIONS", COMPLETIONS))
    assert closed.status_code == 405


def test_only_a_preflight_passes_without_a_key() -> None:
    world = make_world(cors_origins=("https://ui.example",))
    page = {"origin": "https://ui.example"}
    for path, status in ((COMPLETIONS, 405), ("/flush_cache", 405), ("/docs", 404)):
        refused = asyncio.run(world.send("OPTIONS", path, headers=page))
        assert refused.status_code == status
    assert not world.behind.seen
    asked = page | {"access-control-request-method": "POST"}
    assert asyncio.run(world.send("OPTIONS", COMPLETIONS, headers=asked)).status_code == 200
    assert len(world.behind.seen) == 1


def test_web_sockets_are_closed() -> None:
    world, sent = make_world(), []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(world.edge({"type": "websocket", "path": "/v1/realtime"}, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]
    assert not world.behind.seen


def test_settings_travel_without_keys(tmp_path: Path) -> None:
    settings = EdgeSettings(api_key_file=key_file(tmp_path / "key", API_KEY), max_n=3)
    text = settings.model_dump_json()
    assert API_KEY not in text
    assert edge_settings({EDGE_VARIABLE: text}) == settings
    assert edge_settings({}) == EdgeSettings()
    with pytest.raises(SettingsError, match=EDGE_VARIABLE):
        edge_settings({EDGE_VARIABLE: '{"max_n": 0}'})


def test_sglang_asks_for_no_key_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the edge all is decided; without it nothing is open."""
    pytest.importorskip("sglang")
    monkeypatch.setattr(install_module, "_is_installed", False)
    decide = install_module.decide_request_auth
    assert not decide(lambda **_: None, path="/generate").allowed
    monkeypatch.setattr(install_module, "_is_installed", True)
    assert decide(lambda **_: None, path="/generate").allowed


def test_the_lifespan_goes_through() -> None:
    reached: list[str] = []

    class Inner(Behind):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            reached.append(scope["type"])

    world = make_world(behind=Inner())

    async def nothing(*_: Any) -> Any:
        return {}

    asyncio.run(world.edge({"type": "lifespan"}, nothing, nothing))
    assert reached == ["lifespan"]
