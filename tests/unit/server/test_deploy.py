# SPDX-License-Identifier: Apache-2.0
"""What deploy/ starts exists: commands, options, settings, paths, and who may do what."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import manifests
import pytest
import typer.main
import yaml
from manifests import COMPOSE, CONTAINERS, GPU, KUBERNETES, PAIRS, PLACEMENTS, PODS, ROOT
from manifests import containers_of as containers
from manifests import pod_of as pod
from manifests import stateful_set_of as stateful_set
from typer.testing import CliRunner

from tandemkv.server.cli.commands import app
from tandemkv.server.launch.sglang_command import cache_rank_env
from tandemkv.server.settings.sources import load_settings

DOCKERFILES = {
    name: (ROOT / "deploy" / name / "Dockerfile").read_text(encoding="utf-8")
    for name in ("cpu", "gpu")
}
UID = 10001
RANKS = ("cache-rank", "inference-rank")


def probes(container: dict[str, Any]) -> list[dict[str, Any]]:
    return [value for key, value in container.items() if key.endswith("Probe")]


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {item["name"]: item["value"] for item in container.get("env", ())}


def started() -> Iterator[tuple[str, list[str]]]:
    """Yield every command line that something in deploy/ starts."""
    for name, service in COMPOSE["services"].items():
        yield f"compose {name}", service["command"]
        if "healthcheck" in service:
            how, program, *words = service["healthcheck"]["test"]
            assert (how, program) == ("CMD", "tandemkv")
            yield f"compose {name} probe", words
    for one in PODS:
        for name, container in containers(one).items():
            if "command" not in container:  # the image's: tandemkv
                yield f"{one} {name}", container["args"]
            for probe in probes(container):
                if "exec" in probe:
                    program, *words = probe["exec"]["command"]
                    assert program == "tandemkv"
                    yield f"{one} {name} probe", words
    for name, text in DOCKERFILES.items():
        for match in re.finditer(r"^ +CMD (\[.*\])$|^CMD (\[.*\])$", text, re.MULTILINE):
            words = yaml.safe_load(match[1] or match[2])
            yield f"Dockerfile {name}", words[1:] if words[0] == "tandemkv" else words


STARTED = list(started())


def known_options(command: str) -> set[str]:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert command in commands, f"`tandemkv {command}` does not exist"
    params = commands[command].params
    return {"--help", *(name for param in params for name in (*param.opts, *param.secondary_opts))}


def test_everything_that_is_started_was_found() -> None:
    assert sorted({name for name, _ in STARTED}) == [
        *("Dockerfile cpu", "Dockerfile gpu"),
        *("compose cache-rank", "compose cache-rank probe", "compose in-process"),
        *("compose inference-rank", "compose memory", "compose memory probe"),
        "in-process tandemkv",
        *(
            f"{pair} {name}"
            for pair in PAIRS
            for name in (
                *("cache-rank", "cache-rank probe", "inference-rank"),
                *("memory", "memory probe"),
            )
        ),
        *("two-nodes inference-rank", "two-nodes/cache-rank cache-rank"),
        "two-nodes/cache-rank cache-rank probe",
    ]  # fmt: skip
    assert [name for name, _ in STARTED if name.startswith("Dockerfile")] == [
        *("Dockerfile cpu", "Dockerfile gpu", "Dockerfile gpu")
    ]


@pytest.mark.parametrize(("name", "words"), STARTED, ids=lambda value: str(value)[:40])
def test_only_options_that_exist_are_used(name: str, words: list[str]) -> None:
    known = known_options(words[0])
    options = [word.partition("=")[0] for word in words[1:] if word.startswith("-")]
    assert options
    assert [option for option in options if option not in known] == []


@pytest.mark.parametrize(
    "words", [words for _, words in STARTED if words[0] == "serve" and "/model" in words]
)
def test_the_settings_are_accepted(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, [*words, "--print-settings"])
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(result.stdout)["model"] == "/model"


def test_the_settings_of_the_pair_are_accepted() -> None:
    loaded = load_settings({}, {}, KUBERNETES / "pair" / "settings.yaml")
    assert loaded.cache.capacity_tokens >= loaded.max_running_requests * (loaded.max_context or 0)
    assert loaded.wished_link == "shared"
    generated = manifests.kustomization("pair")["configMapGenerator"]
    assert [(item["name"], item["namespace"], item["files"]) for item in generated] == [
        ("tandemkv-settings", "tandemkv", ["settings.yaml"])
    ]
    names = {volume["name"]: volume for volume in pod("pair")["volumes"]}
    assert names["settings"]["configMap"]["name"] == generated[0]["name"]
    file = COMPOSE["configs"]["settings"]["file"]
    assert (GPU / file).resolve() == KUBERNETES / "pair" / "settings.yaml"


@pytest.mark.parametrize("pair", PAIRS)
def test_all_of_the_pair_share_run_directory_and_settings(pair: str) -> None:
    found = containers(pair)
    assert tuple(found) == CONTAINERS
    for name, container in found.items():
        assert "--run-dir=/run/tandemkv/pair" in container["args"]
        mounts = {item["name"]: item["mountPath"] for item in container["volumeMounts"]}
        assert mounts["run"] == "/run/tandemkv"
        if name in RANKS:
            assert "--config=/settings/settings.yaml" in container["args"]
            assert mounts["settings"] == "/settings"
            assert mounts["model"] == "/model"
    run = next(item for item in pod(pair)["volumes"] if item["name"] == "run")
    assert run["emptyDir"]["medium"] == "Memory"


def test_services_of_the_pair_are_what_its_containers_are() -> None:
    of_pod, services = containers("pair"), COMPOSE["services"]
    assert [name for name in services if services[name]["profiles"] == ["pair"]] == [*CONTAINERS]
    for name, container in of_pod.items():
        service = services[name]
        assert service["command"] == container["args"]
        wanted = environment(container)
        if name in RANKS:  # the devices of the service say which GPUs
            wanted.pop("NVIDIA_VISIBLE_DEVICES", None)
            (device,) = service["deploy"]["resources"]["reservations"]["devices"]
            assert len(device["device_ids"]) == 2
            assert service["configs"] == [
                {"source": "settings", "target": "/settings/settings.yaml"}
            ]
        assert service["environment"] == wanted
        targets = {item["target"] for item in service["volumes"]}
        assert targets >= {item["mountPath"] for item in container["volumeMounts"]} - {
            *("/tmp", "/settings", "/dev/shm")
        }
        assert not {"pid", "ipc", "privileged"} & set(service)
        assert service.get("network_mode") == (None if name == "inference-rank" else "none")
    first, second = (services[name]["deploy"] for name in RANKS)
    assert first == second
    assert set(services["inference-rank"]["depends_on"]) == {"memory", "cache-rank"}
    assert services["cache-rank"]["depends_on"] == {"memory": {"condition": "service_healthy"}}
    options = COMPOSE["volumes"]["run"]["driver_opts"]
    assert options["type"] == "tmpfs"
    assert "mode=0700" in options["o"]
    assert f"uid={UID}" in options["o"]


@pytest.mark.parametrize("pair", PAIRS)
def test_sidecars_end_after_the_inference_rank(pair: str) -> None:
    spec = pod(pair)
    assert [item["name"] for item in spec["initContainers"]] == ["memory", "cache-rank"]
    assert all(item["restartPolicy"] == "Always" for item in spec["initContainers"])
    assert [item["name"] for item in spec["containers"]] == ["inference-rank"]
    assert not {"shareProcessNamespace", "hostPID", "hostIPC", "restartPolicy"} & set(spec)
    memory, cache_rank = spec["initContainers"]
    assert "startupProbe" in memory  # what it holds is handed over once
    assert "livenessProbe" not in memory
    assert cache_rank["livenessProbe"]["terminationGracePeriodSeconds"] == 1
    settings = load_settings({}, {}, KUBERNETES / "pair" / "settings.yaml")
    probe = cache_rank["livenessProbe"]
    until_ended = probe["failureThreshold"] * (probe["periodSeconds"] + probe["timeoutSeconds"])
    assert until_ended + 60 <= settings.exchange.recovery_timeout_s


def gpus_of(container: dict[str, Any]) -> Any:
    """Where a container's GPUs come from."""
    resources, environ = container["resources"], environment(container)
    plugin = resources["limits"].get("nvidia.com/gpu", 0)
    assert plugin == 0 or "claims" not in resources
    return plugin, environ.get("NVIDIA_VISIBLE_DEVICES"), resources.get("claims")


