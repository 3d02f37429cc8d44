# SPDX-License-Identifier: Apache-2.0
"""Every architecture of the list on a GPU, in bfloat16: a small random model's tokens are stock's.

Both serve over HTTP, ours with `look_ahead`, which selects from everything, and selects all.
``TANDEMKV_TEST_DEVICE=cpu`` does the same on a CPU, with models that SGLang serves on any.
"""

from __future__ import annotations

import threading
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from exactness import run
from rank_servers import model_dir
from stock_agreement import (
    COUNT,
    COVERING,
    DEVICE,
    NEW_TOKENS,
    agreement,
    check,
    prompts_of,
    served,
    stock,
)
from tiny_models import MODELS, write_model, write_tokenizer

from tandemkv.cache_rank.protocol.models.architectures import ARCHITECTURES

pytestmark = [
    pytest.mark.e2e,
    *([pytest.mark.gpu] if DEVICE == "cuda" else []),
    pytest.mark.timeout(3000),
]

AT_ONCE = 6 if DEVICE == "cuda" else 1
"""Most of a model's time its servers start, on the host."""
_WRITING = threading.Lock()
_ON_CPUS = ("llama", "qwen3-moe", "gemma3")
NAMES = tuple(MODELS) if DEVICE == "cuda" else _ON_CPUS


class Answers(NamedTuple):
    """What two servers say to the same prompts, and ours of itself."""

    stock: list[dict[str, Any]]
    ours: list[dict[str, Any]]
    again: list[dict[str, Any]]
    """Ours, several at a time, behind prefixes that it has."""
    values: dict[str, Any]


def _more_args(name: str) -> tuple[str, ...]:
    """Arguments of stock SGLang."""
    model = MODELS[name]
    if ARCHITECTURES[model.architecture].has_sinks:  # FlashInfer's backend takes none
        return ("--attention-backend", "triton")
    if "linear_key_head_dim" in model.changes:  # else states take half of the GPU's memory
        return ("--max-mamba-cache-size", "48", "--disable-radix-cache")
    return ()


def _ask(name: str, folder: Path, prompts: list[list[int]]) -> Answers:
    with _WRITING:  # it seeds what all threads draw from
        write_model(name, folder, for_gpus=True)
        write_tokenizer(folder, Path(model_dir()))
    with stock(*_more_args(name), model=folder) as server:
        wanted = run(server, prompts, new_tokens=NEW_TOKENS, at_once=1)
    with served({"policy": "look_ahead", **COVERING}, model=str(folder)) as server:
        found = run(server, prompts, new_tokens=NEW_TOKENS, at_once=1)
        again = run(server, prompts, new_tokens=NEW_TOKENS, at_once=4)
        values, _ = server.values()
    return Answers(wanted, found, again, values)


@pytest.fixture(scope="module")
def answers(
    request: pytest.FixtureRequest, token_ids: list[int], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Future[Answers]]:
    """Start the models that the chosen tests need, several at a time."""
    items = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["name"] for item in items if hasattr(item, "callspec")]
    folder, prompts = tmp_path_factory.mktemp("models"), prompts_of(token_ids)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return {name: pool.submit(_ask, name, folder / name, prompts) for name in names}


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_stock(name: str, answers: dict[str, Future[Answers]]) -> None:
    error = answers[name].exception()
    assert error is None, "".join(traceback.format_exception(error))
    found = answers[name].result()
    assert len({token for answer in found.stock for token in answer["ids"]}) > 16
    check(agreement(found.ours, found.stock), name)
    check(agreement(found.again, found.stock), f"{name}, four at a time")
    assert found.values["sparse_rows_total"] >= 2 * COUNT * (NEW_TOKENS - 1)
