# SPDX-License-Identifier: Apache-2.0
"""Whether a command can write its results, asked before the minutes or hours that it takes."""

from __future__ import annotations

import os
from pathlib import Path

from tandemkv.cache_rank.protocol.errors import SettingsError


def check_result_file(path: Path, name: str) -> None:
    """Refuse a file that cannot be written; `name` is the option that gave it.

    Nothing is written or made. A folder that is not there is for the command to make. Raises
    `SettingsError`, saying what is in the way.
    """
    if path.is_dir():
        raise SettingsError(f"{name} {path}: is a folder; name a file in it")
    there = path if path.exists() else _nearest(path, name, "a file")
    if not os.access(there, os.W_OK):
        raise SettingsError(f"{name} {path}: {there} cannot be written to; name another file")


def check_result_folder(path: Path, name: str) -> None:
    """Refuse a folder that cannot be written to, or not be made; as `check_result_file`."""
    there = _nearest(path, name, "a folder")
    if not os.access(there, os.W_OK):
        raise SettingsError(f"{name} {path}: {there} cannot be written to; name another folder")


def _nearest(path: Path, name: str, kind: str) -> Path:
    """Return the folder that is there, of `path` and those above it."""
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not there.is_dir():
        raise SettingsError(f"{name} {path}: {there} is no folder; name {kind} in another")
    return there
