# SPDX-License-Identifier: Apache-2.0
"""How much memory the host still has for this process."""

from __future__ import annotations

from pathlib import Path

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def available_bytes() -> int | None:
    """Host memory that can still be used, control-group limits included; None if unknown."""
    found: list[int] = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [int(s.split()[1]) * 1024 for s in lines if s.startswith("MemAvailable:")]
    except (OSError, ValueError):
        pass
    for limit, used in _CGROUPS:
        try:
            texts = [Path(path).read_text(encoding="ascii").strip() for path in (limit, used)]
            found.append(int(texts[0]) - int(texts[1]))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return min(found) if found else None
