# SPDX-License-Identifier: Apache-2.0
"""How many threads a cache rank may have."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandemkv.server import cores


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 16),
        ({"cpu.max": "max 100000"}, 16),
        ({"cpu.max": "450000 100000"}, 4),
        ({"cpu.max": "20000 100000"}, 1),
        ({"cpu.max": "9900000 100000"}, 16),
        ({"cpu.max": "nonsense"}, 16),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 16),
    ],
)
def test_a_quota_counts(
    files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "_CGROUP", tmp_path)
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(range(16)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert cores.usable_cores() == expected
