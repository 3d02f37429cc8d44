# SPDX-License-Identifier: Apache-2.0
"""Item *edge*: bad requests are refused at once, no request gives a 5xx, no answer is another's.

``TANDEMKV_FUZZ_EXAMPLES`` the examples of Schemathesis per route (200),
``TANDEMKV_FUZZ_S`` its longest time.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import canaries
import edge_schema
from rank_servers import Server, ours
from workbench import SMALL, Bench, Checks

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
AT_ONCE_S = 1.0
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
        "edge", {"attacks": on_attacks, "canaries": canaries.run, "schemathesis": on_schemathesis}
    )
    checks, attacked, fuzzed = Checks(), found["attacks"], found["schemathesis"]
    for name, row in attacked["attacks"].items():
        required = f"HTTP {ATTACKS[name][2]} within {AT_ONCE_S:g} s, then ready, RSS within 20 %"
        checks.add(name, row, required, row["pass"])
    pause, worst = attacked["paused"], attacked["worst_readiness_s"]
    checks.add("paused by an administrator", pause, "[403, 503, 503, 200]", pause == PAUSED)
    checks.add("readiness while long prompts are tokenised, s", worst, "below 1", worst < 1.0)
    told = found["canaries"]
    checks.add(
        "requests with a canary", told["sent"], told["asked_for"], canaries.is_all_sent(told)
    )
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


def on_schemathesis() -> dict[str, Any]:
    """Schemathesis, where an answer without max_tokens ends in time on a CPU."""
    with ours({"selection": SMALL, "max_context": 256}) as server:
        return {"first_penalty_s": first_penalty(server), "schemathesis": schemathesis(server)}


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


def schemathesis_program() -> str:
    """Return the program of this environment, or the one in PATH."""
    here = str(Path(sys.executable).parent)
    found = shutil.which("schemathesis", path=f"{here}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        raise RuntimeError("no schemathesis: pip install 'schemathesis>=4'")
    return found


def schemathesis(server: Server) -> dict[str, Any]:
    """Run Schemathesis over the routes that are served, by SGLang's models of their bodies."""
    schema = edge_schema.schema()
    examples = os.environ.get("TANDEMKV_FUZZ_EXAMPLES", "200")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "openapi.json"
        file.write_text(json.dumps(schema))
        done = subprocess.run(
            [
                *(schemathesis_program(), "run", str(file)),
                *("--url", server.url, "--checks", "not_a_server_error", "--seed", "1"),
                *("--max-examples", examples, "--mode", "all", "--request-timeout", "180"),
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
