# SPDX-License-Identifier: Apache-2.0
"""A server with small resident sets, and what stock's and such a one say: once for all."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from exactness import make_prompts, run
from random_model import DEEP, make_random_model
from rank_servers import SMALL_SELECTION, Server, model_dir, ours, stock
from stock_agreement import DEVICE

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.memory.one_device import is_on_one_device
from tandemkv.cache_rank.protocol.settings.placement import Placement
from tandemkv.server.checks.shared_gpus import check_shared_gpus

Once = Callable[[str, Callable[[], list[Any]]], list[Any]]


@pytest.fixture(scope="session")
def token_ids() -> list[int]:
    """A real text as SmolLM2 tokens."""
    from transformers import AutoTokenizer

    topics = importlib.import_module("pydoc_data.topics").topics
    text = "\n\n".join(t for _, t in sorted(topics.items()))[:40_000]
    return list(AutoTokenizer.from_pretrained(model_dir())(text)["input_ids"])


@pytest.fixture(scope="session")
def prompts(token_ids: list[int]) -> list[list[int]]:
    """Unrelated slices of the text, of 30 to 700 tokens."""
    return make_prompts(token_ids, count=6, shortest=30, longest=700)


@pytest.fixture(scope="session")
def new_tokens() -> int:
    """Tokens that are decoded for each prompt."""
    return 16


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Give what a function finds, by name, if one of the processes that share the tests has it.

    Else the function is called. It returns a list that JSON can hold.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers of this run

    def asked(name: str, ask: Callable[[], list[Any]]) -> list[Any]:
        path = folder / f"{name}.json"
        with (folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                path.write_text(json.dumps(ask()))
            return list(json.loads(path.read_text()))

    return asked


@pytest.fixture(scope="session")
def reference(prompts: list[list[int]], new_tokens: int, once: Once) -> list[Any]:
    """What stock SGLang says to the prompts, one at a time."""

    return once("stock", lambda: of_stock(prompts, new_tokens, Path(model_dir())))


def of_stock(prompts: list[list[int]], new_tokens: int, model: Path) -> list[Any]:
    """What stock SGLang says with a model, one prompt at a time."""
    with serving(model), stock() as server:
        return run(server, prompts, new_tokens=new_tokens, at_once=1)


@pytest.fixture(scope="session")
def small_asked(prompts: list[list[int]]) -> list[list[int]]:
    """A prompt that fits the resident set of `SMALL_SELECTION`, and two that do not."""
    return [prompts[0], *prompts[-2:]]


@pytest.fixture(scope="session")
def of_serve(
    deep_model_dir: Path, small_asked: list[list[int]], new_tokens: int, once: Once
) -> list[Any]:
    """What ``tandemkv serve`` says to `small_asked` with `SMALL_SELECTION`, one at a time.

    For servers of these settings that are started another way; this one has ended.
    """

    def ask() -> list[Any]:
        with serving(deep_model_dir), ours({"selection": SMALL_SELECTION}) as server:
            return run(server, small_asked, new_tokens=new_tokens, at_once=1)

    return once("small", ask)


@pytest.fixture(scope="session")
def random_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with four KV heads and four layers, whose steps take a tenth of the embedded one's.

    For tests of tokens; not for those in which something has to happen while requests decode.
    """
    folder = tmp_path_factory.mktemp("model")
    make_random_model(folder)
    return folder


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[None]:
    """Let servers that start meanwhile serve a model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEMKV_TEST_MODEL", str(folder))
        yield


@pytest.fixture(scope="module")
def random_model(random_model_dir: Path) -> Iterator[Path]:
    """The random model, which the servers of a module serve."""
    with serving(random_model_dir):
        yield random_model_dir


@pytest.fixture
def on_random_model(random_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the servers of a test serve the random model."""
    monkeypatch.setenv("TANDEMKV_TEST_MODEL", str(random_model_dir))


@pytest.fixture(scope="session")
def random_reference(
    random_model_dir: Path, prompts: list[list[int]], new_tokens: int, once: Once
) -> list[Any]:
    """What stock SGLang says to the prompts with the random model, one at a time."""

    return once("stock-random", lambda: of_stock(prompts, new_tokens, random_model_dir))


@pytest.fixture(scope="session")
def deep_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with three KV heads and twelve layers, with steps of a fifth of the embedded one's.

    For tests in which something happens while requests decode.
    """
    folder = tmp_path_factory.mktemp("deep")
    make_random_model(folder, **DEEP)
    return folder


@pytest.fixture(scope="module")
def deep_model(deep_model_dir: Path) -> Iterator[Path]:
    """The deep model, which the servers of a module serve."""
    with serving(deep_model_dir):
        yield deep_model_dir


@pytest.fixture
def on_deep_model(deep_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the servers of a test serve the deep model."""
    monkeypatch.setenv("TANDEMKV_TEST_MODEL", str(deep_model_dir))


@pytest.fixture(scope="session")
def deep_reference(
    deep_model_dir: Path, prompts: list[list[int]], new_tokens: int, once: Once
) -> list[Any]:
    """What stock SGLang says to the prompts with the deep model, one at a time."""

    return once("stock-deep", lambda: of_stock(prompts, new_tokens, deep_model_dir))


@pytest.fixture(params=["shared", "message"])
def link(request: pytest.FixtureRequest) -> str:
    """A link between two processes, if these GPUs have it."""
    name: str = request.param
    if name == "message" and DEVICE == "cuda":
        if is_on_one_device():
            pytest.skip("NCCL connects two GPUs")
        placement = Placement(link="message", model_device="cuda", two_gpus=True)
        try:
            check_shared_gpus(placement)
        except SettingsError as error:
            pytest.skip(str(error))
    return name


@pytest.fixture(scope="module")
def small_server() -> Iterator[Server]:
    """Ours with a resident set much smaller than the prompts."""
    with ours({"selection": SMALL_SELECTION, "evaluation": True}) as server:
        yield server