def test_both_ranks_see_both_gpus_and_the_memory_none() -> None:
    found = {pair: {name: gpus_of(c) for name, c in containers(pair).items()} for pair in PAIRS}
    assert found["pair"] == {
        "memory": (0, "void", None),
        "cache-rank": (0, "all", None),
        "inference-rank": (2, None, None),
    }
    claims = [{"name": "gpus"}]
    assert found["pair-dra"] == {
        "memory": (0, "void", None),
        "cache-rank": (0, "void", claims),
        "inference-rank": (0, "void", claims),
    }
    for pair in PAIRS:
        ranks = [environment(containers(pair)[name]) for name in RANKS]
        assert {environ["CUDA_DEVICE_ORDER"] for environ in ranks} == {"PCI_BUS_ID"}
        of_serve = cache_rank_env({}, device="cuda")
        name = "CUDA_DEVICE_MAX_CONNECTIONS"
        assert ranks[0][name] == of_serve[name]


def test_the_claim_is_for_two_gpus_and_the_pod_names_it() -> None:
    path = KUBERNETES / "pair-dra" / "resource-claim-template.yaml"
    template = yaml.safe_load(path.read_text(encoding="utf-8"))
    (request,) = template["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"]["count"] == 2
    assert pod("pair-dra")["resourceClaims"] == [
        {"name": "gpus", "resourceClaimTemplateName": template["metadata"]["name"]}
    ]


