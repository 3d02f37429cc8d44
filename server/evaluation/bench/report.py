# SPDX-License-Identifier: Apache-2.0
"""The form of every benchmark's result: rows, and what they were measured with.

A report is made to be published: it names versions and the GPU, and no path, host or user.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

import msgspec
import numpy as np

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.evaluation.compact_json import compact_json
from tandemkv.server.evaluation.provenance import BenchError, Gpu, installed_versions, without_paths
from tandemkv.server.evaluation.request_options import option

SCHEMA = 1

OutOption = Annotated[
    Path | None, option("Report to write. Default: ./SUBCOMMAND.json.", metavar="FILE")
]

_PATTERN, _LONGEST, _LONGEST_PART = r"^[a-z0-9_.+-]+$", 256, 110  # a ratio's has two parts
Name = Annotated[str, msgspec.Meta(pattern=_PATTERN, max_length=_LONGEST)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median, 10th and 90th percentile; `n` samples where they are known.

    The unit is the caller's.
    """

    median: float
    p10: float
    p90: float
    n: int | None = None

    @classmethod
    def of(cls, samples: Sequence[float]) -> Self:
        """Summarise `samples`; raises `BenchError` if there is none."""
        if not samples:
            raise BenchError("no sample was measured; raise the number of repetitions")
        low, middle, high = np.percentile(samples, (10, 50, 90)).tolist()
        return cls(median=middle, p10=low, p90=high, n=len(samples))


class Row(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One figure. `value` is a median where there are percentiles; `n` counts the samples."""

    figure: Name
    value: float
    unit: Annotated[str, msgspec.Meta(max_length=32)]
    p10: float | None = None
    p90: float | None = None
    n: int | None = None
    note: str = ""

    @classmethod
    def of(cls, figure: str, spread: Spread, unit: str, *, note: str = "") -> Self:
        """Return the row of a spread in `unit`."""
        return cls(figure, spread.median, unit, spread.p10, spread.p90, spread.n, note)


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A figure that was asked for and could not be had, with the reason."""

    figure: Name
    reason: str


class Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rows of one run of one benchmark."""

    benchmark: Name
    schema: int = SCHEMA
    versions: dict[str, str]
    gpu: Gpu | None
    command: tuple[str, ...]
    rows: tuple[Row, ...]
    failures: tuple[Failure, ...] = ()


def check_name(name: str) -> None:
    """Refuse a name that no figure can have, before anything is measured.

    Raises `SettingsError`.
    """
    if not re.fullmatch(_PATTERN.strip("^$"), name) or len(name) > _LONGEST_PART:
        raise SettingsError(
            f"name={name}: lower-case letters, digits and _ . + - in at most {_LONGEST_PART} "
            "characters, for it is a part of figures' names"
        )


def make_report(
    benchmark: str,
    rows: Sequence[Row],
    *,
    command: Sequence[str],
    failures: Sequence[Failure] = (),
    gpu: Gpu | None = None,
) -> Report:
    """Return a report of `rows` with the environment of this process.

    Raises `BenchError` if two rows have one name.
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
    text = compact_json(msgspec.to_builtins(report))
    if msgspec.json.decode(text, type=Report) != report:
        raise BenchError(f"report {report.benchmark} does not survive being written; report it")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def read_report(path: Path) -> Report:
    """Read a report.

    Raises `SettingsError` if the file is not one.
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
