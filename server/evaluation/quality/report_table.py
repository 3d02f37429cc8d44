# SPDX-License-Identifier: Apache-2.0
"""A table of a report."""

from __future__ import annotations

from typing import NamedTuple


class Table(NamedTuple):
    """A table of texts; `note` says how to read it."""

    title: str
    header: list[str]
    rows: list[list[str]]
    note: str
