# SPDX-License-Identifier: Apache-2.0
"""Random requests, aborts and disconnects; then both processes' books must agree."""

from __future__ import annotations

import http.client
import json
import random
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rank_servers import Server


def storm(
    server: Server, ids: list[int], *, count: int, longest: int, seed: int = 3
) -> dict[str, int]:
    """Send `count` requests, eight at a time; a third is aborted, a third hangs up mid-stream."""
    plans = []
    rng = random.Random(seed)
    for i in range(count):
        length = int(10 ** rng.uniform(0.7, len(str(longest)) - 1 + 0.3)) % longest + 5
        start = rng.randrange(len(ids) - length)
        plans.append(
            (i, ids[start : start + length], rng.choice(["full", "abort", "hang up"]), rng.random())
        )
    results: dict[str, int] = {}

    def one(plan: tuple[int, list[int], str, float]) -> str:
        number, prompt, kind, share = plan
        body: dict[str, Any] = {
            "rid": f"storm-{number}",
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True},
        }
        if kind == "full":
            code, _ = server.post("/generate", body)
            return f"full {code}"
        if kind == "hang up":
            read_some(server, body, lines=1 + int(share * 10))
            return kind
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(server.post, "/generate", body)
            time.sleep(share * 2)
            server.post("/abort_request", {"rid": body["rid"]})
            code, _ = pending.result()
        return f"abort {code}"

    with ThreadPoolExecutor(8) as pool:
        for outcome in pool.map(one, plans):
            results[outcome] = results.get(outcome, 0) + 1
    return results


def read_some(server: Server, body: dict[str, Any], *, lines: int) -> None:
    """Stream a request and close the connection after some events."""
    address = urllib.parse.urlsplit(server.url)
    assert address.hostname is not None
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=300)
    connection.request(
        "POST",
        "/generate",
        json.dumps(body | {"stream": True}),
        {"content-type": "application/json"},
    )
    reply = connection.getresponse()
    seen = 0
    while seen < lines:
        line = reply.readline()
        if not line:
            break
        seen += line.startswith(b"data:")
    if connection.sock is not None:
        connection.sock.close()
    connection.close()


def books(server: Server) -> dict[str, float]:
    """What each side believes to hold: slots, rows."""
    inference, cache = server.values()
    code, info = server.get("/get_server_info")
    assert code == 200
    del inference
    return {
        "cache_slots_live": cache["slots_live"],
        "cache_rows_live": cache["rows_live"],
        "stale_reads": cache["stale_reads_total"],
        "sglang_capacity": info.get("max_total_num_tokens", 0),
    }


def wait_idle(server: Server, timeout_s: float) -> float:
    """Seconds until no row is occupied on the cache rank."""
    start = time.monotonic()
    while time.monotonic() - start < timeout_s:
        if server.values()[1]["rows_live"] == 0:
            return time.monotonic() - start
        time.sleep(0.1)
    raise AssertionError(f"rows still live after {timeout_s} s: {server.values()[1]}")


def after_flush(server: Server) -> dict[str, float]:
    """Books after a flush: nothing may be left. Retries while SGLang still drains."""
    for _ in range(20):
        code, _ = server.post("/flush_cache", {})
        if code == 200:
            break
        time.sleep(0.5)
    time.sleep(1.0)
    return books(server)
