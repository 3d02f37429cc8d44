# SPDX-License-Identifier: Apache-2.0
"""An engine in a process of its own on a GPU gives the tokens of one in the same process.

On two GPUs that is all, and link ``message`` needs CUDA MPS besides. On one, where that link is
left out: start CUDA MPS, and set ``TANDEMKV_ONE_DEVICE=1``, or ``apart`` for memory as it is laid
out between two. ``TANDEMKV_TEST_DEVICE=cpu`` with ``apart`` does the same on a CPU, to rounding.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from exactness import flush, make_families, run
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

from tandemkv.cache_rank.protocol.settings.placement import lies_on_two_gpus

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.multi_gpu(2, or_one_device=True),
    pytest.mark.timeout(900),
]

_IS_APART = lies_on_two_gpus("shared", DEVICE)
_SPARSE = {"dense_tokens": 0, "exact_layers": [], "late_layers": 0}
_SPARSE |= (
    {"budget_tokens": 256} if DEVICE == "cuda" else {"budget_tokens": 64, "num_recent_tokens": 16}
)
_PLACEMENTS: dict[str, dict[str, Any]] = {
    "local": {"cache_ranks": 0},
    "shared": {"cache_ranks": 1, "transport": "shared"},
    "message": {"cache_ranks": 1, "transport": "message", "evaluation": False},
}
_LONG = 256 if DEVICE == "cuda" else 64
"""Tokens of an answer in the middle of which a process is killed."""
_INDEXES = ("native", "int8", "int4") if DEVICE == "cuda" else ("native", "int8")
_SLOW = ("sfi", "sync_kv")
"""Policies whose steps no graph holds: each kernel of theirs is launched anew, on both GPUs."""


@pytest.fixture(scope="module")
def prompts(token_ids: list[int]) -> list[list[int]]:
    return prompts_of(token_ids)


def selection_of(policy: str, index_dtype: str) -> dict[str, Any]:
    selection = {"policy": policy, **_SPARSE, "index_dtype": index_dtype}
    if policy == "streaming":
        selection["budget_tokens"] = 0
    if policy == "look_ahead":  # as one GPU predicts
        selection["predictor_dtype"] = "native"
    return selection


def skip_unless_offered(policy: str, link: str) -> None:
    if policy in _SLOW and link == "message" and DEVICE == "cuda":
        pytest.skip("by messages GPUs have captured steps alone")


@pytest.mark.parametrize(
    ("policy", "index_dtype"),
    [
        *(("look_ahead", index) for index in _INDEXES),
        ("oracle", "native"),
        ("last_query", "int8"),
        ("mean_query", "native"),
        ("async_spade", "native"),
        ("kascade", "native"),
        *((policy, "native") for policy in _SLOW),
        ("quest", "native"),
        ("streaming", "native"),
    ],
)
def test_two_processes_give_the_tokens_of_one(
    policy: str, index_dtype: str, prompts: list[list[int]], link: str
) -> None:
    skip_unless_offered(policy, link)
    alone, together, fetched = {}, {}, {}
    for name in ("local", link):
        with served(selection_of(policy, index_dtype), **_PLACEMENTS[name]) as server:
            alone[name] = run(server, prompts, new_tokens=NEW_TOKENS, at_once=1)
            engine = server.values()[0 if name == "local" else 1]
            fetched[name] = engine.get("fetched_rows_total")  # a pump has no counters of its engine
            flush(server)
            together[name] = run(server, prompts, new_tokens=NEW_TOKENS, at_once=8)
    found = agreement(alone[link], alone["local"])
    check(found, f"{policy}, {index_dtype}: two processes and one")
    # A layer that attends on the other GPU rounds otherwise; so do sums on a CPU.
    if DEVICE == "cuda" and not (_IS_APART and policy in ("kascade", *_SLOW)):
        assert not found["margins_where_first_different"]
        assert found["largest_logprob_difference"] == 0.0
    # Batches form as requests come; what is near a tie may be chosen otherwise in another batch.
    check(agreement(together[link], together["local"]), f"{policy}, eight at a time")
    if policy != "streaming":
        assert fetched["local"] > COUNT * NEW_TOKENS
    if link == "shared":
        # Counted up to an announced step, and few steps of the slow are. The overlap scheduler does
        # a step more for each answer, and those on a CPU are short.
        rel = 0.15 if policy in _SLOW else 0.05 if DEVICE == "cuda" else 0.1
        assert fetched[link] == pytest.approx(fetched["local"], rel=rel)


def test_prefixes_on_the_other_gpu_give_the_tokens_of_one_process(
    token_ids: list[int], link: str
) -> None:
    """Prompts in several chunks, and such as begin with what the radix tree has."""
    chunk = 512 if DEVICE == "cuda" else 128
    asked = make_families(token_ids, families=4, shortest=chunk, longest=5 * chunk)
    answers = {}
    for name in ("local", link):
        given = _PLACEMENTS[name] | {"chunked_prefill_size": chunk}
        with served(selection_of("look_ahead", "native"), **given) as server:
            alone = run(server, asked, new_tokens=NEW_TOKENS, at_once=1)
            values = server.values()[0]
            flush(server)
            together = run(server, asked, new_tokens=NEW_TOKENS, at_once=8)
            answers[name] = alone, together
            assert server.values()[0]["far_prefix_passes_total"] == 0
    (ours, ours_together), (theirs, theirs_together) = answers[link], answers["local"]
    found = agreement(ours, theirs)
    check(found, "chunks and radix hits, one at a time")
    assert found["cached_tokens"] > chunk
    if DEVICE == "cuda":
        assert not found["margins_where_first_different"]
        assert found["largest_logprob_difference"] == 0.0
    check(agreement(ours_together, theirs_together), "chunks and radix hits, eight at a time")
    is_copied = DEVICE == "cuda" and link == "shared" and _IS_APART
    assert (values["copied_prefix_tokens_total"] > found["cached_tokens"]) == is_copied


def test_as_served_two_processes_give_the_tokens_of_one(
    prompts: list[list[int]], link: str
) -> None:
    """A late first layer, W_q in int8, samples, and on GPUs an int4 index, as `serve` has it."""
    selection = {"policy": "look_ahead", **_SPARSE, "late_layers": 1, "predictor_dtype": "int8"}
    answers = {}
    for name in ("local", link):
        with served(selection | {"sample_tokens": 32}, **_PLACEMENTS[name]) as server:
            answers[name] = run(server, prompts, new_tokens=NEW_TOKENS, at_once=1)
            assert server.values()[0]["sparse_rows_total"] > 0
    # Samples that lie apart from the pool are attended to in an order of their own.
    check(agreement(answers[link], answers["local"]), "as served, two processes and one")


@pytest.mark.parametrize("index_dtype", _INDEXES)
def test_requests_outgrow_dense_attention_alike(
    index_dtype: str, token_ids: list[int], link: str
) -> None:
    """Steps of each kind: some complete a page before anything is selected, some after."""
    recent = 128 if index_dtype == "int4" else 64  # as many as a page has
    sizes = {
        "budget_tokens": 256,
        "resident_factor": 2.0,
        "num_recent_tokens": recent,
        "dense_tokens": 0,
    }
    selection = selection_of("look_ahead", index_dtype) | sizes | {"exact_layers": [0, 1]}
    fitting = 4 + 2 * 256 + recent  # sink, c * K, the latest tokens
    starts = [(37 * i, fitting - 70 + 9 * i) for i in range(8)]
    growing = [token_ids[start : start + length] for start, length in starts]
    answers = {}
    for name in ("local", link):
        with served(selection, **_PLACEMENTS[name]) as server:
            answers[name] = run(server, growing, new_tokens=400, at_once=1)
            values = server.values()[0]
            assert min(values["dense_rows_total"], values["sparse_rows_total"]) > 200, values
    # Layers 0 and 1 are exact: FlashInfer's rounding on one, between two GPUs ours.
    check(agreement(answers[link], answers["local"]), f"growing, {index_dtype}")


@pytest.fixture(scope="module")
def reference(prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Stock SGLang's answers, one request at a time."""
    with stock() as server:
        return run(server, prompts, new_tokens=NEW_TOKENS, at_once=1)


