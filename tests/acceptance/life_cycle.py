# SPDX-License-Identifier: Apache-2.0
"""Random requests, aborts and disconnects; then nothing may be left. And crashes of processes."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import subprocess
import sys
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rank_servers import Server

from tandemkv.server.soak.processes import ServerProcesses

_STREAM = """
import sys, urllib.request
request = urllib.request.Request(
    sys.argv[1], sys.stdin.buffer.read(), {"content-type": "application/json"}
)
with urllib.request.urlopen(request) as reply:
    for line in reply:
        print(line.decode(), end="", flush=True)
"""
_IDLE_METRICS_S = 45.0  # SGLang refreshes its gauges every 30 s while idle
_READY_AGAIN_S = 60.0


def storm(
    server: Server, ids: list[int], *, count: int, longest: int, seed: int = 3
) -> dict[str, int]:
    """Send `count` requests, eight at a time; a third is aborted, a third hangs up mid-stream."""
    plans = []
    rng = random.Random(seed)
    for i in range(count):
        length = round(5 * (longest / 5) ** rng.random())
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
            read_some(server, body, lines=int(share * 10))
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


def read_some(server: Server, body: dict[str, Any], *, lines: int, path: str = "/generate") -> None:
    """Stream a request and close the connection after some events, even before the first."""
    address = urllib.parse.urlsplit(server.url)
    assert address.hostname is not None
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=300)
    connection.request(
        "POST",
        path,
        json.dumps(body | {"stream": True}),
        {"content-type": "application/json"},
    )
    if lines:
        reply = connection.getresponse()
        seen = 0
        while seen < lines:
            line = reply.readline()
            if not line:
                break
            seen += line.startswith(b"data:")
    else:
        time.sleep(0.2)
    if connection.sock is not None:
        connection.sock.close()
    connection.close()


def kill_client(server: Server, body: dict[str, Any], *, lines: int) -> float:
    """Stream from a process of its own, kill -9 it, and return seconds until its row is free."""
    argv = [sys.executable, "-I", "-c", _STREAM, f"{server.url}/generate"]
    client = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(json.dumps(body | {"stream": True}).encode())
    client.stdin.close()
    seen = 0
    while seen < lines:
        line = client.stdout.readline()
        assert line, "the stream ended before the client could be killed"
        seen += line.startswith(b"data:")
    assert server.values()[0]["request_rows"] > 0
    client.kill()
    client.wait()
    return wait_idle(server, 60.0)


def steps_after_abort(server: Server, body: dict[str, Any]) -> float:
    """Decode steps that a lone request still takes once SGLang was told to abort it."""
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(server.post, "/generate", body | {"rid": "to-abort"})
        before = server.values()[0]["decode_steps_total"]
        while server.values()[0]["decode_steps_total"] < before + 5:
            time.sleep(0.05)
        start = server.values()[0]["decode_steps_total"]
        server.post("/abort_request", {"rid": "to-abort"})
        pending.result()
    wait_idle(server, 30.0)
    return server.values()[0]["decode_steps_total"] - start


def books(server: Server) -> dict[str, float]:
    """What requests and the radix cache hold now, and how much memory both ranks map."""
    inference = server.values()[0]
    return {name: inference[name] for name in ("request_rows", "slots_used", "mapped_bytes")}


def sglang_used_tokens(server: Server) -> float:
    """Tokens that SGLang's allocator has given out, those of the radix cache included."""
    code, text = server.get("/metrics")
    assert code == 200
    found = dict(re.findall(r"^sglang:(\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE))
    return float(found["max_total_num_tokens"]) - float(found["kv_available_tokens"])


def agreed_books(server: Server) -> dict[str, float]:
    """Our status and SGLang's gauges, once these have caught up with an idle server."""
    deadline = time.monotonic() + _IDLE_METRICS_S
    while True:
        found = books(server) | {"sglang_used_tokens": sglang_used_tokens(server)}
        is_same = found["sglang_used_tokens"] == found["slots_used"]
        if is_same or time.monotonic() > deadline:
            return found
        time.sleep(1.0)


def wait_idle(server: Server, timeout_s: float) -> float:
    """Seconds until no request holds a row."""
    start = time.monotonic()
    while time.monotonic() - start < timeout_s:
        if server.values()[0]["request_rows"] == 0:
            return time.monotonic() - start
        time.sleep(0.1)
    raise AssertionError(f"rows still held after {timeout_s} s: {server.values()[0]}")


def after_flush(server: Server) -> dict[str, float]:
    """Books after a flush: nothing may be left. Retries while SGLang still drains."""
    for _ in range(20):
        code, _ = server.post("/flush_cache", {})
        if code == 200:
            break
        time.sleep(0.5)
    time.sleep(1.0)
    return books(server)


def ready_after_crash(server: Server, role: str) -> float:
    """Kill the process of `role`; seconds until another one serves, which a minute is enough for.

    A minute, where at most two processes a core want to run; as much longer as more do.
    """
    processes = ServerProcesses(server.pid, server.run_dir)
    killed = processes.pids()[role]
    os.kill(killed, 9)
    begun = time.monotonic()
    while True:
        waited = time.monotonic() - begun
        busy = os.getloadavg()[0] / (2 * (os.cpu_count() or 1))
        assert waited < _READY_AGAIN_S * max(1.0, busy), server.log.read_text()
        is_another = processes.pids().get(role, killed) != killed
        if is_another and _is_ready(server) and _complete(server) == 200:
            return waited
        time.sleep(0.2)


def _is_ready(server: Server) -> bool:
    with contextlib.suppress(OSError):
        return bool(server.get("/tandemkv/ready", 5.0)[0] == 200)
    return False


def _complete(server: Server) -> int:
    body = {"prompt": "The capital of France is", "max_tokens": 2, "temperature": 0}
    return server.post("/v1/completions", body, 60.0)[0]
