# SPDX-License-Identifier: Apache-2.0
"""K and V in FP8: the tokens of stock SGLang with the same flag, and selections from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from exactness import compare, run
from mapped_memory import mapped, scheduler_pid
from random_model import SHAPE
from rank_servers import Server, ours, stock

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

COVERING = {
    "policy": "look_ahead",
    "budget_tokens": 600,
    "resident_factor": 2.0,
    "num_recent_tokens": 32,
    "dense_while_fits": False,
}


@pytest.fixture(scope="module")
def eight_bit_reference(random_model: Path, prompts: list[list[int]], new_tokens: int) -> list[Any]:
    """What stock SGLang says to the prompts, one at a time."""
    del random_model  # which it serves
    with stock("--kv-cache-dtype", "fp8_e4m3") as server:
        return run(server, prompts, new_tokens=new_tokens, at_once=1)


@pytest.fixture(scope="module")
def server(random_model: Path) -> Iterator[Server]:
    """Everything is selected and copied, nothing skipped."""
    del random_model  # which it serves
    cache = {"capacity_tokens": 40_000, "kv_dtype": "fp8_e4m3"}
    with ours({"selection": COVERING, "cache": cache}) as found:
        yield found


def test_tokens_equal_stock(
    server: Server, prompts: list[list[int]], new_tokens: int, eight_bit_reference: list[Any],
    random_reference: list[Any],
) -> None:  # fmt: skip
    for at_once in (1, 4):  # the second time with radix hits
        found = run(server, prompts, new_tokens=new_tokens, at_once=at_once)
        compared = compare(found, eight_bit_reference)
        assert not compared["differing"], compared
        # A key that lies between two FP8 numbers goes to either, by sums of another order.
        assert compared["max_logprob_difference"] < 0.1, compared
    inference, cache = server.values()
    assert inference["sparse_rows_total"] > 0
    assert cache["fetched_rows_total"] > 0
    # FP8 is not what float32 is: else nothing of this was tested.
    logprobs = [[x["logprobs"] for x in found] for found in (random_reference, eight_bit_reference)]
    assert logprobs[0] != logprobs[1]


def test_the_memory_is_a_quarter_of_float32(server: Server) -> None:
    kv = mapped(scheduler_pid(server))["kv"]
    names = ("num_hidden_layers", "num_key_value_heads", "head_dim")
    layers, heads, dim = (SHAPE[name] for name in names)
    slots = 40_000 + 1 + 7 * (4 + 2 * 600)
    assert len(kv) == pytest.approx(layers * 2 * slots * heads * dim, rel=0.01)
