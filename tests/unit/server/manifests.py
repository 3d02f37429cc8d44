# SPDX-License-Identifier: Apache-2.0
"""The manifests of deploy/, as kustomize would join them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
GPU = ROOT / "deploy" / "gpu"
KUBERNETES = ROOT / "deploy" / "kubernetes"
COMPOSE: dict[str, Any] = yaml.safe_load((GPU / "compose.yaml").read_text(encoding="utf-8"))
PAIRS = ("pair", "pair-dra")
TWO_NODES, CACHE_RANK_POD = "two-nodes", "two-nodes/cache-rank"
PLACEMENTS = ("in-process", *PAIRS, TWO_NODES)
PODS = (*PLACEMENTS, CACHE_RANK_POD)
CONTAINERS = ("memory", "cache-rank", "inference-rank")
"""Containers of a pair, in the order in which they start."""


def manifest(name: str) -> dict[str, Any]:
    """Return the manifest in a file below deploy/kubernetes, named without its end."""
    path = KUBERNETES / f"{name}.yaml"
    loaded: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return loaded


def kustomization(folder: str) -> dict[str, Any]:
    return manifest(f"{folder}/kustomization")


def stateful_set_of(name: str) -> dict[str, Any]:
    """Return the StatefulSet of a folder, patched as its kustomization says, or of another file."""
    path = KUBERNETES / name / "stateful-set.yaml"
    if not (KUBERNETES / name).is_dir():
        return manifest(name)
    if path.exists():
        return manifest(f"{name}/stateful-set")
    whole = kustomization(name)
    (parent,) = [name for name in whole["resources"] if (path.parent / name).is_dir()]
    found = stateful_set_of((path.parent / parent).resolve().name)
    for patch in whole["patches"]:
        target = patch["target"]
        assert (f"{target['group']}/{target['version']}", target["kind"], target["name"]) == (
            found["apiVersion"], found["kind"], found["metadata"]["name"],
        )  # fmt: skip
        found = patched(found, yaml.safe_load(patch["patch"]))
    return found


def pod_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = stateful_set_of(name)["spec"]["template"]["spec"]
    return found


def containers_of(name: str) -> dict[str, dict[str, Any]]:
    """Return containers by name, sidecars first, in the order in which they start."""
    spec = pod_of(name)
    every = [*spec.get("initContainers", ()), *spec["containers"]]
    return {container["name"]: container for container in every}


def patched(document: Any, operations: list[dict[str, Any]]) -> Any:
    """Apply a JSON patch (RFC 6902): test, add, replace, remove."""
    document = copy.deepcopy(document)
    for operation in operations:
        *parents, last = [
            part.replace("~1", "/").replace("~0", "~")
            for part in operation["path"].removeprefix("/").split("/")
        ]
        at = document
        for part in parents:
            at = at[int(part)] if isinstance(at, list) else at[part]
        key: Any = last
        if isinstance(at, list):
            key = len(at) if last == "-" else int(last)
        match operation["op"]:
            case "test":
                assert at[key] == operation["value"], operation["path"]
            case "replace":
                at[key]  # it must be there
                at[key] = operation["value"]
            case "remove":
                del at[key]
            case "add" if isinstance(at, list):
                at.insert(key, operation["value"])
            case "add":
                at[key] = operation["value"]
            case other:
                raise ValueError(f"{other} is not known here")
    return document
