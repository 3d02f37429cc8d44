# SPDX-License-Identifier: Apache-2.0
"""Whose constants predictions are made with here, and taking those of this machine.

A machine's profile is kept in the user's cache folder, one file for each kind of GPU.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic import ValidationError

from tandemkv.server.evaluation.provenance import visible_gpu
from tandemkv.server.models.embedded_model import cache_root

from .cost import H200, CostConstants
from .footprint import GIB
from .measure import ProfileError, take_measurements
from .profile import Machine, MachineProfile

if TYPE_CHECKING:
    from .device_timings import DeviceTimings

_MOST_BYTES = 1 << 16
ADVICE = "`tandemkv plan --measure` takes those of this machine in about 10 s"


class Constants(NamedTuple):
    """Constants, and what a user is told of them beside their origin; may be empty."""

    cost: CostConstants
    note: str


def constants_here() -> Constants:
    """Return the constants of this machine's profile, or those of one H200 and what to do.

    Without a GPU those of one H200: nothing is served there that they would change.
    """
    gpu = visible_gpu()
    if gpu is None:
        return Constants(H200, "")
    try:
        profile = read_profile(Machine.of(gpu))
    except ProfileError as error:
        return Constants(H200, f"{error}; {ADVICE}")
    return Constants(H200, ADVICE) if profile is None else Constants(profile.constants(), "")


def measure_here(progress: Callable[[str], None]) -> MachineProfile:
    """Time this machine's first GPU, keep that as its profile, and return it.

    `progress` is told what is timed, and where the profile is kept, or why it could not be. Raises
    `ProfileError` if there is no GPU, it has no room, or something else uses it.
    """
    gpu = visible_gpu()
    if gpu is None:
        raise ProfileError(
            "--measure times the GPU of this machine, and torch sees none. Nothing would use a "
            "profile of a CPU: what is chosen there, a cache rank in a process of its own, is "
            "chosen without predicted times"
        )
    progress(f"measuring {gpu.name}: about 10 s, more when kernels are compiled for the first time")
    try:
        measured = take_measurements(timings_here(), progress)
    except ProfileError:
        raise
    except Exception as error:  # of CUDA, Triton or FlashInfer, each with types of its own
        text = f"{gpu.name} could not be measured: {type(error).__name__}: {error}"
        raise ProfileError(text) from error
    today = datetime.now(UTC).date().isoformat()
    profile = MachineProfile(machine=Machine.of(gpu), taken_at=today, measured=measured)
    try:
        progress(f"kept in {write_profile(profile)}")
    except OSError as error:
        progress(
            f"the profile could not be kept ({error}), so only this plan uses it: set "
            "XDG_CACHE_HOME to a folder that can be written"
        )
    return profile


def timings_here() -> DeviceTimings:
    """Return what times the operations of this machine's first GPU.

    Raises `ProfileError` if it has no room for them.
    """
    import torch

    from .device_timings import NEEDED_BYTES, DeviceTimings

    device = torch.device("cuda", 0)
    free, _ = torch.cuda.mem_get_info(device)
    if free < NEEDED_BYTES:
        raise ProfileError(
            f"measuring takes {NEEDED_BYTES // GIB} GiB of a GPU that nothing else uses, and "
            f"{free / GIB:.1f} GiB are free on {device}; stop what runs there"
        )
    return DeviceTimings(device)


def profile_path(gpu: str) -> Path:
    """Return the file of a GPU's name; raises as `cache_root`, in which it is."""
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") or "gpu"
    return cache_root() / "profiles" / f"{name}.json"


def read_profile(machine: Machine) -> MachineProfile | None:
    """Return the profile that was taken of `machine`; None if none was ever taken.

    Raises `ProfileError` if it was taken with another driver or version, or cannot be read.
    """
    path = profile_path(machine.gpu)
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ProfileError(f"the profile {path} cannot be read ({error.strerror})") from error
    if len(text) > _MOST_BYTES:
        raise ProfileError(f"the profile {path} is no profile: more than {_MOST_BYTES} bytes")
    try:
        profile = MachineProfile.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        why = f"{where}: {first['msg']}"
        raise ProfileError(f"the profile {path} is no profile: {why}") from error
    difference = machine.difference(profile.machine)
    if difference:
        raise ProfileError(f"the profile {path} was taken with {difference}")
    return profile


def write_profile(profile: MachineProfile) -> Path:
    """Keep a profile, readable by its owner only, and return its file.

    Written aside and renamed: nobody reads half of it. Raises `OSError` if it cannot be written.
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
