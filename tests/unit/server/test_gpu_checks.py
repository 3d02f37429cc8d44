# SPDX-License-Identifier: Apache-2.0
"""What `tandemkv doctor` says of GPUs that are not there."""

from __future__ import annotations

import platform
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from timings import A100, profile_of

from tandemkv.server.cli import doctor, gpu_checks
from tandemkv.server.cli.finding import Finding
from tandemkv.server.evaluation.provenance import Gpu
from tandemkv.server.plan.constants import write_profile
from tandemkv.server.plan.cost import H200

LAUNCH_PAGE = Path(__file__).parents[3] / "docs" / "launch.md"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Pretend that there are GPUs of a name and a capability, with peer access between some."""

    def pretend(
        count: int, name: str = "NVIDIA H200", *, capability: tuple[int, int] = (9, 0),
        apart: tuple[int, ...] = (), gib: int = 139,
    ) -> None:  # fmt: skip
        memory = SimpleNamespace(name=name, total_memory=gib << 30)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(
            torch.cuda, "can_device_access_peer", lambda one, other: not {one, other} & set(apart)
        )
        gpu = Gpu(name, count, gib << 30, "560.1") if count else None
        monkeypatch.setattr(gpu_checks, "visible_gpu", lambda: gpu)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "mps"))
    monkeypatch.setattr(gpu_checks, "check_compiler", lambda: Finding("C compiler", "ok", "cc"))
    return pretend


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {item.name: item for item in findings}


def test_without_a_gpu_nothing_is_said(gpus: Any) -> None:
    gpus(0)
    assert gpu_checks.check_gpus() == []


def test_what_is_fine_is_told(gpus: Any) -> None:
    gpus(2)
    found = by_name(gpu_checks.check_gpus())
    assert {item.level for item in found.values()} == {"ok"}
    assert found["gpu 1"].text == "NVIDIA H200, 139 GiB, capability 9.0, driver 560.1"
    assert found["peer access"].text == "between all 2 GPUs"
    assert found["CUDA MPS"].text.startswith("does not run")
    gpus(1)
    assert "peer access" not in by_name(gpu_checks.check_gpus())


@pytest.mark.parametrize(
    ("capability", "told"), [((8, 9), "compile and never ran"), ((12, 0), "were not tried")]
)
def test_a_gpu_that_nothing_ran_on_is_a_warning(
    gpus: Any, capability: tuple[int, int], told: str
) -> None:
    gpus(1, "NVIDIA L4", capability=capability, gib=22)
    found = by_name(gpu_checks.check_gpus())["gpu 0"]
    assert (found.level, told in found.advice) == ("warn", True)


def test_the_table_of_gpus_is_that_of_the_page() -> None:
    page = LAUNCH_PAGE.read_text(encoding="utf-8").partition("## Which GPUs")[2]
    rows = re.findall(r"^\| (\d)\.(\d) \| [^|]+ \| (yes|no) \| (yes|no) \|$", page, re.MULTILINE)
    assert {(int(one), int(two)) for one, two, _, ran in rows if ran == "yes"} == gpu_checks.RAN
    compiled = {(int(one), int(two)) for one, two, compiles, _ in rows if compiles == "yes"}
    assert compiled == gpu_checks.RAN | gpu_checks.COMPILED


def test_gpus_apart_are_named(gpus: Any) -> None:
    gpus(3, apart=(2,))
    found = by_name(gpu_checks.check_gpus())["peer access"]
    assert (found.level, found.text) == ("warn", "none between 0 and 2, 1 and 2")
    assert "--cache-ranks 0" in found.advice


def test_mps_is_seen_by_its_pipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert "does not run" in gpu_checks.check_mps().text
    (tmp_path / "control").touch()
    assert gpu_checks.check_mps().text == f"runs, in {tmp_path}"


def test_a_compiler_is_looked_for_where_triton_does(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"clang": "/bin/clang"}
    monkeypatch.setattr(gpu_checks.shutil, "which", there.get)
    monkeypatch.delenv("CC", raising=False)
    assert gpu_checks.check_compiler() == Finding("C compiler", "ok", "/bin/clang")
    monkeypatch.setenv("CC", "icx")
    assert gpu_checks.check_compiler().text == "no icx"
    monkeypatch.setenv("CC", "")
    there.clear()
    found = gpu_checks.check_compiler()
    assert (found.level, found.text) == ("fail", "no gcc or clang")


def test_a_profile_is_missed_where_constants_are_of_another_gpu(
    gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(1, A100.name, capability=(8, 0))
    monkeypatch.setattr(gpu_checks, "visible_gpu", lambda: A100)
    found = gpu_checks.check_profile()
    assert (found.level, "plan --measure" in found.advice) == ("warn", True)
    profile = profile_of(H200)
    path = write_profile(profile)
    assert gpu_checks.check_profile() == Finding("profile", "ok", f"measured {profile.taken_at}")
    path.write_text("{}")
    assert "is no profile" in gpu_checks.check_profile().text


@pytest.mark.parametrize(
    ("version", "level"),
    [("3.10.2", "fail"), ("3.11.9", "ok"), ("3.12.1", "ok"), ("3.13.0", "warn")],
)
def test_python_is_one_that_was_run(
    monkeypatch: pytest.MonkeyPatch, version: str, level: str
) -> None:
    monkeypatch.setattr(platform, "python_version", lambda: version)
    monkeypatch.setattr(platform, "python_version_tuple", lambda: tuple(version.split(".")))
    assert doctor.check_python().level == level
