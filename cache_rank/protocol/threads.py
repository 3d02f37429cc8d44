# SPDX-License-Identifier: Apache-2.0
"""How many threads a process is told to use."""

from __future__ import annotations

import os

from .errors import SettingsError

_VARIABLE = "OMP_NUM_THREADS"


def given_threads() -> int | None:
    """Return what ``OMP_NUM_THREADS`` says, at least 1, or None if it is not set.

    Raises `SettingsError` if it is set to something else, to nothing as well.
    """
    text = os.environ.get(_VARIABLE)
    if text is None:
        return None
    # The OpenMP form "4,2" is a list by nesting level.
    first = text.split(",")[0].strip()
    if not first.isdecimal() or int(first) < 1:
        raise SettingsError(f"{_VARIABLE}={text!r} must be a positive number; set one, or unset it")
    return int(first)
