# SPDX-License-Identifier: Apache-2.0
"""Whether the host has room for the store, before anything is promised to an inference rank."""

from __future__ import annotations

from pathlib import Path

from .protocol.errors import SettingsError
from .protocol.model_spec import ModelSpec
from .protocol.settings import RankSettings
from .store import bytes_per_token

_GIB = 1 << 30
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


def check_memory(model: ModelSpec, settings: RankSettings, *, num_slots: int) -> None:
    """Refuse a store that does not fit.

    Parameters
    ----------
    model : ModelSpec
        Shape and dtype.
    settings : RankSettings
        Its `index_dtype` counts.
    num_slots : int
        Tokens.

    Raises
    ------
    SettingsError
        With the numbers, and a capacity that fits.
    """
    free = available_bytes()
    if free is None:
        return
    per_token = bytes_per_token(model, settings.selection.index_dtype)
    wanted = per_token * num_slots
    if wanted > free:
        raise SettingsError(
            f"cache.capacity_tokens={settings.cache.capacity_tokens} needs "
            f"{wanted / _GIB:.2f} GiB ({per_token} bytes a token in {model.dtype}), the host has "
            f"{free / _GIB:.2f} GiB available; at most {max(0, free) // per_token} tokens fit"
        )
