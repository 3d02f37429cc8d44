# SPDX-License-Identifier: Apache-2.0
"""Several cache ranks of one inference rank, each on a GPU of its own, give the tokens of one.

They map memory, or are met by messages, which needs CUDA MPS. The embedded model has three KV
heads: of two cache ranks one has two of them. That one cache rank gives the tokens of one process
says `test_gpu_shared.py`. Under CUDA MPS run nothing beside it: a process that is killed ends
others on its GPU. As that does, this runs on one GPU too, under CUDA MPS with
``TANDEMKV_ONE_DEVICE``, and on a CPU with ``apart`` and ``TANDEMKV_TEST_DEVICE=cpu``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from exactness import flush, make_families, run
from nothing_lost import wait_for
from random_model import make_random_model
from rank_servers import Server
from stock_agreement import (
    COUNT,
    COVERING,
    DEVICE,
    NEW_TOKENS,
    agreement,
    check,
    killed_while,
    prompts_of,
    served,
    stock,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

_TWO = pytest.param(2, id="two", marks=pytest.mark.multi_gpu(3, or_one_device=True))
_THREE = pytest.param(3, id="three", marks=pytest.mark.multi_gpu(4, or_one_device=True))
_SPARSE = {"policy": "look_ahead", "dense_tokens": 0, "exact_layers": [], "late_layers": 0}
_SPARSE |= (
    {"budget_tokens": 256} if DEVICE == "cuda" else {"budget_tokens": 64, "num_recent_tokens": 16}
)
_LONG = 256 if DEVICE == "cuda" else 64
"""Tokens of an answer in the middle of which a process is killed."""
_INDEXES = ("int8", "int4") if DEVICE == "cuda" else ("int8",)


@pytest.fixture(scope="module")
def prompts(token_ids: list[int]) -> list[list[int]]:
    return prompts_of(token_ids)


def several(count: int, link: str) -> dict[str, Any]:
    """The placement of so many cache ranks."""
    return {"cache_ranks": count, "transport": link, "evaluation": link == "shared"}


def cache_ranks(server: Server) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.get("/tandemkv/status")[1]["cache_ranks"]
    return found


def fetched_rows(server: Server) -> float:
    """Rows that the engines have sent to resident sets; pumps have no counters of theirs."""
    return sum(rank["values"].get("fetched_rows_total", 0) for rank in cache_ranks(server))


def check_equal(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], what: str) -> None:
    """On GPUs to the bit: heads are selected for one by one, and rows are copies."""
    found = agreement(ours, theirs)
    check(found, what)
    if DEVICE == "cuda":
        assert not found["margins_where_first_different"]
        assert found["largest_logprob_difference"] == 0.0


@pytest.mark.parametrize("count", [_TWO, _THREE])
@pytest.mark.parametrize(
    "selection",
    [
        *(
            pytest.param({"index_dtype": index, "predictor_dtype": "native"}, id=index)
            for index in _INDEXES
        ),
        pytest.param({"policy": "async_spade", "index_dtype": "native"}, id="async_spade"),
        pytest.param({"policy": "oracle", "index_dtype": "int8"}, id="oracle"),
        pytest.param({"policy": "quest"}, id="quest"),
    ],
)
def test_tokens_and_rows_are_those_of_one_cache_rank(
    selection: dict[str, Any], count: int, prompts: list[list[int]], link: str
) -> None:
    alone, together, fetched = {}, {}, {}
    for number in (1, count):
        with served(_SPARSE | selection, **several(number, link)) as server:
            alone[number] = run(server, prompts, new_tokens=NEW_TOKENS, at_once=1)
            fetched[number] = fetched_rows(server)
            assert len(server.cache_rank_pids()) == len(cache_ranks(server)) == number
            flush(server)
            together[number] = run(server, prompts, new_tokens=NEW_TOKENS, at_once=8)
    check_equal(alone[count], alone[1], f"{selection}, {count} and one")
    check(agreement(together[count], together[1]), f"{selection}, eight at a time")
    assert (fetched[1] > COUNT * NEW_TOKENS) == (link == "shared")
    # A GPU's counters are those of about a step ago.
    assert fetched[count] == pytest.approx(fetched[1], rel=0.01 if DEVICE == "cuda" else 0)


@pytest.mark.parametrize("count", [_TWO, _THREE])
def test_prefixes_on_other_gpus_give_the_tokens_of_one_cache_rank(
    count: int, token_ids: list[int], link: str
) -> None:
    """Prompts in several chunks, and such as begin with what the radix tree has."""
    chunk = 512 if DEVICE == "cuda" else 128
    asked = make_families(token_ids, families=4, shortest=chunk, longest=5 * chunk)
    selection, answers = _SPARSE | {"index_dtype": "int8", "predictor_dtype": "native"}, {}
    for number in (1, count):
        with served(selection, **several(number, link), chunked_prefill_size=chunk) as server:
            answers[number] = run(server, asked, new_tokens=NEW_TOKENS, at_once=1)
            assert server.values()[0]["far_prefix_passes_total"] == 0
    check_equal(answers[count], answers[1], "chunks and radix hits")


@pytest.fixture(scope="module")
def reference(prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Stock SGLang's answers, one request at a time."""
    with stock() as server:
        return run(server, prompts, new_tokens=NEW_TOKENS, at_once=1)