@pytest.mark.parametrize(("placement", "version"), [("pair", "1.33"), ("pair-dra", "1.34")])
def test_what_patches_make_is_valid(placement: str, version: str) -> None:
    kubernetes_validate.validate(stateful_set(placement), version, strict=True)


def test_a_patch_for_something_else_is_noticed() -> None:
    whole = stateful_set("pair")
    path = "/spec/template/spec/containers/0/name"
    with pytest.raises(AssertionError, match="containers/0/name"):
        manifests.patched(whole, [{"op": "test", "path": path, "value": "cache-rank"}])
    with pytest.raises(KeyError):
        manifests.patched(whole, [{"op": "remove", "path": "/spec/template/spec/claims"}])


@pytest.mark.parametrize("name", PODS)
def test_pods_may_do_nothing_that_they_need_not(name: str) -> None:
    spec = pod(name)
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False  # variables of Services may look like settings
    assert not {"hostNetwork", "hostIPC", "hostPID"} & set(spec)
    security = spec["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] == security["fsGroup"] == UID
    assert security["seccompProfile"]["type"] == "RuntimeDefault"
    for container in containers(name).values():
        own = container["securityContext"]
        assert own["readOnlyRootFilesystem"] is True
        assert own["allowPrivilegeEscalation"] is False
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("name", PODS)
def test_parts_of_a_pod_belong_together(name: str) -> None:
    whole = stateful_set(name)["spec"]
    labels = whole["template"]["metadata"]["labels"]
    own = KUBERNETES / f"{name}-service.yaml"
    service = manifests.manifest(f"{name}-service" if own.exists() else "base/service")
    assert whole["selector"]["matchLabels"].items() <= labels.items()
    assert service["spec"]["selector"].items() <= labels.items()
    assert whole["serviceName"] == service["metadata"]["name"]
    volumes = {item["name"] for item in pod(name)["volumes"]}
    volumes |= {item["metadata"]["name"] for item in whole.get("volumeClaimTemplates", ())}
    mounted = {
        mount["name"]
        for container in containers(name).values()
        for mount in container["volumeMounts"]
    }
    assert mounted == volumes
    writable = {"/run/tandemkv", "/tmp", "/cache"} | ({"/dev/shm"} if name in PLACEMENTS else set())
    mounts = {mount["mountPath"] for mount in pod(name)["containers"][0]["volumeMounts"]}
    assert writable <= mounts


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_probes_ask_routes_that_exist(placement: str) -> None:
    server = pod(placement)["containers"][0]
    routes = (ROOT / "inference_rank" / "sglang" / "http_routes.py").read_text(encoding="utf-8")
    assert f'"{server["readinessProbe"]["httpGet"]["path"]}"' in routes
    # `serve` starts again what ends or hangs, and a probe would end what is being loaded.
    assert ("livenessProbe" in server) == (server["args"][0] != "serve")
    if "livenessProbe" in server:
        assert server["livenessProbe"]["httpGet"]["path"] == "/health"  # SGLang's
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    for probe in {"startupProbe", "livenessProbe", "readinessProbe"} & set(server):
        assert server[probe]["httpGet"]["port"] in ports
    assert ports["http"] == 30000


def test_every_folder_is_known() -> None:
    folders = {path.name for path in KUBERNETES.iterdir()}
    assert folders == {"base", *PLACEMENTS}


@pytest.mark.parametrize("folder", ["base", *PLACEMENTS])
def test_kustomizations_name_files_that_exist(folder: str) -> None:
    path, whole = KUBERNETES / folder, manifests.kustomization(folder)
    resources = whole["resources"]
    assert all((path / name).exists() for name in resources)
    files = {item.name for item in path.glob("*.yaml")} - {"kustomization.yaml"}
    named = {name for name in resources if name.endswith(".yaml")}
    for generator in whole.get("configMapGenerator", ()):
        named |= set(generator["files"])
    assert files == named


def test_who_stops_the_server_waits_for_its_drain() -> None:
    """Requests may finish for --drain-timeout-s; then processes end within 15 s each."""
    needed = load_settings({}, {"TANDEMKV_SERVE_MODEL": "smollm2"}, None).drain_timeout_s + 30
    for name in PODS:
        assert pod(name)["terminationGracePeriodSeconds"] >= needed
        assert all("lifecycle" not in item for item in containers(name).values())
    for service in COMPOSE["services"].values():
        assert float(service["stop_grace_period"].removesuffix("s")) >= needed
    settings = load_settings({}, {}, KUBERNETES / "pair" / "settings.yaml")
    assert "drain_timeout_s" not in settings.model_fields_set


def test_what_compilers_write_has_room() -> None:
    """SGLang's TMPDIR is in the run directory; ten compilers at a time write 30 MiB each there."""
    for name in PODS:
        if "two-nodes" in name:
            continue  # no GPU, so nothing is compiled
        run = next(item for item in pod(name)["volumes"] if item["name"] == "run")
        assert run["emptyDir"]["sizeLimit"] == "2Gi"
    assert COMPOSE["volumes"]["run"]["driver_opts"]["o"].startswith("size=2g,")


@pytest.mark.parametrize("name", PODS)
def test_a_pod_that_was_never_ready_is_replaced(name: str) -> None:
    assert stateful_set(name)["spec"]["podManagementPolicy"] == "Parallel"


def test_compose_publishes_on_loopback_and_runs_without_rights() -> None:
    for service in COMPOSE["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        assert service["user"] == f"{UID}:{UID}"
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["profiles"]  # nothing starts unasked: both want the same port
        assert service["restart"] == "unless-stopped"  # Docker ends it well before a reboot
    assert any(f"uid={UID}" in item for item in COMPOSE["services"]["in-process"]["tmpfs"])


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_image_runs_as_nobody_special(name: str) -> None:
    text = DOCKERFILES[name]
    users = re.findall(r"^USER (\S+)$", text, re.MULTILINE)
    assert users[-1] == f"{UID}:{UID}"
    after = text.rpartition("\nUSER ")[2]
    assert "\nRUN " not in after
    assert ("HEALTHCHECK" in after) is (name == "gpu")  # Kubernetes does not look at it


@pytest.mark.parametrize(
    ("name", "ignored"),
    [("gpu", ".dockerignore"), ("cpu", "deploy/cpu/Dockerfile.dockerignore")],
)
def test_the_build_context_holds_what_is_copied(name: str, ignored: str) -> None:
    ignore = (ROOT / ignored).read_text(encoding="utf-8").split()
    copied: list[str] = []
    for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILES[name], re.MULTILINE):
        copied += shlex.split(line)[:-1]
    assert set(copied) == {word[1:] for word in ignore if word.startswith("!")}
    assert all((ROOT / name).exists() for name in copied)
    assert {"server", "inference_rank", "cache_rank", "kernels"} <= set(copied)
