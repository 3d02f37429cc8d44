# SPDX-License-Identifier: Apache-2.0
"""Kill the cache rank in mid-stream: nothing hangs, nobody is lied to, service comes back."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from rank_servers import Server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_kill_in_mid_stream(small_server: Server, token_ids: list[int]) -> None:
    body = {
        "input_ids": token_ids[:400],
        "sampling_params": {"max_new_tokens": 600, "temperature": 0, "ignore_eos": True},
    }
    before = small_server.generate(
        input_ids=token_ids[:60], sampling_params={"max_new_tokens": 8, "temperature": 0}
    )
    with ThreadPoolExecutor(2) as pool:
        pending = [pool.submit(small_server.post, "/generate", body) for _ in range(2)]
        while small_server.values()[0]["request_rows"] < 2:
            time.sleep(0.2)
        time.sleep(1.0)
        os.kill(small_server.cache_rank_pid(), signal.SIGKILL)
        killed = time.monotonic()
        answers = [p.result(timeout=60) for p in pending]
        took = time.monotonic() - killed
    assert took < 5.0, f"requests ended {took:.1f} s after the kill"
    for code, text in answers:
        assert code == 503, (code, text)
        assert "cache rank" in str(text)
    was_unready = False
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        code, _ = small_server.get("/tandemkv/ready")
        was_unready |= code == 503
        if code == 200:
            break
        time.sleep(0.1)
    assert was_unready
    again = small_server.generate(
        input_ids=token_ids[:60], sampling_params={"max_new_tokens": 8, "temperature": 0}
    )
    assert again["text"] == before["text"]
    assert small_server.values()[0]["cache_rank_lost_total"] >= 1