@pytest.mark.parametrize(
    "selection",
    [
        {"policy": "exact"},
        {"policy": "look_ahead", **COVERING, "exact_layers": [0, 1]},
        {"policy": "look_ahead", **COVERING, "exact_layers": []},
    ],
    ids=["exact", "layers 0 and 1 exact", "as served"],
)
def test_tokens_are_those_of_stock_where_everything_is_covered(
    selection: dict[str, Any], prompts: list[list[int]], reference: list[dict[str, Any]], link: str
) -> None:
    """As served: a late first layer, W_q in int8, chained kernels, samples' weights carried."""
    with served(selection, **_PLACEMENTS[link]) as server:
        alone = run(server, prompts, new_tokens=NEW_TOKENS, at_once=1)
        check(agreement(alone, reference), f"{selection}, alone")
        flush(server)
        together = run(server, prompts, new_tokens=NEW_TOKENS, at_once=8)
        check(agreement(together, reference), f"{selection}, eight at a time")


@pytest.mark.parametrize("policy", ["look_ahead", "sync_kv"])
def test_a_killed_engine_ends_no_server(policy: str, prompts: list[list[int]], link: str) -> None:
    """Waits of captured graphs end; the same process serves on once the engine is back."""
    skip_unless_offered(policy, link)
    with served(selection_of(policy, "int8"), **_PLACEMENTS[link]) as server:
        before = run(server, prompts[:4], new_tokens=NEW_TOKENS, at_once=1)
        os.kill(server.cache_rank_pid(), signal.SIGKILL)
        flush(server)
        after = run(server, prompts[:4], new_tokens=NEW_TOKENS, at_once=1)
    assert [answer["ids"] for answer in after] == [answer["ids"] for answer in before]


def test_requests_go_on_where_the_engine_was_killed(prompts: list[list[int]], link: str) -> None:
    """Alone a request gives the same tokens; of several all end, and agree as batches do."""
    longest = sorted(prompts, key=len)[-4:]
    with served(selection_of("look_ahead", "int8"), **_PLACEMENTS[link]) as server:
        for some, at_once in ((longest[-1:], 1), (longest, 4)):
            want = run(server, some, new_tokens=_LONG, at_once=at_once)
            flush(server)
            pid = server.cache_rank_pid()
            found = killed_while(server, some, pid, new_tokens=_LONG, at_once=at_once)
            if at_once == 1:
                assert found[0]["ids"] == want[0]["ids"]
            else:
                check(agreement(found, want), f"killed, {at_once} at a time")
            flush(server)
        values = server.values()[0]
    assert values["cache_rank_lost_total"] == values["pauses_total"] == 2
    # The one, and of the four those that had begun and not ended when the engine was killed.
    assert 2 <= values["restored_rows_total"] <= 5
    assert values["reseeded_rows_total"] == values["requests_failed_total"] == 0
