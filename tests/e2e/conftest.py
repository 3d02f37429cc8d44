# SPDX-License-Identifier: Apache-2.0
"""Real servers in two settings, each started once and kept no longer than needed; and stock's."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from exactness import make_prompts, run
from rank_servers import Server, model_dir, ours, stock

SMALL = {
    "policy": "look_ahead",
    "budget_tokens": 96,
    "resident_factor": 1.0,
    "num_recent_tokens": 16,
    "fetch_cap": 8,
}


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
def reference(
    prompts: list[list[int]], new_tokens: int, tmp_path_factory: pytest.TempPathFactory
) -> list[Any]:
    """What stock SGLang says to the prompts, one at a time."""

    def ask() -> list[Any]:
        with stock() as server:
            return run(server, prompts, new_tokens=new_tokens, at_once=1)

    return once("stock", ask, tmp_path_factory)


def once(
    name: str, ask: Callable[[], list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> list[Any]:
    """Return what `ask` finds, asked by one of the processes that share the tests."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers of this run
    path = folder / f"{name}.json"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_text(json.dumps(ask()))
        return list(json.loads(path.read_text()))


@pytest.fixture(scope="module")
def exact_server() -> Iterator[Server]:
    """Ours with policy exact and a tiny ring."""
    with ours({"selection": {"policy": "exact", "num_recent_tokens": 16}}) as server:
        yield server


@pytest.fixture(scope="session")
def small_server() -> Iterator[Server]:
    """Ours with a resident set much smaller than the prompts."""
    with ours({"selection": SMALL, "evaluation": True}) as server:
        yield server
