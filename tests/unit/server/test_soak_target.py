# SPDX-License-Identifier: Apache-2.0
"""The server that ``tandemkv soak`` starts: its arguments, and how long it is waited for."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.cli.commands import app
from tandemkv.server.launch.child_process import ChildProcess, ChildSpec
from tandemkv.server.launch.probes import ServerState
from tandemkv.server.soak import target as target_module
from tandemkv.server.soak.canaries import SoakError
from tandemkv.server.soak.command import EPILOG
from tandemkv.server.soak.target import running_target, started_target


class _Started(Exception):
    pass


def argv_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[str]:
    seen: list[str] = []

    def child(spec: Any) -> Any:
        seen.extend(spec.argv)
        raise _Started

    monkeypatch.setattr(target_module, "ChildProcess", child)
    with pytest.raises(_Started), started_target("m", arguments, faults=""):
        pass
    return seen[seen.index("serve") + 1 :]


def test_an_address_may_end_in_a_slash_and_leave_out_port_80(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def state(url: str, _: float) -> ServerState:
        asked.append(url)
        return ServerState(reachable=True, ready=True, detail="")

    listening = SimpleNamespace(
        status=psutil.CONN_LISTEN, laddr=SimpleNamespace(port=80), pid=os.getpid()
    )
    monkeypatch.setattr(target_module, "server_state", state)
    monkeypatch.setattr(psutil, "net_connections", lambda _: [listening])
    found = running_target("http://127.0.0.1/", api_key_file=None, admin_key_file=None)
    assert [found.url] == asked == ["http://127.0.0.1"]
    assert found.processes is not None


def test_arguments_for_sglang_keep_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("--transport", "shared", "--", "--log-level", "debug")
    found = argv_of(monkeypatch, *given)
    assert found[0] == "m"
    assert tuple(found[-len(given) :]) == given
    before = found[: found.index("--")]
    own = ("--port", "--run-dir", "--admin-key-file", "--max-restarts")
    assert [name for name in own if name not in before] == []


def test_the_server_is_asked_at_the_soaks_address_with_the_soaks_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever variables or a file say."""
    found = argv_of(monkeypatch)
    assert found[found.index("--host") + 1] == "127.0.0.1"
    files = {found[found.index(f"--{kind}-key-file") + 1] for kind in ("api", "admin")}
    assert len(files) == 2


@pytest.mark.parametrize(
    "given",
    [
        *(("--port", "1"), ("--run-dir=x",), ("--max-restarts", "3")),
        *(("--host", "::1"), ("--api-key-file", "f")),
    ],
)
def test_flags_that_the_soak_sets_are_refused(given: tuple[str, ...]) -> None:
    name = given[0].partition("=")[0]
    with pytest.raises(SettingsError, match=f"{name}: the soak sets it"):
        started_target("m", given, faults="").__enter__()


def test_help_names_what_the_soak_sets() -> None:
    assert all(name in EPILOG for name in target_module._OWN_FLAGS)


def test_flags_of_sglang_are_not_the_soaks_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    assert argv_of(monkeypatch, "--", "--port", "1")[-3:] == ["--", "--port", "1"]


@pytest.mark.parametrize("name", ["--api-key-file", "--admin-key-file"])
def test_keys_of_a_running_server_are_refused_with_a_model(tmp_path: Path, name: str) -> None:
    key = tmp_path / "key"
    key.write_text("secret")
    result = CliRunner().invoke(app, ["soak", "m", name, str(key), "--", "--port", "1"])
    assert result.exit_code == 2
    assert "keys of the server at --url" in " ".join(result.output.split())


def test_a_model_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brackets in its path are no markup."""

    def started(*_: object, **__: object) -> None:
        raise SettingsError("not here")

    monkeypatch.setattr(target_module, "started_target", started)
    result = CliRunner().invoke(app, ["soak", "a [fp8] of [/x]"])
    assert "starting a server: tandemkv serve a [fp8] of [/x]\n" in result.stderr


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("raise SystemExit(3)", "ended: exit code 3"),
        ("import time; time.sleep(60)", "not ready after 0.3 s: it answers, and does not say"),
    ],
)
def test_a_server_that_never_says_that_it_serves_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, told: str
) -> None:
    monkeypatch.setattr(target_module, "_BANNER_TIMEOUT_S", 0.3 if "sleep" in program else 30.0)
    monkeypatch.setattr(target_module, "server_state", lambda _: ServerState(True, True, ""))
    child = ChildProcess(
        ChildSpec(
            name="serve",
            argv=(sys.executable, "-c", program),
            env=dict(os.environ),
            log_path=tmp_path / "log",
        )
    )
    child.start()
    try:
        with pytest.raises(SoakError, match=told):
            target_module._await_ready(child, "http://x")
    finally:
        child.kill_group()


@pytest.mark.parametrize("url", ["foo", "127.0.0.1:30000", "https://x", "http://", "http://x:port"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(
        SettingsError, match=r"url=.*: an address such as http://127\.0\.0\.1:30000"
    ):
        running_target(url, api_key_file=None, admin_key_file=None)
