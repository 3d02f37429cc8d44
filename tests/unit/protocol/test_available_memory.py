# SPDX-License-Identifier: Apache-2.0
"""What a control group leaves of the host's memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandemkv.cache_rank.protocol.memory.available_memory import available_bytes

GIB = 1 << 30
NAMES = {
    2: ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    1: (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
}
"""Of a control group of each version: its limit, its use, and the pages that can be dropped."""


@pytest.fixture
def plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the host have more memory than any group here."""
    read = Path.read_text

    def read_text(path: Path, encoding: str | None = None) -> str:
        if str(path) == "/proc/meminfo":
            return f"MemTotal: 1 kB\nMemAvailable: {1 << 40 >> 10} kB\n"
        return read(path, encoding=encoding)

    monkeypatch.setattr(Path, "read_text", read_text)


def write_group(root: Path, version: int, limit: str, stat: str | None) -> None:
    limit_file, used_file, stat_file, _ = NAMES[version]
    (root / limit_file).parent.mkdir(exist_ok=True)
    (root / limit_file).write_text(f"{limit}\n")
    (root / used_file).write_text(f"{4 * GIB}\n")
    if stat is not None:
        (root / stat_file).write_text(stat)


@pytest.mark.usefixtures("plenty")
@pytest.mark.parametrize("version", [1, 2])
def test_page_cache_that_can_be_dropped_is_free(tmp_path: Path, version: int) -> None:
    name = NAMES[version][3]
    stat = f"anon {GIB}\nfile {3 * GIB}\n{name} {3 * GIB}\nactive_file 0\n"
    write_group(tmp_path, version, str(8 * GIB), stat)
    assert available_bytes(tmp_path) == 7 * GIB


@pytest.mark.usefixtures("plenty")
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("stat", [None, "", "inactive_file x\ntotal_inactive_file x\n"])
def test_without_that_number_all_use_counts(tmp_path: Path, version: int, stat: str | None) -> None:
    write_group(tmp_path, version, str(8 * GIB), stat)
    assert available_bytes(tmp_path) == 4 * GIB


@pytest.mark.usefixtures("plenty")
def test_a_group_without_a_limit_leaves_all(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) == 1 << 40
    write_group(tmp_path, 2, "max", None)
    assert available_bytes(tmp_path) == 1 << 40
