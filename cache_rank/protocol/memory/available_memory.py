# SPDX-License-Identifier: Apache-2.0
"""How much memory the host still has for this process."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_CGROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)
"""Of each version: limit, use, and where the files' pages are told that the kernel takes first."""


def available_bytes(root: Path = _ROOT) -> int | None:
    """Host memory that can still be used, control-group limits included; None if unknown.

    Pages of files that were read long ago count as free, for the kernel drops them when memory is
    wanted. `root` has the files of this process's control group.
    """
    found: list[int] = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [int(s.split()[1]) * 1024 for s in lines if s.startswith("MemAvailable:")]
    except (OSError, ValueError):
        pass
    for limit, used, stat, dropped in _CGROUPS:
        try:
            total, taken = (
                int((root / name).read_text(encoding="ascii")) for name in (limit, used)
            )
        except (OSError, ValueError):  # no such group, or "max"
            continue
        found.append(total - max(0, taken - _counter(root / stat, dropped)))
    return min(found) if found else None


def _counter(stat: Path, name: str) -> int:
    """Return a line's number in a ``memory.stat``, in bytes; 0 without one."""
    try:
        fields = (line.split() for line in stat.read_text(encoding="ascii").splitlines())
        return next((int(value) for key, value in fields if key == name), 0)
    except (OSError, ValueError):
        return 0
