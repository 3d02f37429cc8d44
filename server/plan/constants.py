# SPDX-License-Identifier: Apache-2.0
"""Whose constants predictions are made with here, and taking those of this machine."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from tandemkv.server.evaluation.provenance import visible_gpu

from .cost import H200, CostConstants
from .footprint import GIB
from .measure import ProfileError, take_measurements
from .profile import Machine, MachineProfile
from .profile_file import read_profile, write_profile

if TYPE_CHECKING:
    from .device_timings import DeviceTimings

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
    found = read_profile(Machine.of(gpu))
    if found.profile is not None:
        return Constants(found.profile.constants(), "")
    return Constants(H200, f"{found.problem}; {ADVICE}" if found.problem else ADVICE)


def measure_here(progress: Callable[[str], None]) -> MachineProfile:
    """Time this machine's first GPU, keep that as its profile, and return it.

    Parameters
    ----------
    progress : callable
        Told what is timed, and where the profile is kept, or why it could not be.

    Raises
    ------
    ProfileError
        If there is no GPU, it has no room, or something else uses it.
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

    Raises
    ------
    ProfileError
        If it has no room for them.
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
