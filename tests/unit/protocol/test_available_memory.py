# SPDX-License-Identifier: Apache-2.0
"""What a control group leaves of the host's memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandemkv.cache_rank.protocol.memory.available_memory import available_bytes

GIB = 1 << 30
NAMES = {
    2: ("", "memory.max", "memory.current", "memory.stat", "inactive_file"),
    1: (
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "memory.stat",
        "total_inactive_file",
    ),
}
"""Of a control group of each version: its controller, limit, use, and pages that can be dropped."""
OWN = {2: "0::/a.slice/b.service\n", 1: "3:cpu:/c\n2:hugetlb,memory:/a.slice/b.service\n0::/\n"}
"""What the kernel says of the groups of a service."""


@pytest.fixture
def plenty(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Let the host have more memory than any group here; returns what files of the kernel say."""
    read = Path.read_text
    files = {
        "/proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {1 << 40 >> 10} kB\n",
        "/proc/self/cgroup": "2:memory:/\n0::/\n",
    }

    def read_text(path: Path, encoding: str | None = None) -> str:
        return files.get(str(path)) or read(path, encoding=encoding)

    monkeypatch.setattr(Path, "read_text", read_text)
    return files


def write_group(
    root: Path, version: int, limit: str, stat: str | None = None, *, group: str = ""
) -> None:
    controller, limit_file, used_file, stat_file, _ = NAMES[version]
    folder = root / controller / group
    folder.mkdir(parents=True, exist_ok=True)
    (folder / limit_file).write_text(f"{limit}\n")
    (folder / used_file).write_text(f"{4 * GIB}\n")
    if stat is not None:
        (folder / stat_file).write_text(stat)


@pytest.mark.usefixtures("plenty")
@pytest.mark.parametrize("version", [1, 2])
def test_page_cache_that_can_be_dropped_is_free(tmp_path: Path, version: int) -> None:
    name = NAMES[version][4]
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
    write_group(tmp_path, 2, "max")
    assert available_bytes(tmp_path) == 1 << 40


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_a_service_and_of_what_it_is_in_count(
    tmp_path: Path, version: int, plenty: dict[str, str]
) -> None:
    plenty["/proc/self/cgroup"] = OWN[version]
    for group, limit in (("a.slice", 8 * GIB), ("c", 5 * GIB), ("a.slice/other", 5 * GIB)):
        write_group(tmp_path, version, str(limit), group=group)
    write_group(tmp_path, version, "max", group="a.slice/b.service")
    assert available_bytes(tmp_path) == 4 * GIB
    write_group(tmp_path, version, str(6 * GIB), group="a.slice/b.service")
    assert available_bytes(tmp_path) == 2 * GIB
