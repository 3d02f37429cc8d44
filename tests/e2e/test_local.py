# SPDX-License-Identifier: Apache-2.0
"""``--cache-ranks 0``: the cache rank inside SGLang's process, on the serving path."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from exactness import compare, flush, run
from rank_servers import Server, ours
from sockets import listening, purpose

from tandemkv.cache_rank.protocol.memory.one_device import APART, ONE_DEVICE_VARIABLE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.usefixtures("deep_model")]
_SMALL = {
    "policy": "look_ahead",
    "budget_tokens": 96,
    "resident_factor": 1.0,
    "num_recent_tokens": 16,
    "fetch_cap": 8,
    "exact_layers": [],
    "late_layers": 1,
    "sample_tokens": 16,
    "dense_tokens": 116,
}
"""A resident set much smaller than the prompts; as dense as where the pool lies elsewhere."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param({}, id="look_ahead"),
        *(
            # In CI `test_policy_runs` does so with SGLang's ModelRunner.
            pytest.param(selection, id=name, marks=pytest.mark.slow)
            for name, selection in {
                "late_layers": {"exact_layers": [], "late_layers": 2},
                "kascade": {"policy": "kascade", "anchors": [0, 4, 8]},
                "shared_async_spade": {
                    "policy": "async_spade",
                    "share_layers": True,
                    "anchors": [1, 4, 8],
                },
            }.items()
        ),
    ],
)
def covering(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Everything is selected, nothing skipped; int8, so that the index is kept as well."""
    selection = {
        "policy": "look_ahead",
        "budget_tokens": 600,
        "resident_factor": 2.0,
        "num_recent_tokens": 32,
        "dense_while_fits": False,
        "index_dtype": "int8",
        "exact_layers": [0],
        **request.param,
    }
    with ours({"cache_ranks": 0, "selection": selection}) as server:
        yield server


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    with ours({"cache_ranks": 0, "selection": _SMALL, "evaluation": True}) as server:
        yield server


def test_tokens_equal_stock(
    covering: Server, prompts: list[list[int]], new_tokens: int, deep_reference: list[Any]
) -> None:
    few = slice(1, None, 2)
    alone = compare(
        run(covering, prompts[few], new_tokens=new_tokens, at_once=1), deep_reference[few]
    )
    assert alone["pass"], alone
    warm = compare(run(covering, prompts, new_tokens=new_tokens, at_once=4), deep_reference)
    assert warm["pass"], f"with radix hits, four at a time: {warm}"
    flush(covering)
    cold = compare(run(covering, prompts, new_tokens=new_tokens, at_once=4), deep_reference)
    assert cold["pass"], f"after a flush, four at a time: {cold}"
    inference, cache = covering.values()
    assert cache == {}
    assert inference["sparse_rows_total"] > 0
    assert inference["seeded_rows_total"] > 0


def test_attends_to_a_bounded_set(small: Server, token_ids: list[int]) -> None:
    before, _ = small.values()
    found = small.generate(
        input_ids=token_ids[:800],
        sampling_params={"max_new_tokens": 24, "temperature": 0, "ignore_eos": True},
    )
    assert found["meta_info"]["completion_tokens"] == 24
    after, _ = small.values()
    attended = after["attended_tokens_total"] - before["attended_tokens_total"]
    steps = after["decode_steps_total"] - before["decode_steps_total"]
    assert attended == steps * (4 + 96 + 16 + 16)
    assert after["fetched_rows_total"] > before["fetched_rows_total"]


def test_sets_apart_from_the_pool_give_the_same_answers(
    small: Server, prompts: list[list[int]], token_ids: list[int], new_tokens: int
) -> None:
    """Of link ``shared``, laid out for two GPUs, queries predicted by the model's own weights.

    One text outgrows dense attention while it is decoded, one stays dense, two are seeded.
    """
    texts = [token_ids[60:168], prompts[0], *prompts[-2:]]
    flush(small)
    before, _ = small.values()
    want = run(small, texts, new_tokens=new_tokens, at_once=1)
    after, _ = small.values()
    apart = {
        "cache_ranks": 1,
        "transport": "shared",
        "selection": {**_SMALL, "predictor_dtype": "native"},
    }
    with ours(apart, environ={ONE_DEVICE_VARIABLE: APART}) as server:
        found = compare(run(server, texts, new_tokens=new_tokens, at_once=1), want)
        values, cache = server.values()
    assert found["pass"], found
    rows = ("sparse_rows_total", "dense_rows_total")
    more = {name: values[name] - (after[name] - before[name]) for name in rows}
    # Passes overlap there, so one more of each text was under way when that ended.
    assert more == {"sparse_rows_total": 3, "dense_rows_total": 1}
    assert min(after[name] - before[name] for name in rows) > 0
    assert cache["fetched_rows_total"] > 0


def test_start_was_measured(small: Server) -> None:
    """The status and what `serve` printed show it; on a CPU nothing is hidden, or raised."""
    _, status = small.get("/tandemkv/status")
    values, info = status["inference_rank"]["values"], status["inference_rank"]["info"]
    assert values["plan_scan_us"] + values["plan_transfer_us"] > 0
    assert values["plan_exposed_us"] == values["plan_scan_us"] + values["plan_transfer_us"]
    assert values["plan_layer_us"] > 0
    assert values["plan_refresh_steps"] == 1
    assert info["plan_load"].startswith("6 x ")
    assert info["plan_placement"] == "CPU"
    deadline = time.monotonic() + 20
    while "measured at start" not in small.log.read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "measured at start" in small.log.read_text()


def test_only_the_http_port_listens_on_tcp(small: Server) -> None:
    """SGLang's own groups of one process have no socket; the others are Unix sockets."""
    found = listening(small)
    networked = [listener for listener in found if listener.kind != "unix"]
    assert [(x.process, x.port) for x in networked] == [("SGLang", int(small.url.split(":")[-1]))]
    assert [x for x in found if purpose(x, small) is None] == []


def test_a_request_grows_out_of_dense_attention(small: Server, token_ids: list[int]) -> None:
    """Dense at first; the loss of its later tokens stays that of a sparse one."""
    before, _ = small.values()
    forced = token_ids[60:160]
    found = small.generate(
        input_ids=token_ids[:60],
        return_logprob=True,
        sampling_params={
            "max_new_tokens": len(forced),
            "temperature": 0,
            "ignore_eos": True,
            "custom_params": {"forced_token_ids": forced},
        },
    )
    after, _ = small.values()
    assert after["dense_rows_total"] > before["dense_rows_total"]
    assert after["sparse_rows_total"] > before["sparse_rows_total"]
    pairs = found["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in pairs] == forced
    dense, sparse = pairs[: 116 - 60], pairs[116 - 60 :]
    mean = [sum(p for p, _, _ in part) / len(part) for part in (dense, sparse)]
    assert mean[1] > mean[0] - 1.0, mean


@pytest.mark.slow  # in CI test_requests, with the backend and the engine and no model
def test_dense_up_to_a_length_or_while_there_is_little_else(
    prompts: list[list[int]], new_tokens: int, deep_reference: list[Any]
) -> None:
    """A request alone is attended to as a whole, two long ones at once are selected for."""
    selection = {
        "policy": "look_ahead",
        "budget_tokens": 96,
        "resident_factor": 1.0,
        "num_recent_tokens": 16,
        "exact_layers": [],
        "dense_tokens": 200,
        "dense_batch_tokens": 720,
    }
    with ours({"cache_ranks": 0, "selection": selection}) as server:
        found = compare(
            run(server, prompts[1:], new_tokens=new_tokens, at_once=1), deep_reference[1:]
        )
        assert found["pass"], found
        before, _ = server.values()
        longest = sorted(prompts, key=len)[-2:]
        assert 720 < sum(map(len, longest)) < 2 * 720
        run(server, longest, new_tokens=90, at_once=2)
        after, _ = server.values()
        assert before["sparse_rows_total"] == 0
        assert after["sparse_rows_total"] > 0
        assert after["fetched_rows_total"] > before["fetched_rows_total"]
        again = compare(
            run(server, prompts[-2:], new_tokens=new_tokens, at_once=1), deep_reference[-2:]
        )
        assert again["pass"], again
