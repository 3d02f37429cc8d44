# SPDX-License-Identifier: Apache-2.0
"""Read a ``report.json`` of ``tandemkv quality``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tandemkv.cache_rank.protocol.errors import SettingsError

from .summary import Row

REPORT_FILE = "report.json"


class ReportFile(NamedTuple):
    """A report: how its results came about, and its rows."""

    name: str
    described: dict[str, Any]
    rows: list[Row]

    @property
    def sparse(self) -> dict[str, Row]:
        """Rows that are not the reference, by label and budget."""
        return {f"{row.label}, {row.budget}": row for row in self.rows if row.system != "sglang"}

    @property
    def dense(self) -> Row | None:
        """The reference, if it was measured."""
        return next((row for row in self.rows if row.system == "sglang"), None)


def read_quality_report(path: Path) -> ReportFile:
    """Read a report, or that of a folder.

    Raises `SettingsError` if the file is not one.
    """
    file = path / REPORT_FILE if path.is_dir() else path
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
        rows = msgspec.convert(described.pop("rows"), list[Row])
        if not isinstance(described["tasks"], dict):
            raise TypeError("tasks")
    except OSError as error:
        raise SettingsError(
            f"{path}: cannot be read ({error.strerror}); give a {REPORT_FILE} of `tandemkv "
            "quality`, or its folder"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, msgspec.ValidationError) as error:
        raise SettingsError(
            f"{path}: not a {REPORT_FILE} of `tandemkv quality` ({error}); make it anew with "
            "--report-only --out of its folder"
        ) from error
    return ReportFile(str(path), described, rows)
