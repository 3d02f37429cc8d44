# SPDX-License-Identifier: Apache-2.0
"""What deploy/ starts exists: commands, options, settings, paths, and who may do what."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from typer.testing import CliRunner

from tandemkv.server.commands import app
from tandemkv.server.settings_sources import load_settings

ROOT = Path(__file__).resolve().parents[3]
GPU = ROOT / "deploy" / "gpu"
KUBERNETES = ROOT / "deploy" / "kubernetes"
DOCKERFILE = (GPU / "Dockerfile").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load((GPU / "compose.yaml").read_text(encoding="utf-8"))
PLACEMENTS = ("in-process", "pair")
UID = 10001


def stateful_set(placement: str) -> dict[str, Any]:
    text = (KUBERNETES / placement / "stateful-set.yaml").read_text(encoding="utf-8")
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def pod(placement: str) -> dict[str, Any]:
    found: dict[str, Any] = stateful_set(placement)["spec"]["template"]["spec"]
    return found


def started() -> Iterator[tuple[str, list[str]]]:
    """Yield every command line that something in deploy/ starts."""
    for name, service in COMPOSE["services"].items():
        yield f"compose {name}", service["command"]
    for placement in PLACEMENTS:
        for container in pod(placement)["containers"]:
            yield f"{placement} {container['name']}", container["args"]
    for match in re.finditer(r"^ +CMD (\[.*\])$|^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE):
        words = yaml.safe_load(match[1] or match[2])
        yield "Dockerfile", words[1:] if words[0] == "tandemkv" else words


STARTED = list(started())


def known_options(command: str) -> set[str]:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert command in commands, f"`tandemkv {command}` does not exist"
    params = commands[command].params
    return {"--help", *(name for param in params for name in (*param.opts, *param.secondary_opts))}


def test_everything_that_is_started_was_found() -> None:
    assert sorted({name for name, _ in STARTED}) == [
        "Dockerfile", "compose in-process", "compose pair", "in-process tandemkv",
        "pair cache-rank", "pair inference-rank",
    ]  # fmt: skip
    assert len([name for name, _ in STARTED if name == "Dockerfile"]) == 2


@pytest.mark.parametrize(("name", "words"), STARTED, ids=lambda value: str(value)[:40])
def test_only_options_that_exist_are_used(name: str, words: list[str]) -> None:
    known = known_options(words[0])
    options = [word.partition("=")[0] for word in words[1:] if word.startswith("-")]
    assert options
    assert [option for option in options if option not in known] == []


@pytest.mark.parametrize(
    "words", [words for _, words in STARTED if words[0] == "serve" and "--help" not in words]
)
def test_the_settings_are_accepted(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, [*words, "--print-settings"])
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(result.stdout)["model"] == "/model"


def test_the_settings_of_the_pair_are_accepted(tmp_path: Path) -> None:
    config = yaml.safe_load((KUBERNETES / "pair" / "settings.yaml").read_text(encoding="utf-8"))
    settings = yaml.safe_load(config["data"]["settings.yaml"])
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump(settings))
    loaded = load_settings({}, {}, path)
    assert loaded.cache.capacity_tokens >= loaded.max_running_requests * (loaded.max_context or 0)
    names = {volume["name"]: volume for volume in pod("pair")["volumes"]}
    assert names["settings"]["configMap"]["name"] == config["metadata"]["name"]


def test_both_ranks_of_the_pair_share_run_directory_and_settings() -> None:
    first, second = pod("pair")["containers"]
    assert {arg for arg in first["args"] if arg.startswith("--")} == {
        arg for arg in second["args"] if arg.startswith("--")
    }
    assert first["volumeMounts"] == second["volumeMounts"]
    run = next(item for item in pod("pair")["volumes"] if item["name"] == "run")
    assert "emptyDir" in run


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_pods_may_do_nothing_that_they_need_not(placement: str) -> None:
    spec = pod(placement)
    assert spec["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostIPC", "hostPID"} & set(spec)
    security = spec["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] == security["fsGroup"] == UID
    assert security["seccompProfile"]["type"] == "RuntimeDefault"
    for container in spec["containers"]:
        own = container["securityContext"]
        assert own["readOnlyRootFilesystem"] is True
        assert own["allowPrivilegeEscalation"] is False
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
        assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_parts_of_a_pod_belong_together(placement: str) -> None:
    whole = stateful_set(placement)["spec"]
    labels = whole["template"]["metadata"]["labels"]
    service = yaml.safe_load((KUBERNETES / "base" / "service.yaml").read_text(encoding="utf-8"))
    assert whole["selector"]["matchLabels"].items() <= labels.items()
    assert service["spec"]["selector"].items() <= labels.items()
    assert whole["serviceName"] == service["metadata"]["name"]
    volumes = {item["name"] for item in pod(placement)["volumes"]}
    volumes |= {item["metadata"]["name"] for item in whole["volumeClaimTemplates"]}
    mounted = {
        mount["name"]
        for container in pod(placement)["containers"]
        for mount in container["volumeMounts"]
    }
    assert mounted == volumes
    writable = {"/run/tandemkv", "/tmp", "/cache", "/dev/shm"}
    mounts = {mount["mountPath"] for mount in pod(placement)["containers"][0]["volumeMounts"]}
    assert writable <= mounts


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_probes_ask_routes_that_exist(placement: str) -> None:
    server = pod(placement)["containers"][0]
    routes = (ROOT / "inference_rank" / "http_routes.py").read_text(encoding="utf-8")
    assert f'"{server["readinessProbe"]["httpGet"]["path"]}"' in routes
    assert server["livenessProbe"]["httpGet"]["path"] == "/health"  # SGLang's
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert server[probe]["httpGet"]["port"] in ports
    assert ports["http"] == 30000


@pytest.mark.parametrize("folder", ["base", *PLACEMENTS])
def test_kustomizations_name_files_that_exist(folder: str) -> None:
    path = KUBERNETES / folder
    resources = yaml.safe_load((path / "kustomization.yaml").read_text())["resources"]
    assert all((path / name).exists() for name in resources)
    files = {item.name for item in path.glob("*.yaml")} - {"kustomization.yaml"}
    assert files == {name for name in resources if name.endswith(".yaml")}


def test_who_stops_the_server_waits_for_its_drain() -> None:
    """Requests may finish for --drain-timeout-s; then processes end within 15 s each."""
    needed = load_settings({}, {"TANDEMKV_SERVE_MODEL": "smollm2"}, None).drain_timeout_s + 30
    for placement in PLACEMENTS:
        assert pod(placement)["terminationGracePeriodSeconds"] >= needed
        assert all("lifecycle" not in item for item in pod(placement)["containers"])
    for service in COMPOSE["services"].values():
        assert float(service["stop_grace_period"].removesuffix("s")) >= needed
    config = yaml.safe_load((KUBERNETES / "pair" / "settings.yaml").read_text(encoding="utf-8"))
    assert "drain_timeout_s" not in yaml.safe_load(config["data"]["settings.yaml"])


def test_compose_publishes_on_loopback_and_runs_without_rights() -> None:
    for service in COMPOSE["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert service["user"] == f"{UID}:{UID}"
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["profiles"]  # nothing starts unasked: both want the same port
        assert any(f"uid={UID}" in item for item in service["tmpfs"])


def test_the_image_runs_as_nobody_special() -> None:
    users = re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE)
    assert users[-1] == f"{UID}:{UID}"
    after = DOCKERFILE.rpartition("\nUSER ")[2]
    assert "\nRUN " not in after
    assert "HEALTHCHECK" in after


def test_the_build_context_holds_what_is_copied() -> None:
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    copied: list[str] = []
    for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE):
        copied += shlex.split(line)[:-1]
    assert set(copied) == {word[1:] for word in ignore if word.startswith("!")}
    assert all((ROOT / name).exists() for name in copied)
    assert {"server", "inference_rank", "cache_rank", "kernels"} <= set(copied)
