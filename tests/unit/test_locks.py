# SPDX-License-Identifier: Apache-2.0
"""The lock files fit the requirements that they were made from. `make lock` writes them anew."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tandemkv.inference_rank.sglang.versions import NEWEST, OLDEST, RUN_ON_GPU, VERSIONS

ROOT = Path(__file__).resolve().parents[2]
CPU, GPU = ROOT / "deploy" / "cpu", ROOT / "deploy" / "gpu"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PAIRS = [
    (CPU / "requirements.txt", CPU / "requirements.lock"),
    (CPU / "requirements-dev.txt", CPU / "requirements-dev.lock"),
    (CPU / "requirements-acceptance.txt", CPU / "requirements-acceptance.lock"),
    (CPU / "requirements-no-deps.txt", CPU / "requirements-no-deps.lock"),
    (CPU / "requirements-newest.txt", CPU / "requirements-newest.lock"),
    (GPU / "requirements-build.txt", GPU / "requirements-build.lock"),
]
LOCKS = sorted((ROOT / "deploy").glob("*/*.lock"))
_HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def locked(path: Path) -> dict[str, set[str]]:
    """Return the versions of each package: several where Pythons differ. Each line has a hash."""
    found: dict[str, set[str]] = {}
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in filter(None, (line.partition("#")[0].strip() for line in text.splitlines())):
        requirement = Requirement(line.partition("--hash")[0].strip())
        assert _HASH.search(line), f"{path.name}: {requirement} has no hash"
        (specifier,) = requirement.specifier
        assert specifier.operator == "=="
        found.setdefault(canonicalize_name(requirement.name), set()).add(specifier.version)
    return found


def required(path: Path) -> list[Requirement]:
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def assert_in_step(requirements: list[Requirement], lock: Path) -> None:
    versions = locked(lock)
    for requirement in requirements:
        have = versions.get(canonicalize_name(requirement.name), set())
        assert have, f"{lock.name} lacks {requirement}; run `make lock`"
        assert all(version in requirement.specifier for version in have), (
            f"{lock.name} has {requirement.name} {have}, wanted {requirement}; run `make lock`"
        )


@pytest.mark.parametrize(("source", "lock"), PAIRS, ids=lambda path: path.name)
def test_lock_files_fit_their_requirements(source: Path, lock: Path) -> None:
    requirements = required(source)
    assert requirements
    assert_in_step(requirements, lock)


def test_the_image_gets_what_the_package_asks_for() -> None:
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["gpu"], *extras["bench"]]
    assert_in_step([Requirement(text) for text in wanted], GPU / "requirements.lock")
    (torch,) = locked(GPU / "requirements.lock")["torch"]
    assert Version(torch) >= Version("2.11")


def test_packages_of_several_lock_files_have_one_version() -> None:
    """They go into one environment. torch is left out of it, Triton has only our own pin."""
    base = locked(CPU / "requirements.lock")
    assert not {"torch", "triton"} & set(base)
    assert locked(CPU / "requirements-no-deps.lock")["triton"] == {"3.6.0"}
    for name in ("requirements-dev.lock", "requirements-acceptance.lock"):
        other = locked(CPU / name)
        assert {key: other[key] for key in other.keys() & base.keys()} == {
            key: base[key] for key in other.keys() & base.keys()
        }


def test_the_version_of_torch_is_the_one_that_was_resolved() -> None:
    setup = (CPU / "setup.sh").read_text(encoding="utf-8")
    (version,) = re.findall(r"^torch_version=(.+)$", setup, re.MULTILINE)
    (torch,) = tomllib.loads((CPU / "uv.toml").read_text())["dependency-metadata"]
    assert (torch["name"], torch["version"]) == ("torch", version)
    base = locked(CPU / "requirements.lock")
    for text in torch["requires-dist"]:
        assert canonicalize_name(Requirement(text).name) in base


def test_the_versions_of_sglang_are_those_that_are_taken() -> None:
    """The oldest in the environment and in the image, which is run on GPUs, the newest over it."""
    assert locked(CPU / "requirements-no-deps.lock")["sglang"] == {OLDEST}
    assert locked(CPU / "requirements-newest.lock")["sglang"] == {NEWEST}
    assert locked(GPU / "requirements.lock")["sglang"] == {RUN_ON_GPU[0]}
    (extra,) = PROJECT["optional-dependencies"]["gpu"]
    taken = Requirement(extra).specifier
    assert all(version in taken for version in VERSIONS)
    assert not any(version in taken for version in ("0.5.16", "0.5.24"))


def test_no_lock_file_names_an_index_or_a_folder() -> None:
    assert len(LOCKS) == len(PAIRS) + 1
    for path in LOCKS:
        text = path.read_text(encoding="utf-8")
        assert "://" not in text
        assert "index-url" not in text
        assert "find-links" not in text
