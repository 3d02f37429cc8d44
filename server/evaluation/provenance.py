# SPDX-License-Identifier: Apache-2.0
"""What a result was measured with: versions, GPU, command. No path, host or user."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from tandemkv.cache_rank.protocol.errors import TandemKVError

PACKAGES = (
    *("tandemkv", "torch", "triton", "sglang", "flashinfer-python", "nvidia-nccl-cu13"),
    *("transformers", "numpy"),
)
"""Packages whose versions are recorded where they are installed."""
_CHILD_TIMEOUT_S = 180
_PATH_IN_A_LIST = re.compile(r"(?<=[:,])(?:/(?!/)|~)[^,]*")


class BenchError(TandemKVError):
    """A benchmark could not be run, or gave nothing that can be reported."""


class ChildError(TandemKVError):
    """A fresh interpreter failed; the text is its last line."""


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The GPUs seen, all alike; none on a machine without."""

    name: str
    count: int
    memory_bytes: int
    driver: str


def version_of(package: str) -> str | None:
    """Return the version of a package, None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_versions() -> dict[str, str]:
    """Return Python's version and those of `PACKAGES` that are installed."""
    found = {"python": platform.python_version(), **{name: version_of(name) for name in PACKAGES}}
    return {name: version for name, version in found.items() if version}


def own_command() -> list[str]:
    """Return the command line of this process without paths."""
    return ["tandemkv", *without_paths(sys.argv[1:])]


def without_paths(command: Sequence[str]) -> list[str]:
    """Replace every absolute or home-relative path in `command` by its last part.

    Also behind ``=``, as in ``--out=/tmp/x.json``, and in a list, as in ``mass,file:/tmp/x.jsonl``.
    """
    cleaned = []
    for argument in command:
        head, equals, tail = argument.partition("=")
        if equals and tail.startswith(("/", "~")):
            cleaned.append(f"{head}={Path(tail).name}")
        elif argument.startswith(("/", "~")):
            cleaned.append(Path(argument).name)
        else:
            cleaned.append(_PATH_IN_A_LIST.sub(lambda path: Path(path[0]).name, argument))
    return cleaned


def visible_gpu() -> Gpu | None:
    """Return the GPUs of this process; initialises CUDA."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return Gpu(
        name=properties.name,
        count=torch.cuda.device_count(),
        memory_bytes=int(properties.total_memory),
        driver=_driver_version(),
    )


def query_gpu() -> Gpu | None:
    """Return the GPUs that a child process sees, None on a machine without.

    For a process that must not hold GPU memory itself. Raises `BenchError` if the child fails.
    """
    code = (
        f"import msgspec; from {__name__} import visible_gpu; "
        "print(msgspec.json.encode(visible_gpu()).decode())"
    )
    try:
        found = run_python(code, {})
    except ChildError as error:
        raise BenchError(f"the GPU could not be queried: {error}") from error
    return msgspec.json.decode(found, type=Gpu | None)


def run_python(code: str, env: Mapping[str, str]) -> str:
    """Return what `code` prints in a fresh interpreter, with `env` beside this environment.

    Raises `ChildError`, with the last line of its error, if it fails or does not end.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-W", "ignore", "-c", code],
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=_CHILD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ChildError(f"no result within {_CHILD_TIMEOUT_S} s") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ChildError(lines[-1])
    return done.stdout


def _driver_version() -> str:
    """Return the driver's version, which the kernel module reports without a tool."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="ascii", errors="replace")
    except OSError:
        return "unknown"
    numbers = (word for word in text.split() if word[:1].isdigit() and "." in word)
    return next(numbers, "unknown")
