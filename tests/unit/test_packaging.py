# SPDX-License-Identifier: Apache-2.0
"""The package list is kept by hand; a folder that it lacks would be absent from the wheel."""

import ast
import importlib.metadata
import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOP_FOLDERS = ("server", "inference_rank", "cache_rank", "kernels")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]


def folders_with_python() -> list[str]:
    found = set()
    for top in TOP_FOLDERS:
        for path in (ROOT / top).rglob("*.py"):
            found.add("tandemkv." + ".".join(path.parent.relative_to(ROOT).parts))
    return sorted(found)


def test_package_list_is_the_folders() -> None:
    assert sorted(SETUPTOOLS["packages"]) == folders_with_python()


def test_the_map_of_folders_is_complete() -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"^## Where the code is\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"^\| `([a-z_/]+)` \|", section, re.MULTILINE))
    folders = {"/".join(package.split(".")[1:3]) for package in SETUPTOOLS["packages"]}
    missing = {x for x in folders if "/" in x} - named - {"kernels/triton_ops", "kernels/numba_ops"}
    assert missing == set()
    assert all((ROOT / name).is_dir() for name in named)


def test_package_dir_maps_each_top_folder() -> None:
    assert SETUPTOOLS["package-dir"] == {f"tandemkv.{name}": name for name in TOP_FOLDERS}


@pytest.mark.parametrize("package", SETUPTOOLS["packages"])
def test_init_of_a_package_is_a_docstring(package: str) -> None:
    folder = ROOT.joinpath(*package.split(".")[1:])
    body = ast.parse((folder / "__init__.py").read_text(encoding="utf-8")).body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)
    assert isinstance(body[0].value, ast.Constant)


@pytest.mark.parametrize("top", TOP_FOLDERS)
def test_a_top_package_is_typed(top: str) -> None:
    """PEP 561: the marker holds for what is below it."""
    assert (ROOT / top / "py.typed").is_file()


def test_namespace_has_no_folder_of_its_own() -> None:
    """A real tandemkv/ in the checkout would shadow an installed package."""
    assert not (ROOT / "tandemkv").exists()
    assert not (ROOT / "__init__.py").exists()
    assert all(not (ROOT / name / "tandemkv").exists() for name in TOP_FOLDERS)


@pytest.mark.parametrize(
    ("group", "value"),
    [
        ("console_scripts", "tandemkv.server.__main__:main"),
        ("sglang.srt.plugins", "tandemkv.inference_rank.plugin:register"),
    ],
)
def test_entry_point_is_installed_and_loads(group: str, value: str) -> None:
    found = importlib.metadata.entry_points(group=group, name="tandemkv")
    assert [point.value for point in found] == [value], "run `make setup`"
    (point,) = found
    assert callable(point.load())


def test_version_is_the_installed_one() -> None:
    assert importlib.metadata.version("tandemkv") == PROJECT["project"]["version"]


def test_the_package_index_kernels_is_not_shadowed() -> None:
    """Transformers imports a package called kernels when there is one; it must not find ours."""
    spec = importlib.util.find_spec("kernels")
    origin = Path(spec.origin).resolve() if spec is not None and spec.origin else None
    assert origin is None or not origin.is_relative_to(ROOT / "kernels"), (
        "the repository's root is on sys.path: run pytest through `make test`"
    )
