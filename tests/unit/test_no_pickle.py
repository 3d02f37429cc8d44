# SPDX-License-Identifier: Apache-2.0
"""What must not occur in the product: code from bytes, object collectives, open sockets, shells."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path
    for top in ("server", "inference_rank", "cache_rank", "kernels")
    for path in (ROOT / top).rglob("*.py")
)

MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}
SUBMODULES = {"torch.distributed.rpc", "multiprocessing.connection"}
NAMES = {"send_pyobj", "recv_pyobj", "send_serialized", "recv_serialized"} | {
    f"{verb}_object{suffix}"
    for verb in ("all_gather", "gather", "broadcast", "scatter", "send", "recv")
    for suffix in ("", "_list")
}
DOTTED_NAMES = {"torch.load", "torch.save", "torch.distributed.rpc", "os.system", "os.popen"}
BUILTINS = {"eval", "exec"}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return "?"


def is_banned_module(name: str) -> bool:
    return name.split(".")[0] in MODULES or any(
        name == banned or name.startswith(f"{banned}.") for banned in SUBMODULES
    )


def compared_constants(tree: ast.Module) -> set[int]:
    """Return the ids of constants in comparisons: asking about an address binds nothing."""
    return {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        for part in ast.walk(node)
        if isinstance(part, ast.Constant)
    }


def offences(source: str) -> Iterator[str]:
    tree = ast.parse(source)
    compared = compared_constants(tree)
    for node in ast.walk(tree):
        for text in offences_of_node(node, compared):
            yield f"line {getattr(node, 'lineno', 0)}: {text}"


def offences_of_node(node: ast.AST, compared: set[int]) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names if is_banned_module(alias.name))
        case ast.ImportFrom(module=str(module), names=names):
            full = [module, *(f"{module}.{alias.name}" for alias in names)]
            yield from (n for n in full if is_banned_module(n) or n in DOTTED_NAMES)
            yield from (alias.name for alias in names if alias.name in NAMES)
        case ast.Attribute(attr=attr) if attr in NAMES or dotted(node) in DOTTED_NAMES:
            yield dotted(node)
        case ast.Call(func=ast.Name(id=name)) if name in BUILTINS:
            yield f"{name}()"
        case ast.Call(func=ast.Name(id="__import__"), args=[ast.Constant(value=str(name))]):
            if is_banned_module(name):
                yield name
        case ast.keyword(arg="shell", value=ast.Constant(value=True)):
            yield "shell=True"
        case ast.Constant(value=str(text)) if id(node) not in compared:
            if text.strip() in ("0.0.0.0", "::") or "tcp://*" in text or "tcp://0.0.0.0" in text:
                yield f"listens on every interface: {text!r}"


def test_there_is_something_to_scan() -> None:
    assert len(SOURCES) > 50


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_source_is_clean(path: Path) -> None:
    assert list(offences(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from dill import loads",
        "import cloudpickle.x",
        "from torch import load",
        "import torch\ntorch.load('x')",
        "import torch.distributed.rpc",
        "from torch.distributed import rpc",
        "dist.all_gather_object([], 1)",
        "from torch.distributed import broadcast_object_list",
        "socket.recv_pyobj()",
        "eval('1')",
        "exec('1')",
        "__import__('marshal')",
        "subprocess.run('ls', shell=True)",
        "host = '0.0.0.0'",
        "socket.bind('tcp://*:5555')",
        "socket.bind(f'tcp://*:{port}')",
    ],
)
def test_scan_finds(source: str) -> None:
    assert list(offences(source))


@pytest.mark.parametrize(
    "source", ["model.eval()", "if host == '0.0.0.0':\n    pass", "import torch\ntorch.compile(f)"]
)
def test_scan_allows(source: str) -> None:
    assert not list(offences(source))
