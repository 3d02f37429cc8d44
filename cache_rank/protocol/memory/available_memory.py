# SPDX-License-Identifier: Apache-2.0
"""How much memory the host still has for this process."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_CGROUPS = (
    ("", "memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "memory.stat",
        "total_inactive_file",
    ),
)
"""Of each version: controller, limit, use, and where the files' pages are told that the kernel
takes first."""


def available_bytes(root: Path = _ROOT) -> int | None:
    """Host memory that can still be used, control-group limits included; None if unknown.

    Pages of files that were read long ago count as free, for the kernel drops them when memory is
    wanted. `root` is where control groups are mounted.
    """
    found: list[int] = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [int(s.split()[1]) * 1024 for s in lines if s.startswith("MemAvailable:")]
    except (OSError, ValueError):
        pass
    for controller, limit, used, stat, dropped in _CGROUPS:
        for group in _groups_of(controller):
            folder = root / controller / group
            try:
                total, taken = (
                    int((folder / name).read_text(encoding="ascii")) for name in (limit, used)
                )
            except (OSError, ValueError):  # no such group, or "max"
                continue
            found.append(total - max(0, taken - _counter(folder / stat, dropped)))
    return min(found) if found else None


def _groups_of(controller: str) -> set[Path]:
    """Return this process's control group of `controller` and all above it, below the mount.

    A container sees its own as the mount's root. A service of systemd, or a job of Slurm, does not.
    """
    groups = {Path()}
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return groups
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controller in controllers.split(","):
            own = Path(path.lstrip("/"))
            groups |= {own, *own.parents}
    return groups


def _counter(stat: Path, name: str) -> int:
    """Return a line's number in a ``memory.stat``, in bytes; 0 without one."""
    try:
        fields = (line.split() for line in stat.read_text(encoding="ascii").splitlines())
        return next((int(value) for key, value in fields if key == name), 0)
    except (OSError, ValueError):
        return 0
