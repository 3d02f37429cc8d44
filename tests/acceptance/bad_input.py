# SPDX-License-Identifier: Apache-2.0
"""Item *bad_input*: one clear error at the earliest moment, and nothing lost."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import life_cycle
from rank_servers import Server, environment, model_dir, ours
from workbench import SMALL, Bench, Checks, long_ids

EARLY_S = 15.0
"""Loading SGLang takes longer. Asked here, where figures are made; CI's machine may stall, and
there `is_clear` says by itself that nothing was started before."""

_WATCHED = """
import runpy, sys
words = ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec", "os.system")
started = []
sys.addaudithook(lambda event, args: started.append(event) if event in words else None)
try:
    runpy.run_module("tandemkv.server", run_name="__main__", alter_sys=True)
finally:
    started += ["sglang"] if "sglang" in sys.modules else []
    print("started:", *started, file=sys.stderr)
"""
"""Runs the command line and says at its end which processes it started and whether it loaded
SGLang: early is what comes before both, however slow the machine."""

FLAGS: dict[str, tuple[list[str], str]] = {
    "budget below sink + recent": (["--budget-tokens", "20"], "budget_tokens"),
    "unknown policy": (["--policy", "clairvoyant"], "clairvoyant"),
    "layer that does not exist": (["--exact-layers", "0,99"], "exact_layers"),
    "more cache ranks than KV heads": (["--cache-ranks", "4"], "cache_ranks"),
    "speculative decoding": (["--", "--speculative-algorithm", "EAGLE"], "speculative"),
    "host open to others": (["--host", "10.0.0.1"], "allow-remote"),
    "context longer than the model's": (
        ["--max-context", "100000", "--cache-tokens", "100000"],
        "max_position_embeddings",
    ),
    "unknown flag": (["--budget-token-s", "512"], "--budget-token-s"),
}
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "model with MLA": (
        {"architectures": ["DeepseekV2ForCausalLM"], "kv_lora_rank": 512},
        "DeepseekV2ForCausalLM",
    ),
    "model with sliding window": (
        {"use_sliding_window": True, "sliding_window": 512},
        "sliding-window",
    ),
    "hybrid model": ({"layer_types": ["full_attention", "linear_attention"]}, "full"),
}


def run(_bench: Bench) -> dict[str, Any]:
    """All cases on the command line, then the prompts on a running server."""
    checks, rows = Checks(), {}
    with tempfile.TemporaryDirectory() as folder:
        commands = {name: ([model_dir(), *args], word) for name, (args, word) in FLAGS.items()}
        for name, (change, word) in MODELS.items():
            path = Path(folder) / name.replace(" ", "_")
            commands[name] = ([str(unsupported_model(path, change))], word)
        commands["no such model"] = ([f"{folder}/nothing"], "nothing")
        with socket.socket() as taken:
            port = occupy(taken)
            commands["port in use"] = ([model_dir(), "--port", str(port)], str(port))
            for name, (args, word) in commands.items():
                rows[name] = found = serve(args)
                is_early = is_clear(found, word) and found["seconds"] < EARLY_S
                checks.add(name, _short(found), f"early error that names {word}", is_early)
        for name, variables in (
            ("SGLang alone, no cache rank named", {}),
            ("SGLang alone, cache rank not started", {"TANDEMKV_RUN_DIR": f"{folder}/run"}),
        ):
            rows[name] = found = sglang_alone(variables)
            required = "ends by itself, its last lines say that the cache rank is missing"
            checks.add(name, _short(found), required, names_cache_rank(found))
    with ours({"selection": SMALL}) as server:
        for name, found in too_long(server, long_ids()).items():
            rows[name] = found
            checks.add(name, found, "HTTP 400, others undisturbed", found["pass"])
    return checks.result(rows=rows)


def serve(args: list[str]) -> dict[str, Any]:
    """Run ``tandemkv serve`` with arguments that must fail; *started* is what it began."""
    found = _run([sys.executable, "-P", "-c", _WATCHED, "serve", *args], {})
    # standard output comes after standard error: a usage error has both
    text, ended, started = found["text"].partition("started:")
    first, *rest = started.splitlines() or [""]
    return found | {
        "text": "\n".join([text.rstrip(), *rest]).strip(),
        "started": first.split() if ended else None,
    }


def sglang_alone(variables: dict[str, str]) -> dict[str, Any]:
    """Start SGLang with our backend, but no cache rank."""
    argv = [
        *(sys.executable, "-P", "-W", "ignore", "-m", "sglang.launch_server"),
        *("--model-path", model_dir(), "--attention-backend", "tandemkv", "--device", "cpu"),
    ]
    return _run(argv, {"SGLANG_PLUGINS": "tandemkv"} | variables)


def is_clear(found: dict[str, Any], word: str) -> bool:
    """Whether a refusal came before anything was started, is short, and names what is wrong."""
    return (
        found["code"] not in (0, None)
        and word in found["text"]
        and "Traceback" not in found["text"]
        and len(found["text"].splitlines()) <= 12
        and found["started"] == []
    )


def names_cache_rank(found: dict[str, Any]) -> bool:
    """Whether SGLang ended and its last lines say what to start."""
    last = "\n".join(found["text"].splitlines()[-6:])
    return found["code"] not in (0, None) and ("cache rank" in last or "cache-rank" in last)


def unsupported_model(path: Path, change: dict[str, Any]) -> Path:
    """Make a model directory whose configuration has `change`."""
    path.mkdir()
    config = json.loads((Path(model_dir()) / "config.json").read_text()) | change
    (path / "config.json").write_text(json.dumps(config))
    shutil.copy(Path(model_dir()) / "tokenizer.json", path)
    return path


def occupy(taken: socket.socket) -> int:
    """Listen on a port."""
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    return int(taken.getsockname()[1])


def too_long(server: Server, ids: list[int]) -> dict[str, dict[str, Any]]:
    """Prompts longer than the context while another request decodes."""
    params = {"max_new_tokens": 80, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": ids[:200], "sampling_params": params}
    life_cycle.after_flush(server)  # a cached prompt is seeded from fewer queries
    alone = server.generate(**body)["output_ids"]
    life_cycle.after_flush(server)
    prompt = [5] * 9000
    rows = {}
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(server.generate, **body)
        for name, path, bad in (
            ("prompt longer than the context, native", "/generate", {"input_ids": prompt}),
            (
                "prompt longer than the context, OpenAI",
                "/v1/completions",
                {"model": "default", "prompt": prompt, "max_tokens": 4},
            ),
        ):
            code, text = server.post(path, bad)
            rows[name] = {"code": code, "text": str(text)[:300]}
        other = pending.result()["output_ids"]
    life_cycle.wait_idle(server, 10.0)
    left = life_cycle.after_flush(server)
    for row in rows.values():
        row["other_request_is_the_same"] = other == alone
        row["slots_left"] = left["slots_used"]
        row["pass"] = row["code"] == 400 and other == alone and left["slots_used"] == 0
    return rows


def _run(argv: list[str], variables: dict[str, str]) -> dict[str, Any]:
    start = time.monotonic()
    try:
        done = subprocess.run(
            argv,
            env=environment() | variables,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
            cwd="/",
        )
        code, text = done.returncode, (done.stderr + done.stdout).strip()
    except subprocess.TimeoutExpired:
        code, text = None, "still running"
    return {"code": code, "seconds": round(time.monotonic() - start, 1), "text": text[-20000:]}


def _short(found: dict[str, Any]) -> dict[str, Any]:
    lines = found["text"].splitlines() or [""]
    return {"code": found["code"], "seconds": found["seconds"], "last_line": lines[-1][:300]}
