# SPDX-License-Identifier: Apache-2.0
"""The form of every benchmark's result: rows, and what they were measured with.

A report is made to be published: it names versions and the GPU, and no path, host or user.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from tandemkv.cache_rank.protocol.errors import SettingsError, TandemKVError

SCHEMA = 1
PACKAGES = (
    "tandemkv", "torch", "triton", "sglang", "flashinfer-python", "nvidia-nccl-cu13",
    "transformers",
)  # fmt: skip
"""Packages whose versions are recorded where they are installed."""

Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9_.+-]+$", max_length=160)]


class BenchError(TandemKVError):
    """A benchmark could not be run, or gave nothing that can be reported."""


class Row(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One figure. `value` is a median where there are percentiles; `n` counts the samples."""

    figure: Name
    value: float
    unit: Annotated[str, msgspec.Meta(max_length=32)]
    p10: float | None = None
    p90: float | None = None
    n: int | None = None
    note: str = ""


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A figure that was asked for and could not be had, with the reason."""

    figure: Name
    reason: str


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The GPUs seen, all alike; none on a machine without."""

    name: str
    count: int
    memory_bytes: int
    driver: str


class Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rows of one run of one benchmark."""

    benchmark: Name
    schema: int = SCHEMA
    versions: dict[str, str]
    gpu: Gpu | None
    command: tuple[str, ...]
    rows: tuple[Row, ...]
    failures: tuple[Failure, ...] = ()


def make_report(
    benchmark: str,
    rows: Sequence[Row],
    *,
    command: Sequence[str],
    failures: Sequence[Failure] = (),
    gpu: Gpu | None = None,
) -> Report:
    """Return a report of `rows` with the environment of this process.

    Raises
    ------
    BenchError
        If two rows have one name.
    """
    names = [row.figure for row in rows]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise BenchError(f"figures {', '.join(twice)} are given twice; each may be measured once")
    return Report(
        benchmark=benchmark,
        versions=installed_versions(),
        gpu=gpu,
        command=tuple(without_paths(command)),
        rows=tuple(rows),
        failures=tuple(failures),
    )


def write_report(report: Report, path: Path) -> None:
    """Write `report` as JSON, after checking that it reads back as the same."""
    text = msgspec.json.format(msgspec.json.encode(report), indent=2)
    if msgspec.json.decode(text, type=Report) != report:
        raise BenchError(f"report {report.benchmark} does not survive being written; report it")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text + b"\n")


def read_report(path: Path) -> Report:
    """Read a report.

    Raises
    ------
    SettingsError
        If the file is not one.
    """
    try:
        report = msgspec.json.decode(path.read_bytes(), type=Report)
    except OSError as error:
        raise SettingsError(f"{path.name}: cannot be read ({error.strerror})") from error
    except msgspec.DecodeError as error:
        raise SettingsError(f"{path.name}: not a report of `tandemkv bench` ({error})") from error
    if report.schema != SCHEMA:
        raise SettingsError(f"{path.name}: schema {report.schema}, this version reads {SCHEMA}")
    return report


def installed_versions() -> dict[str, str]:
    """Return Python's version and those of `PACKAGES` that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


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


def without_paths(command: Sequence[str]) -> list[str]:
    """Replace every absolute or home-relative path in `command` by its last part.

    Also behind ``=``, as in ``--out=/tmp/x.json``.
    """
    cleaned = []
    for argument in command:
        head, equals, tail = argument.partition("=")
        if equals and tail.startswith(("/", "~")):
            cleaned.append(f"{head}={Path(tail).name}")
        elif argument.startswith(("/", "~")):
            cleaned.append(Path(argument).name)
        else:
            cleaned.append(argument)
    return cleaned


def _driver_version() -> str:
    """Return the driver's version, which the kernel module reports without a tool."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="ascii", errors="replace")
    except OSError:
        return "unknown"
    words = text.split()
    numbers = [word for word in words if word[:1].isdigit() and word.count(".") >= 1]
    return numbers[0] if numbers else "unknown"
