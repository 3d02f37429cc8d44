# SPDX-License-Identifier: Apache-2.0
"""The sparse path really runs, serves the OpenAI API, and keeps its books."""

from __future__ import annotations

import pytest
from life_cycle import after_flush, read_some, storm, wait_idle
from openai import BadRequestError, OpenAI
from rank_servers import Server
from sockets import is_loopback, listening, of_cache_rank, unix_sockets

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
    assert {"selections_total", "fetched_rows_total", "evictions_total"} <= grew
    assert {"resident_hits_total", "resident_misses_total", "selected_tokens_total"} <= grew
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


def test_openai_client(small_server: Server) -> None:
    client = OpenAI(base_url=f"{small_server.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    question = [{"role": "user", "content": "What is the capital of France?"}]
    chat = client.chat.completions.create(
        model=model, messages=question, max_tokens=12, temperature=0, logprobs=True, top_logprobs=2
    )
    assert "Paris" in (chat.choices[0].message.content or "")
    assert chat.choices[0].logprobs is not None
    stream = client.chat.completions.create(
        model=model, messages=question, max_tokens=12, temperature=0, stream=True
    )
    text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
    assert text == chat.choices[0].message.content
    done = client.completions.create(
        model=model, prompt="One, two, three,", max_tokens=12, temperature=0, stop=["five"], n=2
    )
    assert len(done.choices) == 2
    assert all("five" not in choice.text for choice in done.choices)


def test_prompt_longer_than_the_context_is_refused(small_server: Server) -> None:
    client = OpenAI(base_url=f"{small_server.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(BadRequestError):
        client.completions.create(model="smollm2", prompt=[5] * 9000, max_tokens=4)


def test_status_metrics_and_sockets(small_server: Server) -> None:
    code, text = small_server.get("/metrics")
    assert code == 200
    for name in ("tandemkv_inference_cache_rank_up", "tandemkv_cache_selections_total"):
        assert name in text
    assert of_cache_rank(small_server) == [] or all(
        is_loopback(ip) for ip, _ in of_cache_rank(small_server)
    )
    strangers = [s for s in listening(small_server) if not is_loopback(s[1])]
    assert [s for s in strangers if "sglang" not in s[0] and "python" not in s[0]] == []
    assert small_server.run_dir is not None
    known = {"control.sock", "heartbeat.sock", "inference.sock"}
    assert set(unix_sockets(small_server.run_dir)) == known


def test_hang_up_frees_the_row(small_server: Server, token_ids: list[int]) -> None:
    body = {
        "input_ids": token_ids[:300],
        "sampling_params": {"max_new_tokens": 400, "temperature": 0, "ignore_eos": True},
    }
    read_some(small_server, body, lines=3)
    assert wait_idle(small_server, 10.0) < 5.0


def test_nothing_is_left_after_a_storm(small_server: Server, token_ids: list[int]) -> None:
    outcomes = storm(small_server, token_ids, count=24, longest=400)
    assert outcomes.get("full 200", 0) > 0
    assert outcomes.get("hang up", 0) > 0
    assert not any(" 5" in outcome for outcome in outcomes), outcomes
    wait_idle(small_server, 30.0)
    left = after_flush(small_server)
    assert left["cache_slots_live"] == 0
    assert left["cache_rows_live"] == 0
    assert left["stale_reads"] == 0