@pytest.mark.parametrize("count", [_TWO, _THREE])
@pytest.mark.parametrize("exact_layers", [[], [0, 1]], ids=["as_served", "exact_layers"])
def test_tokens_are_those_of_stock_where_everything_is_covered(
    exact_layers: list[int], count: int, prompts: list[list[int]],
    reference: list[dict[str, Any]], link: str,
) -> None:  # fmt: skip
    """A late first layer, W_q in int8, samples; outputs of exact layers come by parts."""
    selection = {"policy": "look_ahead", **COVERING, "exact_layers": exact_layers}
    with served(selection, **several(count, link)) as server:
        alone = run(server, prompts, new_tokens=NEW_TOKENS, at_once=1)
        check(agreement(alone, reference), f"{selection}, alone")
        flush(server)
        together = run(server, prompts, new_tokens=NEW_TOKENS, at_once=8)
        check(agreement(together, reference), f"{selection}, eight at a time")


@pytest.mark.parametrize("count", [_TWO, _THREE])
def test_requests_go_on_where_one_was_killed(
    count: int, prompts: list[list[int]], link: str
) -> None:
    """The others go on living; alone a request gives the same tokens."""
    longest = sorted(prompts, key=len)[-1:]
    with served(_SPARSE | {"index_dtype": "int8"}, **several(count, link)) as server:
        want = run(server, longest, new_tokens=_LONG, at_once=1)
        for killed in (count - 1, 0):
            flush(server)
            before = server.cache_rank_pids()
            found = killed_while(server, longest, before[killed], new_tokens=_LONG)
            assert [answer["ids"] for answer in found] == [answer["ids"] for answer in want]
            wait_for(
                lambda: len(server.cache_rank_pids()) == count, "a cache rank does not come back"
            )
            same = [a == b for a, b in zip(server.cache_rank_pids(), before, strict=True)]
            assert same == [number != killed for number in range(count)]
        values = server.values()[0]
    assert values["cache_rank_lost_total"] == values["pauses_total"] == 2
    assert values["restored_rows_total"] == 2
    assert values["reseeded_rows_total"] == values["requests_failed_total"] == 0


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(2, id="one_each", marks=pytest.mark.multi_gpu(4, or_one_device=True)),
        pytest.param(4, id="two_each", marks=pytest.mark.multi_gpu(6, or_one_device=True)),
    ],
)
def test_cache_ranks_of_tensor_parallel_ranks_give_the_tokens_of_one_each(
    count: int, prompts: list[list[int]], link: str, tmp_path: Path
) -> None:
    """That which maps memory is compared with: two processes of SGLang, a cache rank each."""
    if (count, link) == (2, "shared"):
        pytest.skip("it would be compared with itself")
    make_random_model(tmp_path, head_dim=64)  # which is one of FlashInfer's
    given, answers = {"model": str(tmp_path), "tensor_parallel": 2}, []
    for number, name in ((2, "shared"), (count, link)):
        with served(_SPARSE | {"index_dtype": "int8"}, **given, **several(number, name)) as server:
            answers.append(run(server, prompts, new_tokens=NEW_TOKENS, at_once=1))
            assert len(server.cache_rank_pids()) == len(cache_ranks(server)) == number
            assert server.values()[0]["sparse_rows_total"] > 0
    check(agreement(answers[1], answers[0]), f"{count} cache ranks of two processes, {link}")
