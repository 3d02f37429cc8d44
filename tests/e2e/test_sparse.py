# SPDX-License-Identifier: Apache-2.0
"""The sparse path really runs, serves the OpenAI API, and keeps its books."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from bad_input import too_long
from life_cycle import after_flush, kill_client, steps_after_abort, storm, wait_idle
from mapped_memory import resident_mismatches
from outside import OPENAI_CHECKS, connect
from rank_servers import Server
from sockets import listening, purpose

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_selection_deltas_and_evictions(small_server: Server, token_ids: list[int]) -> None:
    before, cache_before = small_server.values()
    found = small_server.generate(
        input_ids=token_ids[:800],
        sampling_params={"max_new_tokens": 24, "temperature": 0, "ignore_eos": True},
    )
    assert found["meta_info"]["completion_tokens"] == 24
    after, cache_after = small_server.values()
    grew = {k for k in cache_after if cache_after[k] > cache_before.get(k, 0)}
    assert {"selections_total", "fetched_rows_total", "steps_total"} <= grew
    assert {"resident_hits_total", "resident_misses_total"} <= grew
    attended = after["attended_tokens_total"] - before["attended_tokens_total"]
    context = after["context_tokens_total"] - before["context_tokens_total"]
    assert attended < context / 4
    assert after["resident_bytes"] == before["resident_bytes"]


def test_forced_tokens_are_decoded(small_server: Server, token_ids: list[int]) -> None:
    forced = token_ids[500:516]
    found = small_server.generate(
        input_ids=token_ids[:500],
        return_logprob=True,
        sampling_params={
            "max_new_tokens": 16,
            "temperature": 0,
            "ignore_eos": True,
            "custom_params": {"forced_token_ids": forced},
        },
    )
    pairs = found["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in pairs] == forced
    assert all(logprob <= 0 for logprob, _, _ in pairs)


@pytest.mark.parametrize("name", OPENAI_CHECKS)
def test_openai_client(small_server: Server, name: str) -> None:
    assert OPENAI_CHECKS[name](*connect(small_server))


def test_prompts_longer_than_the_context(small_server: Server, token_ids: list[int]) -> None:
    for name, found in too_long(small_server, token_ids).items():
        assert found["pass"], f"{name}: {found}"


def test_metrics(small_server: Server) -> None:
    code, text = small_server.get("/metrics")
    assert code == 200
    for name in ("tandemkv_inference_cache_rank_up", "tandemkv_cache_selections_total"):
        assert name in text


def test_every_listening_socket_is_local_and_known(small_server: Server) -> None:
    found = listening(small_server)
    processes = {listener.process for listener in found}
    assert {"SGLang", "SGLang scheduler", "cache rank"} <= processes
    assert [x for x in found if not x.is_local] == []
    assert [x for x in found if purpose(x, small_server) is None] == []


def test_killed_client_frees_the_row(small_server: Server, token_ids: list[int]) -> None:
    body = {
        "input_ids": token_ids[:300],
        "sampling_params": {"max_new_tokens": 400, "temperature": 0, "ignore_eos": True},
    }
    assert kill_client(small_server, body, lines=3) < 5.0
    assert steps_after_abort(small_server, body) <= 2


def test_a_client_that_leaves_ends_no_request_whose_id_begins_alike(
    small_server: Server, token_ids: list[int]
) -> None:
    sampling = {"max_new_tokens": 150, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": token_ids[:300], "sampling_params": sampling}
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(small_server.generate, rid="job-10", **body)
        kill_client(small_server, {**body, "rid": "job-1"}, lines=3)
        assert other.result()["meta_info"]["finish_reason"]["type"] == "length"


def test_nothing_is_left_after_a_storm(small_server: Server, token_ids: list[int]) -> None:
    mapped = small_server.values()[0]["mapped_bytes"]
    outcomes = storm(small_server, token_ids, count=24, longest=400)
    assert outcomes.get("full 200", 0) > 0
    assert outcomes.get("hang up", 0) > 0
    assert not any(" 5" in outcome for outcome in outcomes), outcomes
    wait_idle(small_server, 30.0)
    left = after_flush(small_server)
    assert left["slots_used"] == 0
    assert left["request_rows"] == 0
    assert left["mapped_bytes"] == mapped


def test_resident_sets_are_copies_of_the_pool(small_server: Server, token_ids: list[int]) -> None:
    """After all of the above, which has used rows and slots again and again."""
    found = resident_mismatches(small_server, token_ids[100:900], num_resident=4 + 96)
    assert found == {"compared": 28 * 3 * 100, "mismatches": 0}
