# SPDX-License-Identifier: Apache-2.0
"""Import rules that import-linter or ruff cannot state: see pyproject.toml for the others."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("server", "inference_rank", "cache_rank", "kernels")
SOURCES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for top in FOLDERS
    for path in sorted((ROOT / top).rglob("*.py"))
}
# There they are tests' or scripts' own; only the bare names matter.
OTHERS = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for top in ("tests", "deploy", ".ci")
    for path in sorted((ROOT / top).rglob("*.py"))
}


def imported(source: str, package: str) -> Iterator[str]:
    """Yield the absolute dotted names that a source imports; for ``from a import b`` a and a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield "torch.distributed"


def violations(path: str, source: str) -> list[str]:
    package = ".".join(["tandemkv", *Path(path).parent.parts])
    names = set(imported(source, package))
    return sorted(name for name in names if not allowed(path, package, name))


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def allowed(path: str, package: str, name: str) -> bool:
    protocol = "tandemkv.cache_rank.protocol"
    if name.split(".")[0] in FOLDERS:  # the bare name of a folder
        return False
    if within(name, "tests"):
        return False
    if within(name, "sglang") and not within(package, "tandemkv.inference_rank"):
        return False
    if within(name, "torch.distributed") and not (
        within(package, protocol) or path == "inference_rank/sglang/single_process_group.py"
    ):
        return False
    knows_protocol_only = within(package, "tandemkv.inference_rank") or within(package, protocol)
    of_cache_rank = name.startswith("tandemkv.cache_rank.")
    return not (knows_protocol_only and of_cache_rank and not within(name, protocol))


@pytest.mark.parametrize("path", SOURCES)
def test_product_keeps_its_layers(path: str) -> None:
    assert violations(path, SOURCES[path]) == []


@pytest.mark.parametrize("path", OTHERS)
def test_no_bare_folder_names(path: str) -> None:
    names = imported(OTHERS[path], "elsewhere")
    assert [name for name in names if name.split(".")[0] in FOLDERS] == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("server/x.py", "import kernels"),
        ("server/x.py", "import sglang.srt"),
        ("server/x.py", "import torch\ntorch.distributed.barrier()"),
        ("cache_rank/x.py", "from torch import distributed"),
        ("inference_rank/x.py", "from tandemkv.cache_rank.store import Store"),
        ("inference_rank/x.py", "from tandemkv.cache_rank import policies"),
        ("cache_rank/protocol/x.py", "from ..store import Store"),
        ("kernels/x.py", "from tests import conftest"),
    ],
)
def test_violation_is_found(path: str, source: str) -> None:
    assert violations(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("cache_rank/x.py", "from .store import Store"),
        ("cache_rank/protocol/x.py", "import torch.distributed\nfrom .errors import X"),
        ("inference_rank/x.py", "import sglang\nfrom tandemkv.cache_rank.protocol import errors"),
    ],
)
def test_what_is_allowed_passes(path: str, source: str) -> None:
    assert violations(path, source) == []


@pytest.mark.parametrize("contract", ["protocol-only", "protocol-alone"])
def test_of_the_cache_rank_only_the_protocol_is_not_forbidden(contract: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found = {item["id"]: item for item in project["tool"]["importlinter"]["contracts"]}[contract]
    parts = {
        path.stem
        for path in (ROOT / "cache_rank").iterdir()
        if path.suffix == ".py" or (path.is_dir() and any(path.glob("*.py")))
    }
    forbidden = {f"tandemkv.cache_rank.{name}" for name in parts - {"__init__", "protocol"}}
    assert set(found["forbidden_modules"]) == forbidden
