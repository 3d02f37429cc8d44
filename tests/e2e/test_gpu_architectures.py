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
    MARGIN,
    NEW_TOKENS,
    agreement,
    check,
    prompts_of,
    served,
    settings_of,
    stock,
)
from tiny_models import MODELS, write_model, write_tokenizer

from tandemkv.cache_rank.protocol.models.architectures import ARCHITECTURES

pytestmark = [
    pytest.mark.e2e,
    *([pytest.mark.gpu] if DEVICE == "cuda" else []),
    pytest.mark.timeout(3000),
]

AT_ONCE = 9 if DEVICE == "cuda" else 1
"""Most of a model's time its servers start, on the host."""
_WRITING = threading.Lock()
_TRITON = ("gemma3", "gpt-oss", "olmo2")
"""SGLang's FlashInfer takes no sinks, refuses OLMo 2, and is wrong with sliding windows."""
_ENOUGH = COUNT * NEW_TOKENS // 5
"""Texts of random models part at a tie, and soon if layers are linear attention."""
_ON_CPUS = ("llama", "qwen3-moe", "gemma3")
NAMES = tuple(MODELS) if DEVICE == "cuda" else _ON_CPUS


class Answers(NamedTuple):
    """What two servers say to the same prompts, and ours of itself.

    ``again``: several at a time, behind prefixes that they have.
    """

    stock: list[dict[str, Any]]
    stock_again: list[dict[str, Any]]
    ours: list[dict[str, Any]]
    ours_again: list[dict[str, Any]]
    values: dict[str, Any]


def _more_args(name: str) -> tuple[list[str], list[str]]:
    """Arguments of both servers, and more of stock SGLang."""
    architecture = MODELS[name].architecture
    entry = ARCHITECTURES[architecture]
    if architecture == "Glm4MoeForCausalLM":  # it would choose one expert more than there are
        return ["--disable-shared-experts-fusion"], []
    if name in _TRITON and DEVICE == "cuda":
        return [], ["--attention-backend", "triton"]
    if "linear_key_head_dim" in MODELS[name].changes:  # else states take half of the GPU's memory
        strategy = ["--mamba-radix-cache-strategy", "extra_buffer"] if entry.names_strategy else []
        return [], ["--max-mamba-cache-size", "48", *strategy]
    return [], []


def _ask(name: str, folder: Path, prompts: list[list[int]]) -> Answers:
    with _WRITING:  # it seeds what all threads draw from
        write_model(name, folder, for_gpus=True)
        write_tokenizer(folder, Path(model_dir()))
    both, stocks = _more_args(name)
    answers = []
    selection = {"policy": "look_ahead", **COVERING}
    given = settings_of(selection).sglang_args
    for server in (
        stock(*both, *stocks, model=folder),
        served(selection, model=str(folder), sglang_args=(*given, *both)),
    ):
        with server as running:
            answers += [run(running, prompts, new_tokens=NEW_TOKENS, at_once=n) for n in (1, 4)]
            values = running.values()[0] if len(answers) > 2 else {}
    return Answers(*answers, values)


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
    floor = agreement(found.stock_again, found.stock)
    check(floor, f"stock {name}, four at a time", 2 * MARGIN, _ENOUGH)
    margin = max(MARGIN, *floor["margins_where_first_different"].values(), 0.0)
    check(agreement(found.ours, found.stock), name, margin, _ENOUGH)
    again = agreement(found.ours_again, found.stock)
    check(again, f"{name}, four at a time", margin, _ENOUGH)
    assert found.values["sparse_rows_total"] >= 2 * COUNT * (NEW_TOKENS - 1)
