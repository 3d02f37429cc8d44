# SPDX-License-Identifier: Apache-2.0
"""Item *edge*: bad requests are refused at once, no request gives a 5xx, no answer is another's.

``TANDEMKV_CANARIES`` is the number of requests with a canary (10000), ``TANDEMKV_CANARIES_S`` the
longest time for them, ``TANDEMKV_FUZZ_EXAMPLES`` the examples of Schemathesis per route (200),
``TANDEMKV_FUZZ_S`` its longest time.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import edge_schema
import life_cycle
from rank_servers import Server, ours
from workbench import SMALL, Bench, Checks

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
AT_ONCE_S = 1.0
CALLERS = 32
HANG_UP_SHARE = 0.2
CANARY_SELECTION = {
    "policy": "look_ahead",
    "budget_tokens": 32,
    "resident_factor": 1.0,
    "num_recent_tokens": 16,
    "fetch_cap": 8,
}
"""Most prompts are longer than what is resident: answers come from sets that are recycled."""
ATTACKS: dict[str, tuple[str, dict[str, Any], int]] = {
    "chat with top_logprobs 100000": (
        CHAT,
        {"messages": MESSAGES, "logprobs": True, "top_logprobs": 100_000},
        400,
    ),
    "prompt [-1, 5]": (COMPLETIONS, {"prompt": [-1, 5]}, 400),
    "prompt [vocabulary size]": (COMPLETIONS, {"prompt": [49152]}, 400),
    "prompt [10**9]": (COMPLETIONS, {"prompt": [10**9]}, 400),
    "native prompt [-1, 5]": ("/generate", {"input_ids": [-1, 5]}, 400),
    "n 20000": (COMPLETIONS, {"prompt": "hi", "n": 20_000}, 400),
    "prompt of 50 MB": (COMPLETIONS, {"prompt": "hello world " * (50 * 2**20 // 12)}, 413),
    "unknown model": (COMPLETIONS, {"prompt": "hi", "model": "other"}, 404),
}


def run(bench: Bench) -> dict[str, Any]:
    """Attacks, canaries, Schemathesis: each on a server of its own."""
    found = bench.run(
        "edge", {"attacks": on_attacks, "canaries": on_canaries, "schemathesis": on_schemathesis}
    )
    checks, attacked, fuzzed = Checks(), found["attacks"], found["schemathesis"]
    for name, row in attacked["attacks"].items():
        required = f"HTTP {ATTACKS[name][2]} within {AT_ONCE_S:g} s, then ready, RSS within 20 %"
        checks.add(name, row, required, row["pass"])
    pause, worst = attacked["paused"], attacked["worst_readiness_s"]
    checks.add("paused by an administrator", pause, "[403, 503, 503, 200]", pause == PAUSED)
    checks.add("readiness while long prompts are tokenised, s", worst, "below 1", worst < 1.0)
    told = found["canaries"]
    checks.add("requests with a canary", told["sent"], told["asked_for"], is_all_sent(told))
    checks.add("answers that hold another's canary", told["foreign"], "0", not told["foreign"])
    checks.add("requests that failed", told["failed"], "0", not told["failed"])
    checks.add("ready at the end", told["ready"], "HTTP 200", told["ready"] == 200)
    penalty, fuzz = fuzzed["first_penalty_s"], fuzzed["schemathesis"]
    checks.add("first request with a penalty, s", penalty, "below 5", penalty < 5.0)
    checks.add("Schemathesis", fuzz["summary"], "no 5xx, ready after it", fuzz["pass"])
    return checks.result(attacks=attacked["attacks"], schemathesis=fuzz, canaries=told)


def on_attacks() -> dict[str, Any]:
    """Attacks, one after the other."""
    with ours({"selection": SMALL}) as server:
        return {
            "attacks": {name: attack(server, *given) for name, given in ATTACKS.items()},
            "paused": paused(server),
            "worst_readiness_s": worst_readiness(server),
        }


def on_canaries() -> dict[str, Any]:
    """Canaries on a server that recycles slots: it holds some dozens of them at once."""
    settings = {
        "selection": CANARY_SELECTION,
        "exchange": {"transport": "shared"},
        "cache": {"capacity_tokens": 6144, "poison_freed_slots": True},
        "max_context": 512,
        "max_running_requests": CALLERS,
    }
    with ours(settings) as server:
        number = int(os.environ.get("TANDEMKV_CANARIES", "10000"))
        longest_s = float(os.environ.get("TANDEMKV_CANARIES_S", "86400"))
        found = canaries(server, number, longest_s)
        inference, cache = server.values()
        found |= {"counters": {"inference_rank": inference, "cache_rank": cache}}
        return found | {"ready": server.get("/tandemkv/ready")[0]}


def on_schemathesis() -> dict[str, Any]:
    """Schemathesis, where an answer without max_tokens ends in time on a CPU."""
    with ours({"selection": SMALL, "max_context": 512}) as server:
        return {"first_penalty_s": first_penalty(server), "schemathesis": schemathesis(server)}


def is_all_sent(found: dict[str, Any]) -> bool:
    """Whether the canaries were sent that were asked for."""
    return bool(found["sent"] == found["asked_for"])


PAUSED = [403, 503, 503, 200]


def attack(server: Server, path: str, body: dict[str, Any], required: int) -> dict[str, Any]:
    """Send one bad request and see whether the server is as it was."""
    before = rss_bytes(server)
    start = time.monotonic()
    code, _ = server.post(path, body, 30.0)
    seconds = time.monotonic() - start
    ready = server.get("/tandemkv/ready")[0]
    growth = rss_bytes(server) / before
    passed = (code, ready) == (required, 200) and seconds < AT_ONCE_S and growth < 1.2
    return {"code": code, "seconds": round(seconds, 3), "rss": round(growth, 3), "pass": passed}


def rss_bytes(server: Server) -> int:
    """Resident memory of all processes."""
    return sum(process.memory_info().rss for process in server.processes())


def paused(server: Server) -> list[int]:
    """Pause without the key, with it, ask for readiness and an answer, continue."""
    stranger = Server(server.url, server.pid, server.log)
    found = [stranger.post("/pause_generation", {})[0]]
    server.post("/pause_generation", {})
    found += [server.get("/tandemkv/ready")[0], server.post(COMPLETIONS, {"prompt": "hi"}, 5.0)[0]]
    server.post("/continue_generation", {})
    return [*found, server.get("/tandemkv/ready")[0]]


def worst_readiness(server: Server) -> float:
    """Return the longest time that readiness took beside eight prompts of the longest kind."""
    text = ("hello world " * 11_000)[:130_000]
    longest = 0.0
    with ThreadPoolExecutor(8) as pool:
        bodies = (
            (COMPLETIONS, {"prompt": text}),
            (CHAT, {"messages": [{"role": "user", "content": text}]}),
        )
        pending = [pool.submit(server.post, *bodies[index % 2]) for index in range(8)]
        while not all(item.done() for item in pending):
            start = time.monotonic()
            server.get("/tandemkv/ready")
            longest = max(longest, time.monotonic() - start)
    return round(longest, 3)


def first_penalty(server: Server) -> float:
    """Return how long the first request with a penalty takes; SGLang would compile for it."""
    body = {"prompt": "hi", "max_tokens": 4, "repetition_penalty": 1.1, "frequency_penalty": 0.5}
    start = time.monotonic()
    code, found = server.post(COMPLETIONS, body, 300.0)
    assert code == 200, found
    return round(time.monotonic() - start, 2)


def schemathesis(server: Server) -> dict[str, Any]:
    """Run Schemathesis over the routes that are served, by SGLang's models of their bodies."""
    schema = edge_schema.schema()
    examples = os.environ.get("TANDEMKV_FUZZ_EXAMPLES", "200")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "openapi.json"
        file.write_text(json.dumps(schema))
        done = subprocess.run(
            [
                *(str(Path(sys.executable).with_name("schemathesis")), "run", str(file)),
                *("--url", server.url, "--checks", "not_a_server_error", "--seed", "1"),
                *("--max-examples", examples, "--mode", "all", "--request-timeout", "60"),
                *("--phases", "examples,coverage,fuzzing", "--no-color"),
                *("--suppress-health-check", "all", "--generation-database", "none"),
                *("--continue-on-failure", "--max-time", os.environ.get("TANDEMKV_FUZZ_S", "1800")),
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=3600,
            cwd=folder,
        )
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    generated = next((line for line in lines if " generated, " in line), done.stderr[-300:])
    return {
        "routes": sorted(schema["paths"]),
        "examples_per_route": int(examples),
        "summary": generated,
        "failures": lines[-60:] if done.returncode else [],
        "pass": done.returncode == 0 and server.get("/tandemkv/ready")[0] == 200,
    }


def canaries(server: Server, number: int, longest_s: float) -> dict[str, Any]:
    """Send requests that each hold a word of their own; look for it in every other answer.

    One in five hangs up in mid-stream, so that its rows and slots are another's at once.
    """
    end = time.monotonic() + longest_s
    start = time.monotonic()

    def one(index: int) -> tuple[int, str, str] | None:
        if time.monotonic() > end:
            return None
        rng = random.Random(index)
        word = canary(index)
        filler = "The quick brown fox jumps over the lazy dog. " * rng.randrange(5)
        prompt = f"{filler}Code {word}. Code {word}. Code"
        body = {"prompt": prompt, "max_tokens": rng.randrange(10, 13), "temperature": 0}
        if rng.random() < HANG_UP_SHARE:
            lines = rng.randrange(6)
            life_cycle.read_some(server, body, lines=lines, path=COMPLETIONS)
            return index, "hung up", ""
        code, found = server.post(COMPLETIONS, body, 300.0)
        return index, str(code), found["choices"][0]["text"] if code == 200 else str(found)[:200]

    with ThreadPoolExecutor(CALLERS) as pool:
        rows = [row for row in pool.map(one, range(number)) if row is not None]
    good = [(index, text) for index, outcome, text in rows if outcome == "200"]
    hung_up = sum(outcome == "hung up" for _, outcome, _ in rows)
    # What an answer says beside its own word must be nobody's word.
    words = {canary(index) for index, _, _ in rows}
    foreign = [
        index
        for index, text in good
        if (set(re.findall(r"[0-9]{9}", text)) - {canary(index)}) & words
    ]
    return {
        "asked_for": number,
        "sent": len(rows),
        "at_once": CALLERS,
        "seconds": round(time.monotonic() - start, 1),
        "hung_up_in_mid_stream": hung_up,
        "answers_with_their_own": sum(canary(index) in text for index, text in good),
        "foreign": len(foreign),
        "failed": len(rows) - len(good) - hung_up,
    }


def canary(index: int) -> str:
    """Return the word of one request: digits, which a small model repeats without a mistake."""
    return f"{random.Random(f'canary-{index}').randrange(10**9):09d}"
