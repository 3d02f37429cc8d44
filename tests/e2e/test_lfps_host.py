# SPDX-License-Identifier: Apache-2.0
"""LFPS with the cache rank on the host's CPU beside a model on a GPU, a CPU standing for the GPU.

Memory, flags and the kernels that poll them are laid out as beside a GPU; exact layers attend where
the model is. What is left for `test_gpu_lfps` is what CUDA does: locked memory, captured steps, and
FlashInfer with what the policy has attended to.
"""

from __future__ import annotations

from typing import Any

import pytest
from exactness import check_with_hits, run
from nothing_lost import killed_while_decoding, make_prompts, pids, undisturbed, values
from random_model import SHAPE
from rank_servers import ours

from tandemkv.cache_rank.protocol.memory.one_device import HOST, ONE_DEVICE_VARIABLE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

_ENVIRON = {ONE_DEVICE_VARIABLE: HOST}
_COVERING = {"policy": "lfps", "budget_tokens": 1000, "num_recent_tokens": 16}
_REQUESTS, _NEW_TOKENS = 3, 20


@pytest.mark.usefixtures("on_random_model")
def test_tokens_equal_stock_where_the_budget_covers_all_and_few_are_attended_to_with_a_small_one(
    prompts: list[list[int]], new_tokens: int, random_reference: list[Any]
) -> None:
    with ours({"selection": _COVERING}, environ=_ENVIRON) as server:
        check_with_hits(server, prompts, random_reference, new_tokens=new_tokens)
        _, status = server.get("/tandemkv/status")
        inference, cache = server.values()
    assert "on the host's CPU" in status["inference_rank"]["info"]["placement"]
    assert min(inference["sparse_rows_total"], inference["exact_layer_rows_total"]) > 0
    assert inference["cache_rank_lost_total"] == cache["fetched_rows_total"] == 0
    assert cache["attended_by_policy_total"] > 0
    with ours({"selection": _COVERING | {"budget_tokens": 32}}, environ=_ENVIRON) as server:
        answers = run(server, prompts, new_tokens=new_tokens, at_once=2)
        _, few = server.values()
    assert all(len(answer["ids"]) == new_tokens for answer in answers)
    heads = SHAPE["num_key_value_heads"]
    assert 0 < few["attended_by_policy_total"] <= few["selections_total"] * heads * 32
    assert few["attended_by_policy_total"] < cache["attended_by_policy_total"]


def test_killed_while_requests_decode() -> None:
    prompts = make_prompts(_REQUESTS)
    settings = {"selection": _COVERING, "max_running_requests": _REQUESTS + 2}
    with ours(settings, environ=_ENVIRON) as server:
        want, before = undisturbed(server, prompts, _NEW_TOKENS), pids(server)
        grown = killed_while_decoding(server, prompts, want, pid=before[0], begin_within_s=300.0)
        assert pids(server) != before
        assert values(server)["requests_failed_total"] == 0
    # Tables are lost with the process; of a covering budget they change nothing.
    assert (grown["cache_rank_lost_total"], grown["pauses_total"]) == (1, 1)
    assert (grown["restored_rows_total"], grown["reseeded_rows_total"]) == (0, _REQUESTS)
