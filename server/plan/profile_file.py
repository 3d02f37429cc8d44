# SPDX-License-Identifier: Apache-2.0
"""Where a machine's profile is kept: one file for each kind of GPU, in the user's cache folder."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from tandemkv.server.models.embedded_model import cache_root

from .profile import Machine, MachineProfile

_MOST_BYTES = 1 << 16


class Found(NamedTuple):
    """A profile that holds here; or None, and why there is none (empty: none was ever taken)."""

    profile: MachineProfile | None
    problem: str = ""


def profile_path(gpu: str) -> Path:
    """Return the file of a GPU's name, in ``$XDG_CACHE_HOME`` or ``~/.cache``.

    Raises
    ------
    EmbeddedModelError
        If ``XDG_CACHE_HOME`` is a relative path.
    """
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") or "gpu"
    return cache_root() / "profiles" / f"{name}.json"


def read_profile(machine: Machine) -> Found:
    """Return the profile that was taken of `machine`.

    One that was taken with another driver or version, and a file that cannot be read, are not
    used; `Found.problem` says so.
    """
    path = profile_path(machine.gpu)
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return Found(None)
    except OSError as error:
        return Found(None, f"the profile {path} cannot be read ({error.strerror})")
    if len(text) > _MOST_BYTES:
        return Found(None, f"the profile {path} is no profile: more than {_MOST_BYTES} bytes")
    try:
        profile = MachineProfile.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        return Found(None, f"the profile {path} is no profile: {where}: {first['msg']}")
    difference = machine.difference(profile.machine)
    if difference:
        return Found(None, f"the profile {path} was taken with {difference}")
    return Found(profile)


def write_profile(profile: MachineProfile) -> Path:
    """Keep a profile, readable by its owner only, and return its file.

    Written aside and renamed: nobody reads half of it.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    path = profile_path(profile.machine.gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")  # mode 0600
    draft = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(profile.model_dump_json(indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    return path
