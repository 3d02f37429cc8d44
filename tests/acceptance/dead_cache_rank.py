# SPDX-License-Identifier: Apache-2.0
"""Item *dead_cache_rank*: kill -9 while requests decode, prefill and wait."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rank_servers import Server, ours
from workbench import SMALL, Bench, Checks, long_ids

LIMIT_S = 5.0


def run(_bench: Bench) -> dict[str, Any]:
    """Once in mid-decode, once in mid-prefill; before and after, the same cached prompt."""
    ids, checks, rows = long_ids(), Checks(), {}
    probe = {
        "input_ids": ids[:600],
        "sampling_params": {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True},
    }
    with ours({"selection": SMALL}) as server:
        before = server.generate(**probe)["output_ids"]
        for phase, length in (("decode", 500), ("prefill", 6000)):
            rows[phase] = found = kill(server, ids[:length], is_decoding=phase == "decode")
            after = server.generate(**probe)["output_ids"]
            checks.add(
                f"{phase}: seconds until the last request ended",
                found["seconds_to_last_error"],
                f"< {LIMIT_S:g}",
                found["seconds_to_last_error"] < LIMIT_S,
            )
            checks.add(
                f"{phase}: answers",
                found["codes"],
                "503 with the reason",
                set(found["codes"]) == {503} and found["says_why"],
            )
            checks.add(f"{phase}: unready meanwhile", found["unready"], "true", found["unready"])
            checks.add(f"{phase}: same tokens afterwards", after == before, "true", after == before)
        inference = server.values()[0]
    lost = inference["cache_rank_lost_total"]
    checks.add("losses counted", lost, "2", lost == 2)
    return checks.result(rows=rows)


def kill(server: Server, prompt: list[int], *, is_decoding: bool) -> dict[str, Any]:
    """Kill the cache rank under eight requests, of which six can run; wait until it is back."""
    body = {"sampling_params": {"max_new_tokens": 1500, "temperature": 0, "ignore_eos": True}}
    ends: list[float] = []

    def note(_: Future[Any]) -> None:
        ends.append(time.monotonic())

    with ThreadPoolExecutor(8) as pool:
        pending = []
        for i in range(8):  # unlike first tokens: no radix hits among them
            own = body | {"input_ids": [100 + i, *prompt]}
            pending.append(pool.submit(server.post, "/generate", own))
            pending[-1].add_done_callback(note)
        steps = server.values()[0]["decode_steps_total"]
        if is_decoding:
            while server.values()[0]["decode_steps_total"] < steps + 10:
                time.sleep(0.05)
        else:
            time.sleep(3.0)
        os.kill(server.cache_rank_pid(), signal.SIGKILL)
        start = time.monotonic()
        unready = False
        while time.monotonic() < start + 180.0:
            code, _ = server.get("/tandemkv/ready")
            if code == 200 and unready:
                break
            unready |= code == 503
            time.sleep(0.05)
        back_s = time.monotonic() - start
        answers = [p.result() for p in pending]
    return {
        "codes": [code for code, _ in answers],
        "says_why": all("cache rank" in str(text) for _, text in answers),
        "example": str(answers[0][1])[:300],
        "seconds_to_last_error": max(ends) - start,
        "unready": unready,
        "seconds_to_ready_again": back_s,
    }
