# SPDX-License-Identifier: Apache-2.0
"""Cores that processes of ours may use."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Return how many cores this process may keep busy, by affinity and control group.

    Threads beyond a container's quota are throttled together, and those that spin keep the others
    from their share.
    """
    cores = len(os.sched_getaffinity(0))
    quota = _quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def _quota() -> float | None:
    """Return the control group's CPU quota in cores; None if there is none."""
    try:  # version 2: "max 100000" or "800000 100000"
        limit, period = (_CGROUP / "cpu.max").read_text(encoding="ascii").split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        pass
    try:  # version 1
        folder = _CGROUP / "cpu"
        limit_us = int((folder / "cpu.cfs_quota_us").read_text(encoding="ascii"))
        period_us = int((folder / "cpu.cfs_period_us").read_text(encoding="ascii"))
        return limit_us / period_us if limit_us > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
