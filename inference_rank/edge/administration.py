# SPDX-License-Identifier: Apache-2.0
"""Checks of what administrators send, where SGLang takes a mistake badly.

A profile with a mistake in it ends its scheduler, with every request, when it begins, in the next
pass, or when it is written. A level of logging that SGLang does not have fails every request after.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .limits import Limits
from .values import Check, boolean, check_fields, fault, integer, list_of, only, string, wrong

AdminCheck = Callable[[dict[str, Any], Limits], None]
"""Raises `RequestRefusedError`: 400."""

_MOST_STEPS = 1 << 40
_DIGITS = re.compile(r"[0-9]{1,16}")
_LEVELS = ("debug", "info", "warning", "error", "critical")
_FILE_NAME = string(64, pattern=r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


def _folder(name: str, value: Any, limits: Limits) -> None:
    """Make a folder, as SGLang does when it has something to write, and see that it can write."""
    string(4096)(name, value, limits)
    folder = Path(value)
    with contextlib.suppress(OSError, ValueError):
        if folder.is_absolute():
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK | os.X_OK):
                return
    raise wrong(name, value, "the absolute path of a folder that the server can write to")


def _folder_or_none(name: str, value: Any, limits: Limits) -> None:
    if value != "":
        _folder(name, value, limits)


def _activities(name: str, value: Any, limits: Limits) -> None:
    on_gpus = ("MEM", "CUDA_PROFILER") if limits.has_gpu else ()
    list_of(only("CPU", "GPU", *on_gpus), 4, least=1)(name, value, limits)
    if not limits.has_gpu and "CPU" not in value:
        raise wrong(name, value, "CPU among them, for this server has no GPU,")


def _steps(least: int) -> Check:
    """Return the check of a number of steps; SGLang's own clients send its digits."""
    number = integer(least, _MOST_STEPS)

    def check(name: str, value: Any, limits: Limits) -> None:
        is_digits = isinstance(value, str) and _DIGITS.fullmatch(value)
        number(name, int(value) if is_digits else value, limits)

    return check


_PROFILE: dict[str, Check] = {
    "output_dir": _folder,
    "start_step": _steps(0),
    "num_steps": _steps(1),
    "activities": _activities,
    "profile_by_stage": boolean,
    "with_stack": boolean,
    "record_shapes": boolean,
    "merge_profiles": boolean,
    "profile_id": _FILE_NAME,
    "profile_prefix": _FILE_NAME,
    "profile_stages": list_of(only("prefill", "decode"), 2),
}
_LOGGING: dict[str, Check] = {
    "log_requests": boolean,
    "log_requests_level": integer(0, 3),
    "log_requests_format": only("text", "json"),
    "log_level": only(*_LEVELS, *map(str.upper, _LEVELS)),
    "dump_requests_folder": _folder_or_none,
    "dump_requests_threshold": integer(1, 1 << 20),
    "dump_requests_exclude_meta_keys": list_of(string(256), 256),
    "crash_dump_folder": _folder_or_none,
}


def check_profile(body: dict[str, Any], limits: Limits) -> None:
    """Check ``/start_profile``; also the folder that SGLang takes if none is named."""
    check_fields(body, _PROFILE, limits)
    if body.get("profile_by_stage", False) and "num_steps" not in body:
        raise fault("num_steps", "num_steps: profile_by_stage=true needs it; say how many")
    if "output_dir" not in body:
        default = os.environ.get("SGLANG_TORCH_PROFILER_DIR", "/tmp")
        _folder("output_dir", default, limits)


def check_logging(body: dict[str, Any], limits: Limits) -> None:
    """Check ``/configure_logging``."""
    check_fields(body, _LOGGING, limits)
