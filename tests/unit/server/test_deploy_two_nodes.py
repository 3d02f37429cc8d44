# SPDX-License-Identifier: Apache-2.0
"""What deploy/kubernetes/two-nodes says in several places agrees, also with the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from manifests import (
    CACHE_RANK_POD,
    KUBERNETES,
    TWO_NODES,
    containers_of,
    manifest,
    pod_of,
    stateful_set_of,
)

from tandemkv.cache_rank.protocol.message.address import LinkAddress
from tandemkv.cache_rank.protocol.message.keys import CACHE_RANK, INFERENCE_RANK
from tandemkv.server.launch.cache_rank_launch import INFERENCE_RANK_EXIT_S
from tandemkv.server.settings.launch_settings import ServeSettings
from tandemkv.server.settings.sources import load_settings

_ENDS = {TWO_NODES: INFERENCE_RANK, CACHE_RANK_POD: CACHE_RANK}
"""Whose key each pod has."""
_LABEL = "app.kubernetes.io/name"
_README = (KUBERNETES.parent / "README.md").read_text(encoding="utf-8")


def _rank(pod: str) -> dict[str, Any]:
    (found,) = pod_of(pod)["containers"]
    return dict(found)


def _volume(pod: str, name: str) -> dict[str, Any]:
    (found,) = [item for item in pod_of(pod)["volumes"] if item["name"] == name]
    return dict(found)


NAMES = {
    pod: stateful_set_of(pod)["spec"]["template"]["metadata"]["labels"][_LABEL] for pod in _ENDS
}


def test_the_settings_lead_to_the_cache_ranks_service() -> None:
    settings = load_settings({}, {}, KUBERNETES / TWO_NODES / "settings.yaml")
    assert settings.cache.capacity_tokens >= settings.max_running_requests * (
        settings.max_context or 0
    )
    assert (settings.wished_link, settings.device) == ("message", "cpu")
    service = manifest(f"{CACHE_RANK_POD}-service")
    address = LinkAddress.parse_peer(settings.cache_rank_address or "")
    assert address.host == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None", "K/V go to the pod's own address"
    (port,) = service["spec"]["ports"]
    ports = {item["name"]: item["containerPort"] for item in _rank(CACHE_RANK_POD)["ports"]}
    assert address.port == port["port"] == ports[port["targetPort"]]
    assert f"--address=tcp://$(POD_IP):{address.port}" in _rank(CACHE_RANK_POD)["args"]
    variables = {item["name"]: item.get("valueFrom") for item in _rank(CACHE_RANK_POD)["env"]}
    assert variables["POD_IP"]["fieldRef"]["fieldPath"] == "status.podIP"
    assert "--rank=$(POD_INDEX)" in _rank(CACHE_RANK_POD)["args"]
    assert variables["POD_INDEX"]["fieldRef"]["fieldPath"].endswith("/pod-index']")


def test_more_cache_ranks_take_replicas_and_the_names_of_their_pods() -> None:
    """As deploy/README.md says."""
    names = re.findall(r"tcp://tandemkv-cache-rank-\d[^`]*", _README)
    stateful_set = stateful_set_of(CACHE_RANK_POD)
    name, service = stateful_set["metadata"]["name"], stateful_set["spec"]["serviceName"]
    assert names == [",".join(f"tcp://{name}-{n}.{service}:7400" for n in range(2))]
    settings = load_settings({}, {}, KUBERNETES / TWO_NODES / "settings.yaml")
    given = settings.model_dump(exclude_unset=True) | {"cache_rank_address": names[0]}
    assert ServeSettings.model_validate(given).head_shards == 2


@pytest.mark.parametrize("pod", _ENDS)
def test_both_read_the_same_settings(pod: str) -> None:
    (generated,) = manifest(f"{TWO_NODES}/kustomization")["configMapGenerator"]
    assert generated["files"] == ["settings.yaml"]
    assert _volume(pod, "settings")["configMap"]["name"] == generated["name"]
    mounts = {item["name"]: item["mountPath"] for item in _rank(pod)["volumeMounts"]}
    assert mounts["settings"] == "/settings"
    assert "--config=/settings/settings.yaml" in _rank(pod)["args"]
    settings = load_settings({}, {}, KUBERNETES / TWO_NODES / "settings.yaml")
    assert mounts["keys"] == str(settings.link_keys)
    assert mounts["model"] == settings.model


@pytest.mark.parametrize("pod", _ENDS)
def test_each_pod_has_its_own_secret_key_alone_and_copies_that_nobody_else_reads(pod: str) -> None:
    own, other = _ENDS[pod], next(end for end in _ENDS.values() if end != _ENDS[pod])
    copies = containers_of(pod)["keys"]
    names = {Path(word).name for word in copies["args"]}
    assert names == {f"{own}.key_secret", f"{own}.key", f"{other}.key"}
    assert copies["command"] == ["install", "--mode=0600", "--target-directory=/keys/"]
    mounts = {item["name"]: item["mountPath"] for item in copies["volumeMounts"]}
    assert {str(Path(word).parent) for word in copies["args"]} == {mounts["secret"]}
    assert mounts["keys"] == "/keys"
    assert _volume(pod, "keys")["emptyDir"]["medium"] == "Memory", "never on a disk"
    assert "secret" not in {item["name"] for item in _rank(pod)["volumeMounts"]}
    secret = _volume(pod, "secret")["secret"]["secretName"]
    command = _README.partition(f"create secret generic {secret} ")[2].partition("\nkubectl")[0]
    given = {word.rpartition("/")[2] for word in command.split() if "--from-file=" in word}
    assert given == names, "as the README has them made"


def test_no_key_is_in_the_repository() -> None:
    assert not [path for path in KUBERNETES.rglob("*") if ".key" in path.name]
    assert not [
        path
        for path in KUBERNETES.rglob("*.yaml")
        if manifest(str(path.relative_to(KUBERNETES).with_suffix(""))).get("kind") == "Secret"
    ]


def test_no_two_are_ever_on_one_node() -> None:
    affinity = pod_of(CACHE_RANK_POD)["affinity"]["podAntiAffinity"]
    terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
    assert {term["topologyKey"] for term in terms} == {"kubernetes.io/hostname"}
    labels = [term["labelSelector"]["matchLabels"] for term in terms]
    assert labels == [{_LABEL: NAMES[TWO_NODES]}, {_LABEL: NAMES[CACHE_RANK_POD]}]


def _allowed(policy: dict[str, Any], direction: str) -> dict[str, list[Any]]:
    """Return ports by the pods that they are for."""
    key = {"ingress": "from", "egress": "to"}[direction]
    found = {}
    for rule in policy["spec"][direction]:
        (peer,) = rule[key]
        assert {port["protocol"] for port in rule["ports"]} == {"TCP"}
        found[peer["podSelector"]["matchLabels"][_LABEL]] = [
            (port["port"], port.get("endPort")) for port in rule["ports"]
        ]
    return found


def test_only_the_inference_rank_reaches_the_cache_rank() -> None:
    cache_rank, inference = (
        manifest(f"{TWO_NODES}/{name}-policy") for name in ("cache-rank", "inference-rank")
    )
    ours, theirs = NAMES[CACHE_RANK_POD], NAMES[TWO_NODES]
    ranges = set()
    for policy, name, pod in ((cache_rank, ours, CACHE_RANK_POD), (inference, theirs, TWO_NODES)):
        assert policy["spec"]["podSelector"]["matchLabels"] == {_LABEL: name}
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        (sysctl,) = pod_of(pod)["securityContext"]["sysctls"]
        assert sysctl["name"] == "net.ipv4.ip_local_port_range"
        ranges.add(tuple(map(int, sysctl["value"].split())))
    (data,) = ranges
    assert _allowed(cache_rank, "ingress") == {theirs: [("link", None), data]}
    assert _allowed(inference, "egress") == {ours: [(7400, None), data]}
    # Which end connects for K/V is gloo's choice.
    assert _allowed(cache_rank, "egress") == {theirs: [data]}
    assert _allowed(inference, "ingress") == {ours: [data]}
    own = manifest("base/network-policy")["spec"]["podSelector"]["matchLabels"]
    assert own == {_LABEL: theirs}, "the policy of the base is not the cache rank's"


def test_probes_and_patience_agree_with_the_code() -> None:
    settings = load_settings({}, {}, KUBERNETES / TWO_NODES / "settings.yaml")
    inference, cache_rank = _rank(TWO_NODES), _rank(CACHE_RANK_POD)
    probe = inference["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= settings.start_timeout_s
    assert "livenessProbe" not in cache_rank, "it would lose the K/V"
    for rank in (inference, cache_rank):
        threads = {item["name"]: item.get("value") for item in rank["env"]}["OMP_NUM_THREADS"]
        assert 1 < int(threads) < int(rank["resources"]["requests"]["cpu"])
    for kind in ("startupProbe", "readinessProbe"):
        run_dir = next(word for word in cache_rank["args"] if word.startswith("--run-dir="))
        assert cache_rank[kind]["exec"]["command"] == ["tandemkv", "alive", "cache-rank", run_dir]
    service = manifest(f"{CACHE_RANK_POD}-service")
    assert service["spec"]["publishNotReadyAddresses"] is True
    longest = settings.drain_timeout_s + INFERENCE_RANK_EXIT_S + 15  # and the end of its processes
    assert pod_of(CACHE_RANK_POD)["terminationGracePeriodSeconds"] >= longest + 10
